"""What `prepare` leaves in its folder, whichever form of it did the work."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

TRAIN, HELD_OUT, REJECTS = "train.jsonl", "held_out.jsonl", "rejects.jsonl"
WORK = "beam"  # folder of what the Beam form keeps until it has finished


@dataclasses.dataclass
class Result:
    """Counts of the records, which are added up over their parts, and the files for the next verb.

    Attributes:
        read: records of each source.
        rejected: of each reason.
        personal: findings of each kind of personal data.
        categories: of the prompts of TRAIN and of HELD_OUT.
        files: relative to the folder.
    """

    read: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    rejected: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    personal: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    categories: dict[str, collections.Counter[str]] = dataclasses.field(
        default_factory=lambda: {TRAIN: collections.Counter(), HELD_OUT: collections.Counter()}
    )
    files: tuple[str, ...] = (TRAIN, HELD_OUT)

    @property
    def counts(self) -> dict[str, int]:
        """Records of each kind of file."""
        kept = {name: sum(found.values()) for name, found in self.categories.items()}
        return kept | {REJECTS: sum(self.rejected.values())}

    def add(self, part: Mapping[str, Any]) -> None:
        """Adds the counts of a part: fields of this class, as JSON."""
        for total, name in ((self.read, "read"), (self.rejected, "rejected"), (self.personal, "personal")):
            total.update(part[name])
        for name, found in part["categories"].items():
            self.categories[name].update(found)

    def for_manifest(self) -> dict[str, Any]:
        """The counts under the names that the manifest has."""
        return {
            "prompts": {name.removesuffix(".jsonl"): count for name, count in self.counts.items()},
            "categories": {name.removesuffix(".jsonl"): dict(found) for name, found in self.categories.items()},
            "sources": dict(self.read),
            "rejected": dict(self.rejected),
            "personal_data": dict(self.personal),
        }


def line(record: dict[str, Any]) -> str:
    """A record as a line of its file."""
    return json.dumps(record, ensure_ascii=False) + "\n"
