"""prompts -> clean, de-duplicated prompts in train.jsonl and held_out.jsonl.

`python -m eagle3_jax.prepare --config configs/quickstart.yaml` reads the sources of the section `prepare`, normalises
and filters their prompts, and writes `prompts/{train,held_out,rejects}.jsonl` with a manifest of the counts.
"""

from __future__ import annotations

import collections
import json
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tqdm

from eagle3_jax import config as configs
from eagle3_jax.data import filters, sources
from eagle3_jax.prepare import self_prompting
from eagle3_jax.prepare.self_prompting import Written
from eagle3_jax.runs import command, command_line, disk, manifest, processes

TRAIN, HELD_OUT, REJECTS = "train.jsonl", "held_out.jsonl", "rejects.jsonl"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the verb from its command line."""
    config, _ = command_line.read("prepare", argv)
    command.require("prepare")
    with command.run("prepare"):
        prepare(config)


def prepare(config: configs.RunConfig) -> None:
    """Prepares the prompts of a run; does nothing when they are finished.

    Raises:
        ValueError: fewer than two usable prompts, or other work in the folder (ManifestError).
        OSError: an unreadable source file.
    """
    folder = config.folder("prepare")
    with manifest.claim(folder, _identity(config)) as finished:
        if finished:
            processes.say(f"prepare: {folder} is finished already")
        else:
            written = {
                number: self_prompting.write(config, source, folder / f"self_{number}.jsonl")
                for number, source in enumerate(config.prepare.sources)
                if isinstance(source, configs.SelfSource)
            }
            processes.agree(lambda: _prepare(config, folder, written))
        processes.agree(lambda: _remove_logs(folder))


def _prepare(config: configs.RunConfig, folder: disk.Path, written: dict[int, list[Written]]) -> None:
    """Filters and writes the prompts. `written`: index of a source of kind `self` -> what the target wrote for it."""
    kept, rejects, counts = _filter(_read_all(config, written), config.prepare)
    asked = [filters.asked(prompt["messages"], prompt.get("tools", ())) for prompt in kept]
    hashes = list(map(filters.opening_hash, asked))
    if len(set(hashes)) == 1:  # one instruction begins all prompts: split by what follows it
        hashes = list(map(filters.content_hash, asked))
    held_out = filters.split(hashes, config.prepare.held_out)
    parts = {
        TRAIN: [prompt for prompt, held in zip(kept, held_out, strict=True) if not held],
        HELD_OUT: [prompt for prompt, held in zip(kept, held_out, strict=True) if held],
        REJECTS: rejects,
    }
    for name, records in parts.items():
        _write_jsonl(folder / name, records)
    categories = {
        name.removesuffix(".jsonl"): dict(collections.Counter(prompt["category"] for prompt in parts[name]))
        for name in (TRAIN, HELD_OUT)
    }
    manifest.finish(
        folder,
        prompts={name.removesuffix(".jsonl"): len(records) for name, records in parts.items()},
        categories=categories,
        files=(TRAIN, HELD_OUT),
        **counts,
    )
    print(
        f"prepare: {len(parts[TRAIN])} to train, {len(parts[HELD_OUT])} held out, {len(rejects)} rejected (why: "
        f"{REJECTS}) -> {folder}"
    )


def _identity(config: configs.RunConfig) -> dict[str, Any]:
    section = config.prepare
    identity: dict[str, Any] = {"verb": "prepare", "prepare": configs.to_dict(section), "seed": config.seed}
    identity["inputs"] = {}
    files = [s.path for s in section.sources if isinstance(s, configs.JsonlSource | configs.ConversationsSource)]
    for name, paths in (("sources: path", files), ("benchmarks", section.benchmarks)):
        for path in paths:
            try:
                identity["inputs"][path] = disk.digest(path)
            except OSError as error:
                raise ValueError(f"prepare.{name}: got {path!r} ({error.strerror})") from error
    if any(isinstance(source, configs.SelfSource) for source in section.sources):
        identity["target"] = configs.to_dict(config.target)
    return identity


def _read_all(
    config: configs.RunConfig, written: dict[int, list[Written]]
) -> Iterator[tuple[str, sources.Prompt | sources.Reject]]:
    """Yields (label, record) from every source, up to its limit."""
    for number, source in enumerate(config.prepare.sources):
        if isinstance(source, configs.PackagedSource):
            label, records = "packaged", sources.packaged()
        elif isinstance(source, configs.JsonlSource):
            label, records = f"jsonl:{pathlib.Path(source.path).name}", sources.jsonl(source.path, source.category)
        elif isinstance(source, configs.ConversationsSource):
            label = f"conversations:{pathlib.Path(source.path).name}"
            records = sources.conversations(source.path, source.category)
        elif isinstance(source, configs.TfdsSource):
            label = f"tfds:{source.name}"
            records = sources.tfds(source.name, source.field, source.split, source.category)
        else:
            label, records = "self", sources.self_written(written[number], source.category, source.system)
        limit = source.count if isinstance(source, configs.SelfSource) else source.limit
        prompts = 0
        for record in records:
            if isinstance(record, dict):
                if prompts == limit:
                    break
                prompts += 1
            yield label, record


def _filter(
    records: Iterable[tuple[str, sources.Prompt | sources.Reject]], section: configs.PrepareConfig
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Returns the kept prompts, the rejects (JSON-ready), and the counts for the manifest."""
    kept: list[dict[str, Any]] = []
    rejects: list[dict[str, Any]] = []
    read: collections.Counter[str] = collections.Counter()
    personal: collections.Counter[str] = collections.Counter()
    duplicates, benchmarks = filters.Duplicates(section.near_duplicate), filters.Benchmarks(section.benchmarks)
    for label, record in tqdm.tqdm(records, desc="prepare", unit=" prompts", mininterval=1.0):
        command.stop_point()
        read[label] += 1
        if isinstance(record, sources.Reject):
            rejects.append({"source": label, "line": record.line, "reason": record.reason, "text": record.text})
            continue
        messages, tools = record["messages"], record.get("tools", [])
        reason = filters.refuse(messages, section.max_chars, tools) or benchmarks.check(filters.asked(messages))
        if reason is None:
            messages, found = filters.redact(messages)
            tools, of_tools = filters.redact_json(tools)
            found += of_tools
            personal += found
            if found and section.personal_data == "drop":
                reason = "personal data"
        asked = filters.asked(messages, tools)
        reason = reason or duplicates.check(asked)
        if reason is None:
            identifier = f"{record['category']}-{filters.content_hash(asked)[:16]}"
            more = {"tools": tools} if tools else {}
            more |= {"truncated": record["truncated"]} if "truncated" in record else {}
            kept.append({"id": identifier, "category": record["category"], "messages": messages} | more)
        else:
            text = filters.excerpt(filters.content(messages))
            rejects.append({"source": label, "line": record["line"], "reason": reason, "text": text})
    counts = {
        "sources": dict(read),
        # A benchmark with no match is counted as 0.
        "rejected": dict.fromkeys(benchmarks.reasons, 0) | collections.Counter(reject["reason"] for reject in rejects),
        "personal_data": dict(personal),
    }
    return kept, rejects, counts


def _remove_logs(folder: disk.Path) -> None:
    """Removes the logs of self-prompting: raw output of the target, with the personal data that it invented."""
    for path in folder.glob("self_*.jsonl"):
        disk.remove_log(path)


def _write_jsonl(path: disk.Path, records: Iterable[Any]) -> None:
    with disk.atomic(path) as temporary, temporary.open("w", encoding="utf-8") as stream:
        for record in records:
            stream.write(json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
