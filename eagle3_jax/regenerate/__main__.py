"""prompts -> conversations that the target itself answered.

A draft head learns to foretell what the target says, not what is right. Answers go to `conversations/*.jsonl.partial`
as they finish, so that a run that was killed goes on where it was. Conversations that the target had in another engine
(`prepare`'s source `conversations`) are passed on. Each replica of the mesh answers its share with an engine a row,
into a log of its own; with `regenerate.servers` process 0 asks those instead. Dialogues begin as there is room, in the
prompts' order, and end in any. What became no conversation is in `conversations/rejects.jsonl`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tqdm

from eagle3_jax.config import SPLITS, RegenerateConfig, RunConfig, run_file
from eagle3_jax.data import lines
from eagle3_jax.decoding import data_parallel
from eagle3_jax.decoding.engine import Asked, Engine, SamplingParams
from eagle3_jax.decoding.request import Output
from eagle3_jax.mesh import Replica, make_mesh, own_replica
from eagle3_jax.models.checkpoint.fetch import Target, cache_folder, load_target
from eagle3_jax.regenerate.dialogue import Answer, Answers, Counts, Dialogue, Known, sampling
from eagle3_jax.runs import command, command_line, disk, manifest, processes

REJECTS = "rejects.jsonl"


def regenerate(config: RunConfig) -> None:
    """Runs the verb; does nothing when its output is there already.

    Raises ManifestError: unfinished prompts, or the folder holds other work. ValueError: servers do not hold the target
    or do not answer, or no prompt could be answered.
    """
    prompts, folder, settings = config.folder("prepare"), config.folder("regenerate"), config.regenerate
    made_from = manifest.read(prompts, made_by="prepare")
    open_ends = any(dialogue.end is None for dialogue in _dialogues(prompts))
    decodes = open_ends and not settings.servers
    replica = None if settings.servers else own_replica(make_mesh(config.mesh))
    target = load_target(config.target, None if replica is None else replica.mesh, only=None if decodes else ())
    identity = {
        "verb": "regenerate",
        "prompts": manifest.fingerprint(made_from),
        "given": _given(made_from["identity"]),
        # Answers do not depend on which hidden states are kept later.
        "target": {field: value for field, value in target.identity.items() if field != "aux_layers"},
        "seed": config.seed,
        "temperature": run_file.to_dict(settings)["temperature"],
        "max_tokens": settings.max_tokens,
        "max_length": settings.max_length,
    }
    with manifest.claim(folder, identity) as finished:
        if finished:
            processes.say(f"regenerate: {folder} is finished already")
        else:
            rate = 0.0
            if open_ends and replica is None:
                rate = processes.agree(lambda: asyncio.run(_ask_servers(config, target, folder)))
            elif open_ends and replica is not None:
                rate = _ask_engines(config, target, replica, folder)
            processes.agree(lambda: _finish(config, target.tokenizer, folder, rate))
        processes.agree(lambda: list(map(disk.remove, _logs(folder))))


def _given(prepared: dict[str, Any]) -> dict[str, str]:
    """Path -> sha256 of the files whose conversations another engine had with the target."""
    sources = prepared.get("prepare", {}).get("sources", [])
    return {s["path"]: prepared["inputs"][s["path"]] for s in sources if s["kind"] == "conversations"}


def _dialogues(prompts: disk.Path, *splits: str) -> Iterator[Dialogue]:
    """The dialogues of some splits, all of them without a name; none of them begun."""
    prepared = manifest.load(prompts / manifest.NAME)
    for split in splits or SPLITS:
        for path in manifest.shards(prompts, prepared, f"{split}.jsonl"):
            yield from map(Dialogue.begin, disk.read_jsonl(path))


def _ask_engines(config: RunConfig, target: Target, replica: Replica, folder: disk.Path) -> float:
    """Has this process's engines answer the share of its replica. Returns all processes' tokens a second."""
    engines, prompts = load_engines(config.regenerate, target, replica), config.folder("prepare")
    leads = replica.processes[0] == processes.index()  # the other processes of a replica say the same
    with Answers(_logs(folder)) as known:
        processes.barrier()  # from here on logs grow
        share = itertools.islice(_dialogues(prompts), replica.index, None, replica.count)
        turns = (_turns(prompts) - len(known)) // replica.count
        with _Stored(folder, replica.index if leads else None, turns) as stored:
            converse(engines, config.regenerate, share, known, config.seed, stored.add)
    rates = {"tokens_per_second": stored.rate()} if leads else {}
    return processes.total(rates)["tokens_per_second"]  # all is answered


def load_engines(settings: RegenerateConfig, target: Target, replica: Replica) -> list[Engine]:
    """Loads an engine for each row of a replica, over a target on its mesh; it measures draft sizes to choose among."""
    sizes: Any = None if settings.draft == "none" else settings.draft, "auto", settings.batch_size, settings.max_length
    how: Any = {"memory_fraction": settings.memory_fraction, "sample_drafts": False}
    engines = [Engine.load(row, *sizes, **how) for row in data_parallel.targets(target, replica)]
    with processes.among(replica.processes):
        for engine in engines:  # one behind the other: times are measured
            if len(engine.tiers.tiers) > 1:
                engine.warm_up(cache_folder() / "programs", progress=sys.stderr.isatty() or processes.say)
    return engines


def converse(
    engines: Sequence[Engine],
    settings: RegenerateConfig,
    dialogues: Iterable[Dialogue],
    known: Known,
    seed: int,
    store: Callable[[Answer], None],
) -> None:
    """Has every turn answered that is not known; a dialogue's next turn follows its last answer at once.

    `store` takes each new answer before anything follows it, one at a time. Raises Stopped: a signal came.
    """
    tokenizer = engines[0].tokenizer

    def asked(dialogue: Dialogue, known: Known) -> Asked[Dialogue] | None:
        if (ids := dialogue.next_prompt(known, tokenizer, settings)) is None:
            return None
        return dialogue, ids, SamplingParams(**sampling(settings, seed, dialogue.prompt["id"], dialogue.turn))

    def first() -> Iterator[Asked[Dialogue]]:
        for dialogue in dialogues:
            if (item := asked(dialogue, known)) is not None:
                yield item

    def take(dialogue: Dialogue, output: Output) -> Asked[Dialogue] | None:
        text, ids, end = output.text, output.token_ids, output.finish_reason
        failed, thoughts, why = end == "error", output.reasoning, output.error or ""
        answer = Answer(dialogue.prompt["id"], dialogue.turn, text, ids, end == "length", failed, thoughts, why=why)
        store(answer)
        command.stop_point()
        dialogue.take(answer)
        return asked(dialogue, {})

    data_parallel.converse(engines, first(), take)


async def _ask_servers(config: RunConfig, target: Target, folder: disk.Path) -> float:
    from eagle3_jax.regenerate import fleet  # of an extra

    prompts = config.folder("prepare")
    async with fleet.gathered(config.regenerate, target) as servers:
        with Answers(_logs(folder)) as known:
            left = _turns(prompts) - len(known)
            with _Stored(folder, "servers", left, lambda: f", {servers.well} servers") as stored:
                await servers.converse(_dialogues(prompts), known, config.seed, stored.add)
    return stored.rate()


def _turns(prompts: disk.Path) -> int:
    return sum(dialogue.turns for dialogue in _dialogues(prompts) if dialogue.end is None)


class _Stored(contextlib.AbstractContextManager["_Stored"]):
    """New answers, of so many turns, on their way into the log of `writer` (None: into none)."""

    def __init__(
        self, folder: disk.Path, writer: int | str | None, turns: int, more: Callable[[], str] = lambda: ""
    ) -> None:
        self._log = None if writer is None else disk.Log(folder / f"answers.{writer}.jsonl.partial")
        self._progress, self._more = tqdm.tqdm(total=turns, unit=" answers", disable=writer is None), more
        self._tokens, self._start = 0, time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._progress.close()
        if self._log is not None:
            self._log.close()

    def add(self, answer: Answer) -> None:
        if self._log is not None:
            self._log.append(dataclasses.asdict(answer))
        self._tokens += len(answer.token_ids or ())
        self._progress.set_postfix_str(f"{self.rate():.0f} tokens/s{self._more()}", refresh=False)
        self._progress.update()

    def rate(self) -> float:
        return self._tokens / (time.monotonic() - self._start)


def _finish(config: RunConfig, tokenizer: Any, folder: disk.Path, rate: float) -> None:
    """All answers are in the logs: puts the conversations together, in the prompts' order."""
    results: dict[str, Any] = {}
    with Answers(_logs(folder)) as known, lines.written(folder / REJECTS) as reject:
        for split in SPLITS:
            counts = Counts()
            with lines.written(folder / f"{split}.jsonl") as keep:
                for dialogue in _dialogues(config.folder("prepare"), split):
                    if dialogue.next_prompt(known, tokenizer, config.regenerate) is not None:
                        raise ValueError(f"{folder}: got no answer to {dialogue.prompt['id']}, expected all of them")
                    counts.add(dialogue)
                    if dialogue.is_conversation:
                        keep(dialogue.conversation())
                    else:
                        reject({"split": split} | dialogue.reject())
            results[split] = counts.summary()
    if not results["train"]["conversations"]:
        raise ValueError(f"{config.folder('prepare')}: none of the prompts was answered: {results['train']['dropped']}")
    files = [*(f"{split}.jsonl" for split in SPLITS), REJECTS]
    manifest.finish(folder, files=files, **results, tokens_per_second=rate or None)


def _logs(folder: disk.Path) -> list[disk.Path]:
    return sorted(folder.glob("*.*.jsonl.partial"))


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    config, _ = command_line.read("regenerate", argv)
    if config.regenerate.servers:
        command.require("report")
    with command.run("regenerate"):
        regenerate(config)


if __name__ == "__main__":
    main()
