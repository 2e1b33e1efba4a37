"""Buffers what a resting draft head does not read, so that one pass lets it draft again.

The head needs the pair (token, hidden states) of every position. Reading them in every round would cost what resting
saves, so they wait in a buffer. A sequence that outgrows the buffer is lost to the head until its slot is given to
another request. It goes on without drafts, or with useless ones; its tokens are the target's either way.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.models.cache import Cache, Pass
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.target import TargetModel

# Positions that a head may miss.
ROOM = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unread:
    """Pairs decoded while the head rested.

    Attributes:
        tokens: token of each pair.
        aux: the target's hidden states of its feature, not fused yet. After the first `ROOM` pairs there is space for
            one round's, which is never read.
        count: number of pairs; more than `ROOM` is lost.
    """

    tokens: Int[Array, "b r"]
    aux: Float[Array, "b r h3"]
    count: Int[Array, " b"]

    @classmethod
    def empty(cls, batch: int, width: int, pairs: int, dtype: jnp.dtype) -> Unread:
        """Makes an empty buffer, for hidden states of `width` numbers and rounds of `pairs` at most."""
        room = ROOM + pairs
        none = jnp.zeros(batch, jnp.int32)
        return cls(jnp.zeros((batch, room), jnp.int32), jnp.zeros((batch, room, width), dtype), none)

    def note(self, tokens: Int[Array, "b p"], aux: Float[Array, "b p h3"], taken: Int[Array, " b"]) -> Unread:
        """Appends the pairs of a round, of which `taken` count."""

        def put(row: Array, new: Array, at: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(row, new, at, 0)

        at = jnp.minimum(self.count, ROOM)
        return Unread(
            jax.vmap(put)(self.tokens, tokens, at),
            jax.vmap(put)(self.aux, aux.astype(self.aux.dtype), at),
            jnp.where(self.count > ROOM, self.count, self.count + taken),
        )


def feed_unread(
    target: TargetModel,
    draft: Draft,
    unread: Unread,
    cache: Cache,
    draft_state: Float[Array, "b h"],
    this: Pass,
    running: Bool[Array, " b"],
) -> tuple[Unread, Cache, Float[Array, "b h"]]:
    """Lets the head read what it missed of the running sequences that are not lost.

    Its `cache` has `ROOM` unused slots behind the pass's `lengths`, the committed tokens. Returns the buffer, the cache
    and the head's state, as if it had never rested.
    """
    count = jnp.where(running & (unread.count <= ROOM), unread.count, 0)
    starts = this.lengths - count
    positions = starts[:, None] + jnp.arange(ROOM)[None]
    features = draft.head.fuse(unread.aux[:, :ROOM])
    tokens, last = unread.tokens[:, :ROOM], jnp.maximum(count - 1, 0)
    missed = dataclasses.replace(this, positions=positions, lengths=starts, row=last)
    states, cache = draft.head.feed(target.embed[...], tokens, features, missed, cache)
    draft_state = jnp.where((count > 0)[:, None], states[:, 0], draft_state)
    return dataclasses.replace(unread, count=unread.count - count), cache, draft_state
