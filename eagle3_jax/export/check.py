"""`python -m eagle3_jax.export --check`: compares the drafts that an engine accepts with those that it should accept.

Most wrong exports load, and draft nonsense. Rounds and accepted drafts by position, in float32 a function of the files
alone, show it. This package's engine predicts them from the written files, with chains; another engine, and an earlier
report, must have counted the same on the same prompts. All answers must equal greedy decoding without a head. In
bfloat16 differences are no error. Near the end of an answer, llama.cpp drafts what `max_tokens` leaves room for beside
the target's own token; beside it this package's rounds are counted so too (`within_limit`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any

from gguf import GGUFReader

from eagle3_jax.acceptance import AcceptanceCounts
from eagle3_jax.config import DraftTree, RunConfig
from eagle3_jax.data import sources
from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.decoding.measure.compare import timed
from eagle3_jax.export import engine_process
from eagle3_jax.export.write_target import write_gguf
from eagle3_jax.formats import draft_models, files, kinds
from eagle3_jax.formats.blocks.compatibility import CPU, ENGINES
from eagle3_jax.formats.packaged import chosen_draft
from eagle3_jax.models.checkpoint.fetch import Target, load_target
from eagle3_jax.runs import command, disk, machine

EXACT, LLAMA_CPP = "float32", "llama.cpp"
# Texts of tokens that end an answer in llama.cpp, beside the tokenizer's own (src/llama-vocab.cpp).
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>"),
)
_FORBIDDING = 1e9  # is subtracted from the logits of tokens that cannot come


class CheckError(ValueError):
    """The engine's counters or answers differ from the prediction; the message lists the differences."""


@dataclasses.dataclass(frozen=True)
class Counted:
    """Token ids and seconds of one engine's answers, without the head (`plain`) and with it, and its counters then."""

    plain: list[list[int]]
    answers: list[list[int]]
    counts: AcceptanceCounts
    seconds: float
    plain_seconds: float | None  # None: a server that always drafts, and `plain` is this package's
    repaired: str | None = None  # what the check set right in the engine
    # For each answer the drafts verified, and those accepted; None where the engine counts all answers alone.
    drafts: list[list[int]] | None = None

    def column(self) -> dict[str, Any]:
        tokens, plain = sum(map(len, self.answers)), sum(map(len, self.plain))
        vanilla = None if self.plain_seconds is None else plain / self.plain_seconds
        return {
            "rounds": self.counts.rounds,
            "accepted_per_position": self.counts.accepted,
            "tau": self.counts.tau,
            "identical": sum(a == b for a, b in zip(self.answers, self.plain, strict=True)),
            "tokens_per_second": {"vanilla": vanilla, "speculative": tokens / self.seconds},
            "repaired": self.repaired,
            "drafts": self.drafts,
        }


