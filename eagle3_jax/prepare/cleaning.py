"""Cleans one record, independently of all others, and writes the output folder of `prepare`, whichever runner runs."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from eagle3_jax.config import PrepareConfig
from eagle3_jax.data import filters, lines, personal, sources
from eagle3_jax.data.sources import Record
from eagle3_jax.data.split import StratifiedSplit
from eagle3_jax.runs import disk

TRAIN, HELD_OUT, REJECTS = "train.jsonl", "held_out.jsonl", "rejects.jsonl"
WORK = "beam"  # folder of what the Beam form keeps until it has finished
FINDINGS = "cloud_dlp.jsonl"  # log of what Cloud DLP found, kept until all is done


@dataclasses.dataclass(frozen=True)
class Cleaned:
    """A record of a source, JSON-ready."""

    label: str  # of its source
    line: int  # in the source
    # {"id", "category", "source", "messages"} and "license", "tools", "truncated" where it has them; empty if rejected.
    prompt: dict[str, Any] = dataclasses.field(default_factory=dict)
    reason: str | None = None
    text: str = ""  # excerpt of a record that was rejected
    personal: dict[str, int] = dataclasses.field(default_factory=dict)  # count of each kind that was found
    identity: str = ""  # `filters.content_hash` of what the users ask
    opening: str = ""  # `filters.opening_hash` of it

    @property
    def asked(self) -> filters.Messages:
        """The part of a prompt by which duplicates are told."""
        return filters.asked(self.prompt["messages"], self.prompt.get("tools", ()))

    @property
    def place(self) -> tuple[str, str, str]:
        """By which a prompt's side is chosen: its category, opening and identity."""
        return self.prompt["category"], self.opening, self.identity

    def rejected(self, reason: str) -> Cleaned:
        return dataclasses.replace(self, prompt={}, reason=reason, text=_excerpt(self.prompt["messages"]))

    def reject(self) -> dict[str, Any]:
        """The line of a rejected record in the file of rejects."""
        return {"source": self.label, "line": self.line, "reason": self.reason, "text": self.text}


# What is handed to a service at once.
_RECORDS, _CHARACTERS = 4096, 1 << 20


class Cleaner:
    """The filters that look at one record alone; `log` keeps a service's findings. Raises ValueError."""

    def __init__(self, section: PrepareConfig, log: disk.Path | None = None) -> None:
        self._section = section
        self.benchmarks = filters.Benchmarks(section.benchmarks)
        self._inspect: Callable[[Sequence[str]], list[list[personal.Span]]] | None = None
        if section.personal_data_engine == "cloud_dlp":
            from eagle3_jax.prepare import cloud_dlp  # late: the extra `report`

            inspect = cloud_dlp.CloudDlp(section.cloud_dlp).inspect
            self._inspect = inspect if log is None else cloud_dlp.remembered(inspect, log)

    def clean(self, records: Iterable[tuple[str, Record]]) -> Iterator[Cleaned]:
        """Refuses or redacts records, each with its source's label, in order. Raises ValueError: the service fails."""
        if self._inspect is None:
            yield from (self._clean(label, record, personal.redact) for label, record in records)
            return
        left = iter(records)
        while batch := list(itertools.islice(self._noted(left, texts := {}), _RECORDS)):
            spans = dict(zip(texts, self._inspect(list(texts)), strict=True))
            for label, record in batch:
                yield self._clean(label, record, lambda text, spans=spans: personal.replace(text, spans[text]))

    def _noted(self, records: Iterator[tuple[str, Record]], texts: dict[str, None]) -> Iterator[tuple[str, Record]]:
        """Takes records for one batch, and notes the texts in which personal data is looked for."""
        size = 0

        def note(text: str) -> tuple[str, collections.Counter[str]]:
            nonlocal size
            size += 0 if text in texts else len(text)
            texts[text] = None
            return text, collections.Counter()

        for label, record in records:
            self._clean(label, record, note)
            yield label, record
            if size > _CHARACTERS:
                return

    def _clean(self, label: str, record: Record, redact: personal.Redact) -> Cleaned:
        if isinstance(record, sources.Reject):
            return Cleaned(label, record.line, reason=record.reason, text=redact(record.text)[0])
        messages, tools = record["messages"], record.get("tools", [])
        reason = filters.refuse(messages, self._section.max_chars, tools)
        reason = reason or self.benchmarks.check(filters.asked(messages))
        if reason is not None:
            return Cleaned(label, record["line"], reason=reason, text=redact(_excerpt(messages))[0])
        messages, found = filters.redact(messages, redact)
        tools, of_tools = filters.redact_json(tools, redact)
        found += of_tools
        asked = filters.asked(messages, tools)
        identity = filters.content_hash(asked)
        category = record["category"]
        prompt: dict[str, Any] = {"id": f"{category}-{identity[:16]}", "category": category, "source": label}
        prompt |= {name: record[name] for name in ("license", "messages", "tools", "truncated") if name in record}
        prompt |= {"messages": messages} | ({"tools": tools} if tools else {})
        opening = filters.opening_hash(asked)
        cleaned = Cleaned(label, record["line"], prompt, personal=dict(found), identity=identity, opening=opening)
        return cleaned.rejected("personal data") if found and self._section.personal_data == "drop" else cleaned


