"""What an engine accepts of an exported head, beside what it should: `python -m eagle3_jax.export --check`.

A clean load proves nothing: most wrong exports load, and draft nonsense. Rounds and accepted drafts by position tell
(in float32 they are a function of the files alone). They are predicted here from the written files, by this package's
engine drafting chains; another engine on the same prompts must count exactly the same, and both must say what greedy
decoding says without a head.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
from typing import Any

from eagle3_jax import command, manifest, vllm_process
from eagle3_jax.config import DraftTree, RunConfig
from eagle3_jax.data import sources
from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.decoding.measure import timed
from eagle3_jax.formats import files
from eagle3_jax.formats.shipped import chosen_draft
from eagle3_jax.models import chat_template
from eagle3_jax.models.registry import Target, load_target

ENGINES = ("numbers", "vllm")


class CheckError(ValueError):
    """The engine did not do with the head what the files promise; the message says where they part."""


@dataclasses.dataclass(frozen=True)
class Counted:
    """What one engine did with the prompts.

    Attributes:
        plain: answers without the head, token ids. answers: with it.
        accepted: of the rounds, in how many the draft at position 1, 2, ... was accepted.
        seconds: with the head; plain_seconds: without it.
    """

    plain: list[list[int]]
    answers: list[list[int]]
    rounds: int
    accepted: list[int]
    seconds: float
    plain_seconds: float

    def column(self) -> dict[str, Any]:
        tokens, plain = sum(map(len, self.answers)), sum(map(len, self.plain))
        return {
            "rounds": self.rounds,
            "accepted_per_position": self.accepted,
            "tau": 1 + sum(self.accepted) / max(self.rounds, 1),
            "identical": sum(a == b for a, b in zip(self.answers, self.plain, strict=True)),
            "tokens_per_second": {"vanilla": plain / self.plain_seconds, "speculative": tokens / self.seconds},
        }


def run(
    config: RunConfig,
    prompts_path: str | pathlib.Path,
    engine: str,
    python: str | pathlib.Path | None = None,
    target: Target | None = None,
) -> dict[str, Any]:
    """Checks the head that `evaluate.draft` names, or the run's export, and writes `<run_dir>/check/<engine>.json`.

    A chain of `evaluate.tree.num_steps`, greedy, `evaluate.limit` prompts, `evaluate.max_tokens` each: past the end of
    sequence, behind which engines count differently.

    Args:
        engine: "numbers" predicts alone; "vllm" runs vLLM too.
        python: of the environment that has vLLM.

    Returns:
        The report: what was asked, and a column for each engine.

    Raises:
        CheckError: the counters or the answers differ; the report is written all the same.
        ValueError: no usable prompts. DraftFormatError, ManifestError: see `load_draft`.
    """
    settings = config.evaluate
    target = target or load_target(config.target)
    _, draft = chosen_draft(settings.draft, config.folder("export"), target)
    if draft is None:
        raise ValueError("evaluate.draft: got 'lookup', expected a head")
    steps = settings.tree.num_steps if isinstance(settings.tree, DraftTree) else 3
    length = settings.max_tokens + steps + 1  # vLLM drafts nothing where the drafts would not fit
    room = target.model.config.max_position_embeddings - length
    asked = sources.read_file(prompts_path)[0]
    prompts = [chat_template.prompt_ids(target.tokenizer, prompt["messages"]) for prompt in sources.spread(asked, None)]
    prompts = [ids for ids in prompts if len(ids) <= room][: settings.limit]
    if not prompts:
        raise ValueError(f"--prompts {prompts_path}: got none within the {room} tokens that evaluate.max_tokens leaves")
    request = {
        "target": str(target.folder),
        "draft": str(draft),
        "num_speculative_tokens": steps,
        "prompts": prompts,
        "max_tokens": settings.max_tokens,
        "ignore_eos": True,
        "max_model_len": max(map(len, prompts)) + length,
        "batch_size": settings.batch_size,
        "dtype": config.target.dtype,
        "turns": 1,
    }
    columns = {"numbers": predict(target, request)}
    if engine == "vllm":
        assert python is not None
        columns["vllm"] = in_vllm(python, request)
    report = {
        "prompts": {"file": str(prompts_path), "count": len(prompts)},
        **{key: request[key] for key in ("num_speculative_tokens", "max_tokens", "batch_size", "dtype")},
        "target": target.identity,
        "draft": {"folder": str(draft), "files": files.file_digests(draft)},
        "engines": {name: counted.column() for name, counted in columns.items()},
        "hardware": manifest.hardware(),
        "versions": manifest.versions(),
    }
    folder = pathlib.Path(config.run_dir, "check")
    folder.mkdir(parents=True, exist_ok=True)
    manifest.write_json(folder / f"{engine}.json", report)
    if problems := _problems(columns):
        raise CheckError(f"{draft}: not what the files promise:\n  " + "\n  ".join(problems))
    return report


def predict(target: Target, request: dict[str, Any]) -> Counted:
    """What the written files promise, by this package's engine."""
    steps, sizes = request["num_speculative_tokens"], (request["batch_size"], request["max_model_len"])
    chain = DraftTree(num_steps=steps, num_draft_tokens=steps + 1)
    params = SamplingParams(max_tokens=request["max_tokens"], ignore_eos=request["ignore_eos"])
    found = []
    for draft in (None, request["draft"]):
        engine = Engine.load(target, draft, "auto" if draft is None else chain, *sizes, prefix_cache=False)
        engine.generate(request["prompts"], params)  # warms up
        found.append(timed(engine, request["prompts"], params))
    (plain, plain_seconds), (fast, seconds) = found
    stats = [answer.stats for answer in fast]
    return Counted(
        [answer.token_ids for answer in plain],
        [answer.token_ids for answer in fast],
        sum(x.rounds for x in stats),
        [sum(column) for column in zip(*(x.accepted_per_position for x in stats if x.rounds), strict=True)],
        seconds,
        plain_seconds,
    )