def run(
    config: RunConfig,
    prompts_path: str | pathlib.Path,
    engine: str,
    where: str | pathlib.Path | None = None,
    target: Target | None = None,
    expect: str | pathlib.Path | None = None,
) -> dict[str, Any]:
    """Checks the head that `evaluate.draft` names, or the run's export, and writes `<run_dir>/check/<engine>.json`.

    Decodes greedily with a chain of `evaluate.tree.num_steps`, or a block head's whole block: `evaluate.limit` prompts,
    `evaluate.max_tokens` each. The end-of-sequence token is ignored, since engines count differently after it. Returns
    the report: what was asked, a column for each engine, and their differences.

    Args:
        engine: "numbers" predicts alone; "vllm" and "llama.cpp" run these too, "sglang" asks a running SGLang server.
        where: the Python of vLLM's or llama.cpp's environment, or the URL of SGLang's server.
        expect: an earlier report of the same prompts, lengths, dtype and target, whose prediction must be equal;
            `<engine>-compared.json` is written.

    Raises CheckError: counters or answers differ in float32 (the report is written all the same), or an engine fails.
    ValueError: no usable prompts, or settings, a head, a target or an expected report that do not fit the engine.
    """
    token_map = config.evaluate.token_map
    if engine != "numbers" and token_map is not None:  # for EAGLE-2 heads; the engines are asked for others
        raise ValueError(f"evaluate.token_map: got {token_map}, expected null: {engine} would draft all tokens")
    if engine == "vllm" and config.evaluate.batch_size != 1:
        # vLLM 0.32.0 on a CPU counted 2,875 rounds with one request at a time, and 2,879 with eight.
        raise ValueError(
            f"evaluate.batch_size: got {config.evaluate.batch_size}, expected 1: what vLLM counts depends on the batch"
        )
    target = target or load_target(config.target)
    _, draft = chosen_draft(config.evaluate.draft, config.folder("export"), target)
    if draft is None or draft_models.is_model(draft):
        raise ValueError(f"evaluate.draft: got {config.evaluate.draft!r}, expected a head")
    request = _request(config, prompts_path, target, draft)
    if engine == LLAMA_CPP:
        request |= _gguf(draft, request["dtype"]) | {"forbidden": _ends(target)}
    asked_for = {
        "prompts": {
            "file": str(prompts_path),
            "count": len(request["prompts"]),
            "tokens": hashlib.sha256(json.dumps(request["prompts"]).encode()).hexdigest(),
        },
        **{key: request[key] for key in ("num_speculative_tokens", "max_tokens", "batch_size", "dtype")},
        "token_map": None if token_map is None else kinds.token_map_digest(token_map),
        "within_limit": engine == LLAMA_CPP,
        "target": target.identity,
    }
    earlier = None if expect is None else _earlier(expect, asked_for)
    columns = {"numbers": predict(target, request, token_map, within_limit=engine == LLAMA_CPP)}
    if engine != "numbers":
        columns[engine] = _asked(engine, str(where), request, columns["numbers"].plain, target)
    every_depth = AcceptanceCounts(0, [0] * request["num_speculative_tokens"])  # answers of one token take no round
    columns = {name: dataclasses.replace(x, counts=x.counts + every_depth) for name, x in columns.items()}
    problems = _problems(columns)
    if earlier is not None:
        counts = AcceptanceCounts(earlier["rounds"], earlier["accepted_per_position"])
        problems += _apart(str(expect), columns["numbers"].counts, counts)
    report = {
        **asked_for,
        "draft": {"folder": str(draft), "files": files.file_digests(draft)},
        "engines": {name: counted.column() for name, counted in columns.items()},
        "differences": problems,
        "hardware": machine.hardware(),
        "versions": machine.versions(),
    }
    folder = config.run_folder / "check"
    disk.write_json(folder / f"{engine}{'' if expect is None else '-compared'}.json", report)
    if problems and request["dtype"] == EXACT:
        raise CheckError(f"{draft}: not what the files promise:\n  " + "\n  ".join(problems))
    return report


def _request(
    config: RunConfig, prompts_path: str | pathlib.Path, target: Target, draft: pathlib.Path
) -> dict[str, Any]:
    settings = config.evaluate
    kind = kinds.of_folder(draft)
    block = kind.block(draft)
    steps = block or (settings.tree.num_steps if isinstance(settings.tree, DraftTree) else 3)
    # vLLM does not draft where the drafts would not fit; a block's rows lie behind the drafts that are verified.
    length = settings.max_tokens + (steps + 1 if block is None else 2 * (steps + 1))
    room = target.model.config.max_position_embeddings - length
    asked = sources.spread(sources.read_file(prompts_path)[0], None)
    fitting, _ = sources.encode(asked, target.tokenizer, room, f"--prompts {prompts_path}")
    prompts = [prompt["prompt"] for prompt in fitting[: settings.limit]]
    return {
        "target": str(disk.local(target.folder)),
        "draft": str(draft),
        "method": kind.method,
        "algorithm": kind.algorithm,
        "num_speculative_tokens": steps,
        "refused_on_cpu": [] if block is None else ENGINES.cannot_run(CPU, kind.read(draft), "vllm"),
        "prompts": prompts,
        "max_tokens": settings.max_tokens,
        "ignore_eos": True,
        "max_model_len": max(map(len, prompts)) + length,
        "batch_size": settings.batch_size,
        "dtype": config.target.dtype,
        "turns": 1,
    }


