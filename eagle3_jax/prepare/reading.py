"""Reads the records of a run's sources, in order."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Iterator, Sequence

from eagle3_jax.config import ConversationsSource, JsonlSource, PackagedSource, SelfSource, Source, TfdsSource
from eagle3_jax.data import sources
from eagle3_jax.data.lines import Part
from eagle3_jax.data.sources import Record

FileSource = JsonlSource | ConversationsSource


def label(source: Source) -> str:
    """Names a source in counts and among the rejects."""
    if isinstance(source, FileSource):
        return f"{source.kind}:{pathlib.Path(source.path).name}"
    return f"tfds:{source.name}" if isinstance(source, TfdsSource) else source.kind


def read(source: Source, written: Sequence[tuple[list[str], str]] = ()) -> Iterator[Record]:
    """Yields the records of a source, up to its limit of prompts. Raises ValueError, OSError: an unreadable source.

    `written`: what the target wrote for a source of kind `self`.
    """
    if isinstance(source, SelfSource):
        found = sources.self_written(written, source.category, source.system)
        return _licensed(_limited(found, source.count), source.license)
    if isinstance(source, PackagedSource):
        return _licensed(_limited(sources.packaged(), source.limit), "apache-2.0")
    if isinstance(source, TfdsSource):
        found = sources.tfds(source.name, source.field, source.split, source.category)
        return _licensed(_limited(found, source.limit), source.license)
    return _limited(read_part(source), source.limit)


def read_part(source: FileSource, part: Part | None = None) -> Iterator[Record]:
    """Yields the records of a part of a file, or of the whole."""
    reader = sources.jsonl if isinstance(source, JsonlSource) else sources.conversations
    return _licensed(reader(source.path, source.category, part), source.license)


def _licensed(records: Iterable[Record], license: str | None) -> Iterator[Record]:
    """Gives the source's licence to records that name none."""
    for record in records:
        if license is not None and isinstance(record, dict):
            record.setdefault("license", license)
        yield record


def _limited(records: Iterable[Record], limit: int | None) -> Iterator[Record]:
    prompts = 0
    for record in records:
        if isinstance(record, dict):
            if prompts == limit:
                break
            prompts += 1
        yield record
