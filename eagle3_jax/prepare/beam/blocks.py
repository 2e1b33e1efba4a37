"""Splits the sources into blocks, one for each worker; the blocks' order is the order of all records."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from eagle3_jax.config import PrepareConfig, RunConfig
from eagle3_jax.data import lines, sources
from eagle3_jax.prepare import reading
from eagle3_jax.prepare.result import line
from eagle3_jax.prepare.self_prompting import Written
from eagle3_jax.runs import disk

_BYTES = 4 << 20  # of a file
_RECORDS = 8192  # of another source
_PLAN = "blocks.json"


@dataclasses.dataclass(frozen=True)
class Block:
    """A part of a source; one without `part` and `copy` is a whole file.

    Attributes:
        number: from 0, in the order of reading.
        source: index in `prepare.sources`.
        part: of the source's file.
        before: number of the line at which the source's limit ends the part.
        copy: file with records of a source that no other process reads.
    """

    number: int
    source: int
    part: lines.Part | None = None
    before: int | None = None
    copy: str | None = None


def plan(config: RunConfig, written: dict[int, list[Written]], work: disk.Path) -> list[Block]:
    """Divides the sources, once: an interrupted run goes on with the same blocks.

    Args:
        written: index of a source of kind `self` -> what the target wrote for it.
        work: folder for the plan and for copies.

    Raises:
        ValueError, OSError: an unreadable source.
    """
    path = work / _PLAN
    if path.exists():
        return [_from_json(values) for values in disk.read_json(path)["blocks"]]
    numbers = itertools.count()
    blocks: list[Block] = []
    for index, source in enumerate(config.prepare.sources):
        if not isinstance(source, reading.FileSource):
            for batch in _batches(reading.read(source, written.get(index)), _RECORDS):
                number = next(numbers)
                copy = work / "copies" / f"{number:05d}.jsonl"
                _copy(copy, batch)
                blocks.append(Block(number, index, copy=str(copy)))
        elif source.path.endswith(".gz"):
            blocks.append(Block(next(numbers), index))
        else:
            before = _line_beyond(source)
            for part in lines.parts(source.path, _BYTES):
                if before is not None and part.first >= before:
                    break
                blocks.append(Block(next(numbers), index, part, before))
    disk.make_folder(work)
    disk.write_json(path, {"blocks": [dataclasses.asdict(block) for block in blocks]})
    return blocks


def read(section: PrepareConfig, block: Block) -> Iterator[reading.Record]:
    """Yields the records of a block. Raises ValueError, OSError: an unreadable source, or one that has changed."""
    source = section.sources[block.source]
    if block.copy is not None:
        for values in disk.read_jsonl(block.copy):
            yield sources.Reject(**values["reject"]) if "reject" in values else values["prompt"]
    elif block.part is None:
        yield from reading.read(source)
    else:
        assert isinstance(source, reading.FileSource)
        for record in reading.read_part(source, block.part):
            number = record.line if isinstance(record, sources.Reject) else record["line"]
            if block.before is None or number < block.before:
                yield record


def _from_json(values: dict[str, Any]) -> Block:
    part = values.pop("part")
    return Block(**values, part=part and lines.Part(**part))


def _batches(records: Iterable[reading.Record], size: int) -> Iterator[list[reading.Record]]:
    iterator = iter(records)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


def _copy(path: disk.Path, records: Iterable[reading.Record]) -> None:
    disk.make_folder(path.parent)
    with disk.atomic(path) as temporary, temporary.open("w", encoding="utf-8") as stream:
        for record in records:
            is_reject = isinstance(record, sources.Reject)
            stream.write(line({"reject": dataclasses.asdict(record)} if is_reject else {"prompt": record}))


def _line_beyond(source: reading.FileSource) -> int | None:
    """Returns the number of the line behind the source's limit of prompts; None where all are within it."""
    if source.limit is None:
        return None
    prompts = (record for record in reading.read_part(source) if isinstance(record, dict))
    beyond = next(itertools.islice(prompts, source.limit, None), None)
    return None if beyond is None else beyond["line"]