def _gguf(draft: pathlib.Path, dtype: str) -> dict[str, Any]:
    if (file := files.gguf_file(draft)) is None:
        convert = f"`python -m eagle3_jax.export --from {draft} --to {LLAMA_CPP} DIR --dtype {EXACT}` writes it"
        raise ValueError(f"evaluate.draft: got {draft}, expected a head in the form {LLAMA_CPP}; {convert}")
    if dtype != EXACT:
        raise ValueError(f"target.dtype: got {dtype}, expected {EXACT}, in which llama.cpp gets the target")
    held = sorted({tensor.tensor_type.name for tensor in GGUFReader(file).tensors} - {"F32", "I64"})
    beside = f" beside a head in {', '.join(held)}" if held else ""  # there llama.cpp rounds what it multiplies
    return {"draft_file": str(file), "threads": len(os.sched_getaffinity(0)), "exact": True, "dtype": dtype + beside}


def _ends(target: Target) -> list[int]:
    """Lists the tokens that end an answer in llama.cpp. Where ends are ignored, it forbids these tokens."""
    vocabulary = target.tokenizer.get_vocab()
    return sorted({*target.model.config.eos_token_ids, *(vocabulary[text] for text in _ENDS if text in vocabulary)})


def _earlier(path: str | pathlib.Path, asked: dict[str, Any]) -> dict[str, Any]:
    report = disk.read_json(path)

    def of(values: dict[str, Any]) -> dict[str, Any]:
        picked = {name: values[name] for name in ("num_speculative_tokens", "max_tokens", "dtype", "token_map")}
        picked["within_limit"] = values.get("within_limit", False)
        return {"prompts' tokens": values["prompts"]["tokens"], "target": values["target"]["weights"]} | picked

    try:
        found, column = of(report), report["engines"]["numbers"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"--expect {path}: got no {error}, expected a report of `export --check`") from error
    problems = [
        f"{name}: got {found[name]}, expected {wanted}" for name, wanted in of(asked).items() if found[name] != wanted
    ]
    if problems:
        raise ValueError(f"--expect {path}: a report of something else:\n  " + "\n  ".join(problems))
    return column


def predict(
    target: Target, request: dict[str, Any], token_map: str | None = None, within_limit: bool = False
) -> Counted:
    """Predicts counters and answers by this package's engine, from the written files; for `within_limit` see above."""
    steps, sizes = request["num_speculative_tokens"], (request["batch_size"], request["max_model_len"])
    chain = DraftTree(num_steps=steps, num_draft_tokens=steps + 1)
    bias = dict.fromkeys(request.get("forbidden", ()), -_FORBIDDING)
    params = SamplingParams(max_tokens=request["max_tokens"], ignore_eos=request["ignore_eos"], logit_bias=bias)
    found, each = [], None
    for draft, tree, cut in ((None, "auto", None), (request["draft"], chain, token_map)):
        engine = Engine.load(target, draft, tree, *sizes, token_map=cut, prefix_cache=False)
        engine.generate(request["prompts"], dataclasses.replace(params, max_tokens=steps + 1))  # warms up
        found.append(timed(engine, request["prompts"], params))
    if within_limit:
        streams = (engine.stream(ids, params) for ids in request["prompts"])
        each = [limited([depth for piece in stream for depth in piece.depths], steps) for stream in streams]
    (plain, plain_seconds), (fast, seconds) = found
    counts = AcceptanceCounts.total(answer.stats.counts for answer in fast)
    before, after = ([answer.token_ids for answer in answers] for answers in (plain, fast))
    if each is None:
        return Counted(before, after, counts, seconds, plain_seconds)
    counts, drafts = AcceptanceCounts.total(one for _, one in each), [[n, sum(one.accepted)] for n, one in each]
    return Counted(before, after, counts, seconds, plain_seconds, drafts=drafts)


def limited(depths: Sequence[int], steps: int) -> tuple[int, AcceptanceCounts]:
    """Counts an answer's drafts, and its rounds of `steps` drafts, if none drafts more than the answer has room for.

    `depths`: of each token, see `Piece`. One without room takes the target's token alone, and is no round.
    """
    drafted, found, place = 0, AcceptanceCounts(0, [0] * steps), 1
    while place < len(depths):
        room = min(steps, len(depths) - place - 1)
        taken = next((i for i in range(room) if depths[place + i] != i + 1), room)
        found += AcceptanceCounts(int(room > 0), [1] * taken)
        drafted += room
        place += taken + 1
    return drafted, found


