"""The levels of a tree as a head drafts them, from the root's children on, while a program is traced."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.kernels.linear.layouts import Quantised
from eagle3_jax.kernels.vocabulary.api import vocabulary_logits
from eagle3_jax.models.cache import Cache, Pass

IMPOSSIBLE = -1e30  # logit of a draft that cannot come; finite, for a level may have no other


class Recurrent:
    """Each level is a pass of a `head.Head` over the frontier; `cache` has what the levels so far wrote."""

    def __init__(
        self,
        head: Any,
        embed: Float[Array, "v e"] | Quantised,
        root: Int[Array, " b"],
        draft_state: Float[Array, "b h"],
        this: Pass,
        cache: Cache,
    ) -> None:
        self.cache, self._head, self._embed, self._this = cache, head, embed, this
        self._states, self._depth = draft_state[:, None], 0
        self._seen: Bool[Array, "b m t"] | None = None

    def descend(self, tokens: Int[Array, "b k"], parents: Int[Array, "b k"]) -> None:
        """Goes to the next level: target ids of its nodes, and their parents' places in the frontier before."""
        (batch, k), before = tokens.shape, self._states
        own = jnp.broadcast_to(jnp.eye(k, dtype=bool), (batch, k, k))
        if self._seen is None:
            features, self._seen = jnp.broadcast_to(before, (batch, k, before.shape[-1])), own
        else:
            features = jnp.take_along_axis(before, parents[:, :, None], axis=1)
            above = jnp.take_along_axis(self._seen, parents[:, :, None], axis=1)
            self._seen = jnp.concatenate([above, own], axis=-1)
        positions = jnp.broadcast_to((self._this.lengths + self._depth)[:, None], (batch, k))
        this = dataclasses.replace(self._this, positions=positions, tail_mask=self._seen)
        self._states, self.cache = self._head.feed(self._embed, tokens, features, this, self.cache)
        self._depth += 1

    def best(self, tokens: Int[Array, "b m"], k: int) -> tuple[Float[Array, "b m k"], Int[Array, "b m k"]]:
        """Returns log-probabilities and draft ids of the k best children of each node of the frontier, `tokens`."""
        return self._head.top_k(self._states, k)

    def logits(self, tokens: Int[Array, "b m"], allowed: Bool[Array, "b m dv"] | None = None) -> Float[Array, "b m dv"]:
        """Returns the logits of the children of the frontier, `tokens`; those not `allowed` are `IMPOSSIBLE`."""
        return possible(self._head.logits(self._states), allowed)


class Rows:
    """Each level is a row of a `one_pass.OnePassHead`, which scores its tokens behind each node of the frontier.

    `states` are the LM head's inputs, one for each level; a node has `k` children. `greedy`: see `Head.levels`.
    """

    def __init__(
        self, head: Any, states: Float[Array, "b drafts h"], cache: Cache, k: int, *, greedy: bool | Bool[Array, ""]
    ) -> None:
        self._head, self._states, self.cache, self._row = head, states, cache, 0

        def candidates() -> Any:
            return head.candidates(states, k)

        def logits() -> Array:
            return vocabulary_logits(states, head.output_rows)

        if greedy is True:
            self._candidates = candidates()
        elif greedy is False:
            self._logits = logits()
        else:
            self._candidates, self._logits = jax.lax.cond(
                greedy, lambda: (candidates(), unread(logits)), lambda: (unread(candidates), logits())
            )

    def descend(self, tokens: Int[Array, "b k"], parents: Int[Array, "b k"]) -> None:
        """See `Recurrent`."""
        self._row += 1

    def best(self, tokens: Int[Array, "b m"], k: int) -> tuple[Float[Array, "b m k"], Int[Array, "b m k"]]:
        """See `Recurrent`."""
        return self._head.best(self._candidates, self._row, tokens, k)

    def logits(self, tokens: Int[Array, "b m"], allowed: Bool[Array, "b m dv"] | None = None) -> Float[Array, "b m dv"]:
        """See `Recurrent`."""
        states, logits = self._states[:, self._row, None], self._logits[:, self._row, None]
        shape = tokens.shape
        states, logits = (jnp.broadcast_to(x, (*shape, x.shape[-1])) for x in (states, logits))
        return self._head.adjusted(possible(logits, allowed), states, tokens)


def possible(logits: Float[Array, "b m dv"], allowed: Bool[Array, "b m dv"] | None) -> Float[Array, "b m dv"]:
    """Lowers the logits of drafts that cannot come."""
    return logits if allowed is None else jnp.where(allowed, logits, IMPOSSIBLE)


def unread(made: Callable[[], Any]) -> Any:
    """Returns what has the shapes of another branch's results."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(made))
