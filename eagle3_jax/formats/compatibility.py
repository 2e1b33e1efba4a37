"""`Engines`, a table of compatibility: which engine runs which heads of a kind, and from which version on.

`export` refuses by these tables alone a head that the form's own engine cannot run, and names by them the engines that
serve the written one. The tables are those of `eagle3`, `blocks.compatibility`, `mtp` and `eagle2.heads`, with columns
of `engines`; docs/engines.md repeats them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from eagle3_jax.formats.kinds import StoredHead

SILENT, FAILS, UNKNOWN = "ignored", "fails", "not known"
_NO = (SILENT, FAILS, UNKNOWN)
Rows = Mapping[str, tuple[str, ...]]
Column = Mapping[str, tuple[str, str]]  # row -> its cell, and where the engine's code says so


@dataclasses.dataclass(frozen=True)
class Engines:
    """The engines that run a kind of head.

    Attributes:
        versions: each engine, and the newest version whose code was read.
        since: property of a head -> for each of the first engines the first version that runs it, or what the engine
            does instead.
        columns: the same for each of the other engines; a row that is not there is `UNKNOWN`.
        readers: form -> the engines that read it; the first one decides which heads the form can hold.
        used: (a head, a form) -> the rows that apply to it, each with its reason: field, got, expected; "" where the
            row is not due to the head.
        by_target: property of a target, whose hidden states an engine must capture -> as `since`.
        without: property of a head -> the settings that train a head without it.
    """

    versions: Mapping[str, str]
    since: Rows
    readers: Mapping[str, Sequence[str]]
    used: Callable[[StoredHead, str], Iterator[tuple[str, str]]]
    by_target: Rows = dataclasses.field(default_factory=dict)
    columns: Mapping[str, Column] = dataclasses.field(default_factory=dict)
    without: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def cannot_run(self, engine: str, head: StoredHead, form: str) -> list[str]:
        """Lists the properties of a head in a form that an engine cannot run."""
        reasons = dict(self.used(head, form))
        return [
            f"{reason}; {engine} (to {self.versions[engine]}): {cell}"
            + (f"; without it: {self.without[name]}" if name in self.without else "")
            for name, reason in reasons.items()
            if reason and (cell := self.cell(engine, name)) in _NO
        ]

    def served_by(self, head: StoredHead, form: str) -> str:
        """See `DraftKind`."""
        able, others = [], []
        for engine in filter(self.readers[form].__contains__, self.versions):
            cells = {name: self.cell(engine, name) for name, _ in self.used(head, form)}
            lacking = [f"{name} {cell}" for name, cell in cells.items() if cell in _NO]
            if lacking:
                others.append(f"not by {engine} (to {self.versions[engine]}): {', '.join(lacking)}")
            else:
                able.append(f"{engine} {max(cells.values(), key=_order)}")
        return "; ".join([f"served by {', '.join(able)} and later" if able else "served by no engine", *others])

    def ignored(self, engine: str, head: StoredHead, form: str, about: str) -> list[str]:
        """Lists the rows `about` something that an engine reads in a form, and ignores."""
        rows = [row for row, _ in self.used(head, form) if row.startswith(about)]
        return [x for x in rows if engine in self.readers.get(form, ()) and self.cell(engine, x) == SILENT]

    def cell(self, engine: str, row: str) -> str:
        """Returns the first version of an engine that runs what a row names, or what it does instead."""
        if engine in self.columns:
            return self.columns[engine].get(row, (UNKNOWN, ""))[0]
        return {**self.since, **self.by_target}[row][list(self.versions).index(engine)]


def _order(version: str) -> tuple[int, ...]:
    """Sorts releases by number; an engine known by commit has a single one, sorted first."""
    parts = version.split(".")
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()
