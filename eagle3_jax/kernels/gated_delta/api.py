"""The gated delta rule (https://arxiv.org/abs/2412.06464) over a prompt, and over the nodes of a draft tree.

A value head's state S [d_k, d_v] moves on by S <- e^g S; u = beta (v - S^T k); S <- S + k u^T, and its output is S^T q.
Value head h reads key head h // (value heads / key heads). All is float32.

A tree keeps no state per node: its nodes' keys, updates u and decays g are enough to `fold` the accepted path. On a CPU
all three do the same operations in the same order, so that a node's output, and the state behind a path, are to the bit
those of the same tokens in a row. Elsewhere a tree, and each chunk of a prompt, is one unit-triangular system under the
ancestor mask, which sums in another order.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.kernels.dispatch import device
from eagle3_jax.kernels.gated_delta import solve, walk
from eagle3_jax.kernels.gated_delta.tokens import Tokens


def chain(
    tokens: Tokens,
    states: Float[Array, "b n d_k d_v"],
    begins: Bool[Array, "b t"],
    *,
    follows: Bool[Array, " b"] | None = None,
) -> tuple[Float[Array, "b t n d_v"], Float[Array, "b n d_k d_v"]]:
    """Reads tokens in order.

    Args:
        begins: whether a document begins with a token: no state before it counts.
        follows: whether a row goes on where the row before it ends; None: no row does.

    Returns:
        Outputs, and the states behind the last token.
    """
    form = walk if _is_exact() else solve
    if follows is None:
        return form.chain(tokens, states, begins)

    def row(before: Array, of: Any) -> tuple[Array, tuple[Array, Array]]:
        tokens, state, begin, goes_on = jax.tree.map(lambda x: x[None], of)
        outputs, state = form.chain(tokens, jnp.where(goes_on[:, None, None, None], before, state), begin)
        return state, (outputs[0], state[0])

    _, (outputs, states) = jax.lax.scan(row, jnp.zeros_like(states[:1]), (tokens, states, begins, follows))
    return outputs, states


def tree(
    tokens: Tokens,
    states: Float[Array, "b n d_k d_v"],
    mask: Bool[Array, "b t t"] | None,
) -> tuple[Float[Array, "b t n d_v"], Float[Array, "b t n d_v"]]:
    """Reads the nodes of a tree, each behind its ancestors.

    Args:
        mask: which nodes each one sees: its ancestors, which stand before it, and itself. None: they are a chain.

    Returns:
        Outputs, and the updates u.
    """
    if mask is None:
        b, t, _ = tokens.betas.shape
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((t, t), bool)), (b, t, t))
    form = walk if _is_exact() else solve
    return form.tree(tokens, states, mask)


def fold(
    states: Float[Array, "b n d_k d_v"],
    keys: Float[Array, "b p k d_k"],
    updates: Float[Array, "b p n d_v"],
    decays: Float[Array, "b p n"],
    counts: Int[Array, " b"],
) -> Float[Array, "b n d_k d_v"]:
    """Returns the states behind the first `counts` nodes of a path."""
    return (walk if _is_exact() else solve).fold(states, keys, updates, decays, counts)


def _is_exact() -> bool:
    return device().platform == "cpu"
