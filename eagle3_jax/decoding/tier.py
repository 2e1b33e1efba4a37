"""Tiers: the ways to run a round."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from eagle3_jax.config import DraftTree


@dataclasses.dataclass(frozen=True)
class Tier:
    """A way to run a round.

    Attributes:
        tree: shape of the draft; None is vanilla decoding.
        head: whether the head drafts; it rests otherwise.
        simulated: for benchmarks: the probability with which each draft is accepted; None asks the target.
    """

    tree: DraftTree | None
    head: bool
    simulated: float | None = None

    @property
    def name(self) -> str:
        """Its name: "vanilla", "lookup 8", "chain 3", "tree 3, 3, 8", "tree 3, 3, 8 and lookup 7"."""
        tree = self.tree
        if tree is None:
            return "vanilla"
        if not self.head:
            return f"lookup {tree.lookup_tokens}"
        if tree.topk == 1 and not self.copies:
            return f"chain {tree.num_steps}"
        name = f"tree {tree.num_steps}, {tree.topk}, {tree.num_draft_tokens}"
        return f"{name} and lookup {tree.lookup_tokens}" if self.copies else name

    @property
    def depth(self) -> int:
        """Most drafts that one round accepts."""
        return 0 if self.tree is None else self.tree.depth

    @property
    def nodes(self) -> int:
        """Nodes of a round's tree, the root included."""
        return 1 if self.tree is None else self.tree.num_draft_tokens

    @property
    def scratch(self) -> int:
        """Cache entries that a round writes behind the committed tokens; a draft model's lie one further."""
        if self.tree is None:
            return 1
        return max(self.tree.num_draft_tokens, self.tree.depth + 2, 1 + (self.tree.num_steps - 1) * self.tree.topk)

    @property
    def copies(self) -> bool:
        """True if it copies drafts from the text."""
        return self.tree is not None and self.tree.lookup_tokens > 0

    @property
    def branches(self) -> bool:
        """True if a node of its tree may have several children."""
        return self.tree is not None and self.head and (self.tree.topk > 1 or self.copies)

    @property
    def copies_alone(self) -> bool:
        """True if it drafts from the text without the head; its round without a match is vanilla decoding's."""
        return self.tree is not None and not self.head

    @property
    def source(self) -> str:
        """The source of its drafts: tiers of one source are good or bad together."""
        return "none" if self.tree is None else "head" if self.head else "text"

    @property
    def guess(self) -> float:
        """A guess of the drafts that a round accepts, from heads for small targets (docs/benchmarks.md)."""
        if self.tree is None:
            return 0.0
        first = 0.45 + 0.1 * math.log2(self.tree.topk)
        of_head = sum(first**depth for depth in range(1, self.tree.num_steps + 1)) if self.head else 0.0
        return of_head + 0.3 * self.copies


VANILLA = Tier(None, head=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundPlan:
    """How the rounds of a dispatch are run.

    Attributes:
        tier: chooses the program.
        greedy: leaves sampling out; every request must then be `SamplingParams.greedy`. An array is known on the device
            alone: one program has both.
    """

    tier: Tier = dataclasses.field(metadata={"static": True})
    greedy: Any  # bool | Bool[Array, ""], or the leaf of another tree of this structure