def _excerpt(messages: filters.Messages) -> str:
    return filters.excerpt(filters.content(messages))


_Counts = collections.Counter[str]


def _counters() -> dict[str, _Counts]:
    return collections.defaultdict(collections.Counter)


@dataclasses.dataclass
class Result:
    """Counts of the records, which are added up over their parts, and the files for the next verb.

    `provenance` are kept prompts of each source, by licence; `characters` those of each category, by the least power of
    two not below their characters.
    """

    read: _Counts = dataclasses.field(default_factory=collections.Counter)
    rejected: _Counts = dataclasses.field(default_factory=collections.Counter)
    personal_data: _Counts = dataclasses.field(default_factory=collections.Counter)
    categories: dict[str, _Counts] = dataclasses.field(
        default_factory=lambda: {TRAIN: collections.Counter(), HELD_OUT: collections.Counter()}
    )
    provenance: dict[str, _Counts] = dataclasses.field(default_factory=_counters)
    characters: dict[str, _Counts] = dataclasses.field(default_factory=_counters)
    files: tuple[str, ...] = (TRAIN, HELD_OUT)

    @property
    def counts(self) -> dict[str, int]:
        """Records of each kind of file."""
        kept = {name: sum(found.values()) for name, found in self.categories.items()}
        return kept | {REJECTS: sum(self.rejected.values())}

    def add(self, part: Mapping[str, Any]) -> None:
        """Adds the counts of a part: fields of this class, as JSON."""
        for name in ("read", "rejected", "personal_data"):
            getattr(self, name).update(part[name])
        for name in ("categories", "provenance", "characters"):
            for key, found in part[name].items():
                getattr(self, name)[key].update(found)

    def for_manifest(self) -> dict[str, Any]:
        """The counts under the names that the manifest has."""
        found = {name: getattr(self, name) for name in ("rejected", "personal_data", "provenance", "characters")}
        for name, counted in (("prompts", self.counts), ("categories", self.categories)):
            found[name] = {file.removesuffix(".jsonl"): count for file, count in counted.items()}
        return found | {"sources": self.read}


def write(paths: Mapping[str, disk.Path], records: Iterable[Cleaned], split: StratifiedSplit) -> Result:
    """Writes records into the files TRAIN, HELD_OUT and REJECTS, which lie at `paths`, and counts them."""
    result = Result()
    with contextlib.ExitStack() as stack:
        add = {name: stack.enter_context(lines.written(path)) for name, path in paths.items()}
        for cleaned in records:
            result.read[cleaned.label] += 1
            result.personal_data.update(cleaned.personal)
            if cleaned.reason is not None:
                result.rejected[cleaned.reason] += 1
                add[REJECTS](cleaned.reject())
                continue
            prompt, name = cleaned.prompt, HELD_OUT if split.holds_out(*cleaned.place) else TRAIN
            text = filters.content(filters.asked(prompt["messages"]))
            result.categories[name][prompt["category"]] += 1
            result.provenance[prompt["source"]][prompt.get("license", sources.UNSTATED)] += 1
            result.characters[prompt["category"]][str(1 << max(0, len(text) - 1).bit_length())] += 1
            add[name](prompt)
    return result
