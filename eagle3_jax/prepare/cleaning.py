"""What happens to one record, whatever the others are: it is refused, or redacted and named."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from eagle3_jax import config as configs
from eagle3_jax.data import filters, sources


@dataclasses.dataclass(frozen=True)
class Cleaned:
    """A record of a source, JSON-ready.

    Attributes:
        label: of its source.
        line: number in the source.
        prompt: {"id", "category", "messages"}, "tools" and "truncated" where the record has them; empty if rejected.
        reason: why it is rejected.
        text: excerpt of a record that was rejected.
        personal: count of each kind of personal data that was found.
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

    def rejected(self, reason: str) -> Cleaned:
        """This prompt, rejected."""
        text = filters.excerpt(filters.content(self.prompt["messages"]))
        return dataclasses.replace(self, prompt={}, reason=reason, text=text)

    def reject(self) -> dict[str, Any]:
        """The line of a rejected record in the file of rejects."""
        return {"source": self.label, "line": self.line, "reason": self.reason, "text": self.text}


class Cleaner:
    """The filters that look at one record alone. Raises ValueError: an unreadable benchmark."""

    def __init__(self, section: configs.PrepareConfig) -> None:
        self._section = section
        self.benchmarks = filters.Benchmarks(section.benchmarks)

    def clean(self, label: str, record: sources.Prompt | sources.Reject) -> Cleaned:
        """Refuses or redacts a record; depends on nothing else."""
        if isinstance(record, sources.Reject):
            return Cleaned(label, record.line, reason=record.reason, text=record.text)
        messages, tools, found = record["messages"], record.get("tools", []), collections.Counter[str]()
        reason = filters.refuse(messages, self._section.max_chars, tools)
        reason = reason or self.benchmarks.check(filters.asked(messages))
        if reason is None:
            messages, found = filters.redact(messages)
            tools, of_tools = filters.redact_json(tools)
            found += of_tools
            if found and self._section.personal_data == "drop":
                reason = "personal data"
        asked = filters.asked(messages, tools)
        identity = filters.content_hash(asked)
        prompt = {"id": f"{record['category']}-{identity[:16]}", "category": record["category"], "messages": messages}
        if tools:
            prompt["tools"] = tools
        if "truncated" in record:
            prompt["truncated"] = record["truncated"]
        cleaned = Cleaned(
            label,
            record["line"],
            prompt,
            personal=dict(found),
            identity=identity,
            opening=filters.opening_hash(asked),
        )
        return cleaned if reason is None else cleaned.rejected(reason)
