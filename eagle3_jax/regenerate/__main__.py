"""prompts -> conversations that the target itself answered.

`python -m eagle3_jax.regenerate --config configs/quickstart.yaml` keeps the users' turns and lets the target answer
them: a draft head learns to foretell what the target says, not what is right. Answers go to
`conversations/*.jsonl.partial` as they finish, so that a run that was killed goes on where it was. Conversations that
the target had in another engine (`prepare`'s source `conversations`) are passed on. Each replica of the mesh
answers its share with an engine a row, into a log of its own; a rerun may have another number of replicas. With
`regenerate.servers` process 0 asks those instead. What became no conversation is in `conversations/rejects.jsonl`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tqdm

from eagle3_jax import config as configs
from eagle3_jax.decoding import data_parallel
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.mesh import Replica, make_mesh, own_replica
from eagle3_jax.models.checkpoint.fetch import Target, load_target
from eagle3_jax.regenerate.answers import Answers
from eagle3_jax.regenerate.dialogue import Answer, Counts, Dialogue
from eagle3_jax.regenerate.engines import Answerer
from eagle3_jax.runs import command, command_line, disk, manifest, processes

REJECTS = "rejects.jsonl"


def regenerate(config: configs.RunConfig) -> None:
    """Runs the verb; does nothing when its output is there already.

    Raises:
        ManifestError: unfinished prompts, or the folder holds other work.
        ValueError: regenerate.max_length is beyond the target's, servers that do not hold the target or do not answer,
            or no prompt could be answered.
    """
    prompts, folder, settings = config.folder("prepare"), config.folder("regenerate"), config.regenerate
    made_from = manifest.read(prompts, made_by="prepare")
    open_ends = any(dialogue.end is None for split in configs.SPLITS for dialogue in _dialogues(prompts, split))
    decodes = open_ends and not settings.servers
    replica = None if settings.servers else own_replica(make_mesh(config.mesh))
    target = load_target(config.target, replica and replica.mesh, only=None if decodes else ())
    identity = {
        "verb": "regenerate",
        "prompts": manifest.fingerprint(made_from),
        "given": _given(made_from["identity"]),
        # What is said does not depend on which hidden states are kept later.
        "target": {field: value for field, value in target.identity.items() if field != "aux_layers"},
        "seed": config.seed,
        "temperature": configs.to_dict(settings)["temperature"],
        "max_tokens": settings.max_tokens,
        "max_length": settings.max_length,
    }
    with manifest.claim(folder, identity) as finished:
        if finished:
            processes.say(f"regenerate: {folder} is finished already")
        else:
            rates: dict[str, float] = dict.fromkeys(configs.SPLITS, 0.0)
            if open_ends and replica is None:
                rates = processes.agree(lambda: asyncio.run(_ask_servers(config, target, folder)))
            elif open_ends and replica is not None:
                rates = _ask_engines(config, target, replica, folder)
            processes.agree(lambda: _finish(config, target.tokenizer, folder, rates))
        processes.agree(lambda: _remove_logs(folder))


def _given(prepared: dict[str, Any]) -> dict[str, str]:
    """Path -> sha256 of the files whose conversations another engine had with the target."""
    sources = prepared.get("prepare", {}).get("sources", [])
    return {s["path"]: prepared["inputs"][s["path"]] for s in sources if s["kind"] == "conversations"}


def _dialogues(prompts: disk.Path, split: str) -> Iterator[Dialogue]:
    """The dialogues of a split, none of them begun."""
    prepared = manifest.load(prompts / manifest.NAME)
    for path in manifest.shards(prompts, prepared, f"{split}.jsonl"):
        yield from map(Dialogue.begin, disk.read_jsonl(path))


def _ask_engines(config: configs.RunConfig, target: Target, replica: Replica, folder: disk.Path) -> dict[str, float]:
    """Has this process's engines answer the share of its replica. Returns all processes' tokens a second, by split."""
    sizes = config.regenerate.batch_size, config.regenerate.max_length
    engines = [Engine.load(row, None, "auto", *sizes) for row in data_parallel.targets(target, replica)]
    known: dict[str, dict[tuple[str, int], Answer]] = {}
    for split in configs.SPLITS:
        with _answers(folder, split) as earlier:
            known[split] = dict(earlier)
    processes.barrier()  # from here on logs grow
    leads = replica.leader == processes.index()
    rates: dict[str, float] = {}
    for split in configs.SPLITS:
        # The other processes of a replica say the same as its leader, which writes it.
        log = _log(folder, split, replica.index) if leads else None
        answerer = Answerer(engines, config.regenerate, config.seed, known[split], log)
        dialogues = list(_dialogues(config.folder("prepare"), split))
        answerer.converse(dialogues[replica.index :: replica.count], split)
        rates[split] = answerer.rate()
    return processes.total(rates if leads else {})  # all is answered


async def _ask_servers(config: configs.RunConfig, target: Target, folder: disk.Path) -> dict[str, float]:
    """Has the servers answer. Returns tokens a second, by split."""
    from eagle3_jax.regenerate import fleet  # of an extra

    rates: dict[str, float] = {}
    async with fleet.gathered(config.regenerate, target) as servers:
        for split in configs.SPLITS:
            with _answers(folder, split) as known, disk.Log(_log(folder, split, "servers")) as log:
                stored = _Stored(log, split, lambda: servers.well)
                with stored.progress:
                    dialogues = _dialogues(config.folder("prepare"), split)
                    await servers.converse(dialogues, known, config.seed, stored.add)
            rates[split] = stored.rate()
    return rates


class _Stored:
    """New answers of servers, on their way into a log."""

    def __init__(self, log: disk.Log, split: str, well: Callable[[], int]) -> None:
        self._log, self._well = log, well
        self._tokens, self._start = 0, time.monotonic()
        self.progress = tqdm.tqdm(desc=split, unit=" answers")

    def add(self, answer: Answer) -> None:
        self._log.append(dataclasses.asdict(answer))
        self._tokens += len(answer.token_ids or ())
        self.progress.set_postfix_str(f"{self.rate():.0f} tokens/s, {self._well()} servers", refresh=False)
        self.progress.update()

    def rate(self) -> float:
        """Tokens a second, of those whose ids are known."""
        return self._tokens / (time.monotonic() - self._start)


def _finish(config: configs.RunConfig, tokenizer: Any, folder: disk.Path, rates: dict[str, float]) -> None:
    """All answers are in the logs: puts the conversations together, in the prompts' order."""
    results: dict[str, Any] = {}
    with disk.atomic(folder / REJECTS) as rejected, rejected.open("w", encoding="utf-8") as rejects:
        for split in configs.SPLITS:
            counts = Counts()
            with (
                _answers(folder, split) as known,
                disk.atomic(folder / f"{split}.jsonl") as temporary,
                temporary.open("w", encoding="utf-8") as stream,
            ):
                for dialogue in _dialogues(config.folder("prepare"), split):
                    if dialogue.next_prompt(known, tokenizer, config.regenerate) is not None:
                        raise ValueError(f"{folder}: got no answer to {dialogue.prompt['id']}, expected all of them")
                    counts.add(dialogue)
                    if dialogue.is_conversation:
                        stream.write(json.dumps(dialogue.conversation(), ensure_ascii=False) + "\n")
                    else:
                        rejects.write(json.dumps({"split": split} | dialogue.reject(), ensure_ascii=False) + "\n")
            results[split] = counts.said() | {"tokens_per_second": rates[split] or None}
    if not results["train"]["conversations"]:
        raise ValueError(f"{config.folder('prepare')}: none of the prompts was answered: {results['train']['dropped']}")
    manifest.finish(folder, files=[*(f"{split}.jsonl" for split in configs.SPLITS), REJECTS], **results)


def _log(folder: disk.Path, split: str, writer: int | str) -> disk.Path:
    return folder / f"{split}.{writer}.jsonl.partial"


def _answers(folder: disk.Path, split: str) -> Answers:
    """All answers that are in the logs, of whatever run and writer. None of them is being written."""
    return Answers(sorted(folder.glob(_log(folder, split, "*").name)))


def _remove_logs(folder: disk.Path) -> None:
    for split in configs.SPLITS:
        for log in folder.glob(_log(folder, split, "*").name):
            disk.remove_log(log)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    config, _ = command_line.read("regenerate", argv)
    if config.regenerate.servers:
        command.require("report")
    with command.run("regenerate"):
        regenerate(config)


if __name__ == "__main__":
    main()
