"""Writes the output folder of `prepare`, for each of its runners."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from eagle3_jax.data import filters, sources

TRAIN, HELD_OUT, REJECTS = "train.jsonl", "held_out.jsonl", "rejects.jsonl"
WORK = "beam"  # folder of what the Beam form keeps until it has finished
FINDINGS = "cloud_dlp.jsonl"  # log of what Cloud DLP found, kept until all is done


def _counters() -> dict[str, collections.Counter[str]]:
    return collections.defaultdict(collections.Counter)


@dataclasses.dataclass
class Result:
    """Counts of the records, which are added up over their parts, and the files for the next verb.

    Attributes:
        read: records of each source.
        rejected: of each reason.
        personal: findings of each kind of personal data.
        categories: of the prompts of TRAIN and of HELD_OUT.
        provenance: prompts that are kept of each source, by their licences.
        lengths: prompts that are kept of each category, by the least power of two not below their characters.
        files: relative to the folder.
    """

    read: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    rejected: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    personal: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    categories: dict[str, collections.Counter[str]] = dataclasses.field(
        default_factory=lambda: {TRAIN: collections.Counter(), HELD_OUT: collections.Counter()}
    )
    provenance: dict[str, collections.Counter[str]] = dataclasses.field(default_factory=_counters)
    lengths: dict[str, collections.Counter[str]] = dataclasses.field(default_factory=_counters)
    files: tuple[str, ...] = (TRAIN, HELD_OUT)

    @property
    def counts(self) -> dict[str, int]:
        """Records of each kind of file."""
        kept = {name: sum(found.values()) for name, found in self.categories.items()}
        return kept | {REJECTS: sum(self.rejected.values())}

    def keep(self, prompt: Mapping[str, Any], name: str) -> None:
        """Counts a prompt of the file `name`."""
        category, text = prompt["category"], filters.content(filters.asked(prompt["messages"]))
        self.categories[name][category] += 1
        self.provenance[prompt["source"]][prompt.get("license", sources.UNSTATED)] += 1
        self.lengths[category][str(1 << max(0, len(text) - 1).bit_length())] += 1

    def add(self, part: Mapping[str, Any]) -> None:
        """Adds the counts of a part: fields of this class, as JSON."""
        for name in ("read", "rejected", "personal"):
            getattr(self, name).update(part[name])
        for name in ("categories", "provenance", "lengths"):
            for key, found in part[name].items():
                getattr(self, name)[key].update(found)

    def for_manifest(self) -> dict[str, Any]:
        """The counts under the names that the manifest has."""
        return {
            "prompts": {name.removesuffix(".jsonl"): count for name, count in self.counts.items()},
            "categories": {name.removesuffix(".jsonl"): dict(found) for name, found in self.categories.items()},
            "sources": dict(self.read),
            "rejected": dict(self.rejected),
            "personal_data": dict(self.personal),
            "provenance": {source: dict(found) for source, found in self.provenance.items()},
            "characters": {category: dict(found) for category, found in self.lengths.items()},
        }


def line(record: dict[str, Any]) -> str:
    """A record as a line of its file."""
    return json.dumps(record, ensure_ascii=False) + "\n"
