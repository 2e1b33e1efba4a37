"""Decides which duplicate to keep: the first in input order, computed from pairwise relations only.

Whether a prompt stays depends on smaller ones, and theirs on still smaller ones. Rounds of "who has no undecided
smaller neighbour stays, its neighbours go" would be n / 2 for a chain of n, and each groups all relations anew. One
pass over the relations in order needs a byte for each prompt, and no rounds. So one process decides for all workers.
"""

from __future__ import annotations

import enum

import numpy as np


class Relation(enum.IntEnum):
    """Why two prompts are duplicates.

    Attributes:
        NEAR: their shingles are alike.
        SAME: one identity, other shingles, as the letter case of a system prompt counts for these.
        COPY: one identity and the same shingles; only the first of several copies has relations to other prompts.
    """

    NEAR = 0
    SAME = 1
    COPY = 2


class Fate(enum.IntEnum):
    """What becomes of a prompt."""

    KEPT = 0
    EXACT = 1
    NEAR = 2


def decide(relations: np.ndarray, kept: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Decides the fate of the records `start` to `stop`; all before must be decided.

    Args:
        relations: int64 [n, 3] of rows (record, smaller record, Relation), the first of them ascending.
        kept: bool [records], true at first; those that go are set to false here.

    Returns:
        uint8 [stop - start], a `Fate` of each.
    """
    fates = np.zeros(stop - start, np.uint8)
    ends = np.flatnonzero(np.diff(relations[:, 0], append=-1)) + 1
    begin = 0
    for end in ends.tolist():
        record, smaller, kinds = relations[begin, 0], relations[begin:end, 1], relations[begin:end, 2]
        staying = kinds[kept[smaller]]
        if staying.size or Relation.COPY in kinds:  # a copy shares the fate of its first
            kept[record] = False
            fates[record - start] = Fate.EXACT if (staying != Relation.NEAR).any() else Fate.NEAR
        begin = end
    return fates
