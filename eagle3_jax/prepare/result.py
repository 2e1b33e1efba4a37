"""The output folder of `prepare`, whichever runner writes it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from eagle3_jax.data import filters, lines, sources
from eagle3_jax.data.split import StratifiedSplit
from eagle3_jax.prepare.cleaning import Cleaned
from eagle3_jax.runs import disk

TRAIN, HELD_OUT, REJECTS = "train.jsonl", "held_out.jsonl", "rejects.jsonl"
WORK = "beam"  # folder of what the Beam form keeps until it has finished
FINDINGS = "cloud_dlp.jsonl"  # log of what Cloud DLP found, kept until all is done

_Counts = collections.Counter[str]


def _counters() -> dict[str, _Counts]:
    return collections.defaultdict(collections.Counter)


@dataclasses.dataclass
class Result:
    """Counts of the records, which are added up over their parts, and the files for the next verb.

    Attributes:
        categories: of the prompts of TRAIN and of HELD_OUT.
        provenance: prompts that are kept of each source, by their licences.
        characters: prompts that are kept of each category, by the least power of two not below their characters.
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
