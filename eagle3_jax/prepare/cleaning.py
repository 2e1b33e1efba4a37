"""Cleans one record, independently of all others: refuses it, or redacts and identifies it."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from eagle3_jax.config import PrepareConfig
from eagle3_jax.data import filters, personal, sources
from eagle3_jax.data.sources import Record
from eagle3_jax.runs import disk


@dataclasses.dataclass(frozen=True)
class Cleaned:
    """A record of a source, JSON-ready.

    Attributes:
        label: of its source. line: number in the source.
        prompt: {"id", "category", "source", "messages"}, and "license", "tools", "truncated" where the record has them;
            empty if rejected.
        text: excerpt of a record that was rejected. personal: count of each kind of personal data that was found.
        identity, opening: `filters.content_hash` and `opening_hash` of what the users ask.
    """

    label: str
    line: int
    prompt: dict[str, Any] = dataclasses.field(default_factory=dict)
    reason: str | None = None
    text: str = ""
    personal: dict[str, int] = dataclasses.field(default_factory=dict)
    identity: str = ""
    opening: str = ""

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
    """The filters that look at one record alone.

    `log` keeps what a service found, for a run that is interrupted. Raises ValueError: an unreadable benchmark, or no
    credentials for the service.
    """

    def __init__(self, section: PrepareConfig, log: disk.Path | None = None) -> None:
        self._section = section
        self.benchmarks = filters.Benchmarks(section.benchmarks)
        self._inspect: Callable[[Sequence[str]], list[list[personal.Span]]] | None = None
        if section.personal_data_engine == "cloud_dlp":
            from eagle3_jax.prepare import cloud_dlp  # late: the extra `report`

            inspect = cloud_dlp.CloudDlp(section.cloud_dlp).inspect
            self._inspect = inspect if log is None else cloud_dlp.remembered(inspect, log)

    def clean(self, records: Iterable[tuple[str, Record]]) -> Iterator[Cleaned]:
        """Refuses or redacts records, each with its source's label, in order; what becomes of one depends on no other.

        Raises ValueError: the service that finds personal data refuses, or does not answer.
        """
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