def in_vllm(python: str | pathlib.Path, request: dict[str, Any]) -> Counted:
    """What vLLM does: with the head and without, one process each. Raises CheckError where it ends badly."""
    plain, fast = (vllm_answers(python, request | {"draft": draft}) for draft in (None, request["draft"]))
    return Counted(
        plain["answers"], fast["answers"], fast["rounds"], fast["accepted"], fast["seconds"][-1], plain["seconds"][-1]
    )


def vllm_answers(python: str | pathlib.Path, request: dict[str, Any]) -> dict[str, Any]:
    """A request and the answer of `vllm_process`. Raises CheckError where it ends badly."""
    ended = subprocess.run(
        [str(python), str(pathlib.Path(vllm_process.__file__))],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise CheckError(f"vllm ({python}): exit status {ended.returncode}: {ended.stderr[-2000:]}")
    return json.loads(ended.stdout.splitlines()[-1])


def _problems(columns: dict[str, Counted]) -> list[str]:
    """Where an engine parts from the prediction, or from greedy decoding without the head."""
    expected, problems = columns["numbers"], []
    for name, counted in columns.items():
        for field in ("rounds", "accepted"):
            got, wanted = getattr(counted, field), getattr(expected, field)
            if got != wanted:
                problems.append(f"{name}: {field}: got {got}, expected {wanted}")
        differ = [i for i, (a, b) in enumerate(zip(counted.answers, counted.plain, strict=True)) if a != b]
        if differ:
            problems.append(f"{name}: answers: {len(differ)} of {len(counted.plain)} are not plain greedy decoding's")
        if counted.plain != expected.plain:
            problems.append(f"{name}: plain greedy answers are others than this package's: is it the same target?")
    return problems


def table(report: dict[str, Any]) -> str:
    """The columns side by side, as fixed-width text."""
    names = list(report["engines"])
    columns = [report["engines"][name] for name in names]
    rows: list[tuple[str, ...]] = [("", *names), ("rounds", *(str(x["rounds"]) for x in columns))]
    for i in range(report["num_speculative_tokens"]):
        rows.append((f"accepted at {i + 1}", *(str(x["accepted_per_position"][i]) for x in columns)))
    rows.append(("tau", *(f"{x['tau']:.3f}" for x in columns)))
    rows.append(("identical", *(f"{x['identical']}/{report['prompts']['count']}" for x in columns)))
    for way in ("vanilla", "speculative"):
        rows.append((f"{way}, tokens/s", *(f"{x['tokens_per_second'][way]:.1f}" for x in columns)))
    return "\n".join(command.aligned(rows))