def _asked(engine: str, where: str, request: dict[str, Any], expected: list[list[int]], target: Target) -> Counted:
    """Asks vLLM or llama.cpp, with the head and without, or SGLang, whose plain answers are the `expected` ones."""
    plain: dict[str, Any] = {"answers": expected, "seconds": [None]}
    if engine == "vllm":
        plain, fast = (ask(engine, where, request | {"draft": x}) for x in (None, request["draft"]))
    elif engine == LLAMA_CPP:
        with tempfile.TemporaryDirectory() as folder:
            request = request | {"target": f"{folder}/target.gguf"}
            write_gguf(target, pathlib.Path(request["target"]))
            drafts = (None, request["draft_file"])
            plain, fast = (ask(engine, where, request | {"draft": x}) for x in drafts)
    else:
        from eagle3_jax.export import sglang_server  # needs the extra `report`

        fast = sglang_server.answer(where, request)
    counts, times = AcceptanceCounts(fast["rounds"], fast["accepted"]), (fast["seconds"][-1], plain["seconds"][-1])
    return Counted(plain["answers"], fast["answers"], counts, *times, fast.get("repaired"), fast.get("drafts"))


def ask(engine: str, python: str | pathlib.Path, request: dict[str, Any]) -> dict[str, Any]:
    """Runs `engine_process` and returns its answer to a request. Raises CheckError if it fails."""
    words, text = [str(python), str(engine_process.__file__), engine], json.dumps(request)
    ended = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise CheckError(f"{' '.join(words)}: exit status {ended.returncode}: {ended.stderr[-2000:]}")
    return json.loads(ended.stdout.splitlines()[-1])


def _problems(columns: dict[str, Counted]) -> list[str]:
    expected, problems = columns["numbers"], []
    for name, counted in columns.items():
        problems += _apart(name, counted.counts, expected.counts)
        if differ := sum(a != b for a, b in zip(counted.answers, counted.plain, strict=True)):
            problems.append(f"{name}: answers: {differ} of {len(counted.plain)} are not plain greedy decoding's")
        if counted.plain != expected.plain:
            problems.append(f"{name}: plain greedy answers are others than this package's: is it the same target?")
        for i, (got, wanted) in enumerate(zip(counted.drafts or [], expected.drafts or [], strict=True)):
            if got != wanted:
                problems.append(f"{name}: answer {i}: verified and accepted drafts: got {got}, expected {wanted}")
    return problems


def _apart(name: str, counts: AcceptanceCounts, expected: AcceptanceCounts) -> list[str]:
    pairs = (("rounds", counts.rounds, expected.rounds), ("accepted", counts.accepted, expected.accepted))
    return [f"{name}: {field}: got {got}, expected {wanted}" for field, got, wanted in pairs if got != wanted]


def table(report: dict[str, Any]) -> str:
    """Formats the columns as fixed-width text; for dtypes other than float32 with the number of differences."""
    steps, count = report["num_speculative_tokens"], report["prompts"]["count"]
    ways = ("vanilla", "speculative")
    depths, rates = [f"accepted at {i + 1}" for i in range(steps)], [f"{way}, tokens/s" for way in ways]
    columns: list[tuple[str, ...]] = [("", "rounds", *depths, "tau", "identical", *rates)]
    for name, x in report["engines"].items():
        speeds = ("-" if (speed := x["tokens_per_second"][way]) is None else f"{speed:.1f}" for way in ways)
        counted = (x["rounds"], *x["accepted_per_position"], f"{x['tau']:.3f}", f"{x['identical']}/{count}")
        columns.append((name, *map(str, counted), *speeds))
    lines = command.aligned(list(zip(*columns, strict=True)))
    lines += [f"{name}, repaired: {x['repaired']}" for name, x in report["engines"].items() if x["repaired"]]
    if report["dtype"] != EXACT:
        found = report["differences"]
        lines.append(f"{report['dtype']}: only {EXACT} is required to be equal; differences: {len(found) or 'none'}")
        lines += [f"  {difference}" for difference in found]
    return "\n".join(lines)
