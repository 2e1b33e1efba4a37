"""Tiers: the ways to run a round."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from eagle3_jax.config import DraftTree


@dataclasses.dataclass(frozen=True)
class Promise:
    """The prior belief about a tier.

    Attributes:
        accepted: guess of the accepted drafts a round.
        most: most drafts that a round accepts.
        source: source of its drafts; tiers of one source are good or bad together.
        wakes: whether drafts come from the head, which must first read the tokens decoded while it rested.
        drafts: guess of the share of rounds with drafts; the other rounds are vanilla decoding's.
    """

    accepted: float
    most: int
    source: str
    wakes: bool
    drafts: float


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
        if self.tree is None:
            return "vanilla"
        steps, topk, size, copied = (
            getattr(self.tree, field) for field in ("num_steps", "topk", "num_draft_tokens", "lookup_tokens")
        )
        if not self.head:
            return f"lookup {copied}"
        name = f"chain {steps}" if topk == 1 and not copied else f"tree {steps}, {topk}, {size}"
        return f"{name} and lookup {copied}" if copied else name

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
        return self.head and (self.topk > 1 or self.copies)

    @property
    def copies_alone(self) -> bool:
        """True if it drafts from the text without the head; its round without a match is vanilla decoding's."""
        return self.tree is not None and not self.head

    @property
    def topk(self) -> int:
        return 1 if self.tree is None else self.tree.topk

    @property
    def promise(self) -> Promise:
        """The guess of its acceptance, from heads for small targets (docs/benchmarks.md)."""
        if self.tree is None:
            return Promise(0.0, 0, "none", wakes=False, drafts=1.0)
        copies = 0.3 if self.tree.lookup_tokens else 0.0
        if not self.head:
            return Promise(copies, self.tree.depth, "text", wakes=False, drafts=0.5)
        first = 0.45 + 0.1 * math.log2(self.tree.topk)
        guess = sum(first**depth for depth in range(1, self.tree.num_steps + 1))
        return Promise(guess + copies, self.tree.depth, "head", wakes=True, drafts=1.0)


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
