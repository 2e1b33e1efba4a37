"""Attention of drafted blocks: rows read the context in front of their anchor, and their own block.

In XLA's operations alone. Scores exist for some anchors at a time, and are computed again in the backward pass.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.contraction import contract

# Scores that exist at the same time, float32: half a GiB.
_SCORES = 2**27


def block_attention(
    queries: Float[Array, "b a r n d"],
    keys: Float[Array, "b a r k d"],
    values: Float[Array, "b a r k d"],
    context_keys: Float[Array, "b t k d"],
    context_values: Float[Array, "b t k d"],
    first: Int[Array, "b a"],
    anchors: Int[Array, "b a"],
    *,
    causal: bool,
    window: int | None,
) -> Float[Array, "b a r n d"]:
    """Row j of a block stands at anchor + j. It sees context slots first <= t < anchor, and rows of its own block.

    Args:
        queries, keys, values: of a blocks of r rows.
        first: the slot at which an anchor's document begins. anchors: the slot of row 0.
        causal: rows see the rows up to themselves; else all of their block.
        window: slots from anchor + j - (window - 1) on alone, of context and block.

    Returns:
        In the queries' dtype; scores, softmax and sums are float32.
    """
    b, a, r, n, _ = queries.shape
    size = max(1, min(a, _SCORES // max(1, b * r * n * context_keys.shape[1])))
    while a % size:
        size -= 1

    @jax.checkpoint
    def attend(blocks: tuple[Array, ...]) -> Array:
        q, k, v, start, end = blocks
        return _attend(q, k, v, context_keys, context_values, start, end, causal, window)

    def cut(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(b, a // size, size, *x.shape[2:]), 1, 0)

    attended = jax.lax.map(attend, tuple(map(cut, (queries, keys, values, first, anchors))))
    return jnp.moveaxis(attended, 0, 1).reshape(queries.shape)


def _attend(
    queries: Array,
    keys: Array,
    values: Array,
    context_keys: Array,
    context_values: Array,
    first: Array,
    anchors: Array,
    causal: bool,
    window: int | None,
) -> Array:
    b, a, r, n, d = queries.shape
    t, kv_heads = context_keys.shape[1:3]
    q = queries.reshape(b, a, r, kv_heads, n // kv_heads, d).transpose(0, 3, 1, 4, 2, 5)  # [b, k, a, g, r, d]
    slot, row = jnp.arange(t)[None, None, None], jnp.arange(r)
    lowest = first[:, :, None, None]
    own_visible = jnp.ones((r, r), bool)
    if window is not None:
        lowest = jnp.maximum(lowest, anchors[:, :, None, None] + row[None, None, :, None] - (window - 1))
        own_visible &= row[None] > row[:, None] - window
    if causal:
        own_visible &= row[None] <= row[:, None]
    visible = (slot >= lowest) & (slot < anchors[:, :, None, None])  # [b, a, r or 1, t]
    scale, least = d**-0.5, jnp.finfo(jnp.float32).min

    seen = contract("bkmd,btkd->bkmt", q.reshape(b, kv_heads, -1, d), context_keys)
    seen = jnp.where(visible[:, None, :, None], seen.reshape(*q.shape[:-1], t) * scale, least)
    own = contract("bkagrd,baskd->bkagrs", q, keys) * scale
    own = jnp.where(own_visible[None, None, None, None], own, least)
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(seen, axis=-1), jnp.max(own, axis=-1)))[..., None]
    seen, own = jnp.exp(seen - top), jnp.exp(own - top)
    total = jnp.sum(seen, axis=-1) + jnp.sum(own, axis=-1)
    seen = seen.reshape(b, kv_heads, -1, t).astype(queries.dtype)
    attended = contract("bkmt,btkd->bkmd", seen, context_values).reshape(q.shape)
    attended += contract("bkagrs,baskd->bkagrd", own.astype(queries.dtype), values)
    attended /= total[..., None]
    return attended.transpose(0, 2, 4, 1, 3, 5).reshape(queries.shape).astype(queries.dtype)
