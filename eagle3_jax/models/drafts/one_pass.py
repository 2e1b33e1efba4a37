"""`OnePassHead`, a head that drafts all levels of a tree in one pass."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.config import DraftTree
from eagle3_jax.kernels.linear.layouts import Quantised
from eagle3_jax.kernels.vocabulary.api import vocabulary_top_k
from eagle3_jax.models.cache import Cache, Pass
from eagle3_jax.models.drafts.head import Head
from eagle3_jax.models.drafts.levels import Rows


class OnePassHead(Head):
    """A head whose pass has a row for each level; a row may read the token before it (`adjusted`)."""

    def rows(
        self,
        embed: Float[Array, "v h"] | Quantised,
        root: Int[Array, " b"],
        state: Float[Array, "b h"],
        this: Pass,
        cache: Cache,
        drafts: int,
    ) -> tuple[Float[Array, "b drafts h"], Cache]:
        """Runs the pass behind the committed pairs for up to `self.drafts` tokens; the root is at position `lengths`.

        Returns the LM head's inputs, of which index i predicts the token at position lengths + 1 + i; and the cache.
        """
        raise NotImplementedError

    def candidates(self, states: Float[Array, "b s h"], k: int) -> Any:
        """Computes what `best` reads, for all rows of a pass at once: the LM head's matrix is read once."""
        return vocabulary_top_k(states, self.output_rows, k)

    def best(
        self, candidates: Any, row: int, before: Int[Array, "b m"], k: int
    ) -> tuple[Float[Array, "b m k"], Int[Array, "b m k"]]:
        """Returns log-probabilities and draft ids of the k best tokens of a row, best first.

        `candidates` are made for k tokens at least; `before` is the preceding token (a target id), of m branches.
        """
        scores, ids = candidates
        shape = (*before.shape, k)
        return jnp.broadcast_to(scores[:, row, None, :k], shape), jnp.broadcast_to(ids[:, row, None, :k], shape)

    def adjusted(
        self, logits: Float[Array, "*batch dv"], states: Float[Array, "*batch h"], before: Int[Array, "*batch"]
    ) -> Float[Array, "*batch dv"]:
        """Adjusts a draft's logits by the preceding token `before` (a target id); unchanged here."""
        return logits

    def levels(
        self,
        embed: Float[Array, "v e"] | Quantised,
        tree: DraftTree,
        root: Int[Array, " b"],
        state: Float[Array, "b h"],
        this: Pass,
        cache: Cache,
        *,
        greedy: bool | Bool[Array, ""],
    ) -> Rows:
        states, cache = self.rows(embed, root, state, this, cache, tree.num_steps)
        return Rows(self, states, cache, tree.topk, greedy=greedy)

    def passes(self, tree: DraftTree) -> list[int]:
        """See `Head`; what the committed tokens read again counts once."""
        return [1]

    @property
    def trees(self) -> tuple[DraftTree, ...]:
        """See `Head`: parts of the block, and trees over it."""
        assert self.drafts is not None
        drafts, wide = self.drafts, min(4, self.most_children)

        def tree(nodes: int, copied: int) -> DraftTree:
            size = min(max(nodes, drafts + 1), 1 + wide + (drafts - 1) * wide**2)
            return DraftTree(num_steps=drafts, topk=wide, num_draft_tokens=size, lookup_tokens=copied)

        chains = [
            DraftTree(num_steps=steps, num_draft_tokens=steps + 1)
            for steps in sorted({min(2, drafts), -(-drafts // 2), drafts})
        ]
        wider = [tree(nodes, copied) for nodes, copied in ((8, 7), (16, 8), (32, 8))] if wide > 1 else []
        return (*chains, *dict.fromkeys(wider))
