"""Acceptance: rounds and accepted drafts counted by depth, and the two figures computed from them, tau and alpha.

These are the figures of the EAGLE papers (EAGLE-3: arXiv 2503.01840), counted as SGLang and vLLM do. A round that ends
on an accepted end-of-sequence token, or at the answer's limit, counts a bonus token that is not in the answer.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class AcceptanceCounts:
    """Counts over rounds; they add up. Prefill, which gives an answer's first token, is not counted."""

    rounds: int = 0  # passes of the target that verify drafts
    # Rounds in which the draft at depth 1, 2, ... was accepted, and so all drafts before it.
    accepted: list[int] = dataclasses.field(default_factory=list)

    def __add__(self, other: AcceptanceCounts) -> AcceptanceCounts:
        accepted = itertools.zip_longest(self.accepted, other.accepted, fillvalue=0)
        return AcceptanceCounts(self.rounds + other.rounds, [a + b for a, b in accepted])

    @staticmethod
    def total(counts: Iterable[AcceptanceCounts]) -> AcceptanceCounts:
        """Sums counts."""
        return functools.reduce(operator.add, counts, AcceptanceCounts())

    @property
    def tau(self) -> float:
        """Acceptance length: tokens per round, the bonus token included; 1 without a draft or a round."""
        return 1 + sum(self.accepted) / max(self.rounds, 1)

    @property
    def alpha(self) -> list[float | None]:
        """Acceptance rate by depth, of the rounds that accepted all depths before; None where no round did."""
        reached = [self.rounds, *self.accepted]
        return [n / before if before else None for n, before in zip(self.accepted, reached, strict=False)]
