"""`Levels`: those of a tree that a head drafts, each a pass (`head.Recurrent`), or all one pass (`one_pass.Rows`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eagle3_jax.models.cache import KVCache


class Levels:
    """The levels of a tree, from the root's children on, while a program is traced.

    Attributes:
        cache: the head's, with what the levels so far wrote behind the committed entries.
    """

    cache: KVCache

    def descend(self, tokens: Int[Array, "b k"], parents: Int[Array, "b k"]) -> None:
        """Goes to the next level.

        Args:
            tokens: the frontier's target ids.
            parents: their places in the frontier before.
        """
        raise NotImplementedError

    def best(self, tokens: Int[Array, "b m"], k: int) -> tuple[Float[Array, "b m k"], Int[Array, "b m k"]]:
        """Returns log-probabilities and draft ids of the k best children of each node of the frontier, `tokens`."""
        raise NotImplementedError

    def logits(self, tokens: Int[Array, "b m"]) -> Float[Array, "b m dv"]:
        """Returns the logits of the children of the frontier, `tokens`."""
        raise NotImplementedError


def unread(made: Callable[[], Any]) -> Any:
    """Returns what has the shapes of another branch's results."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(made))
