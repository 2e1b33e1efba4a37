"""Attention for blocks of drafts: each row attends to the context before its anchor and to its own block.

XLA's operations only. Scores are held for a group of anchors at a time; the backward pass recomputes them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.contraction import KEPT, contract

# Scores held at a time, float32: 512 MiB.
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
    """Attends from blocks of rows to the context [first, anchor) and to their own block; row j is at anchor + j.

    Args:
        queries, keys, values: a blocks of r rows each.
        first: the slot at which each anchor's document begins.
        anchors: the slot of row 0 of each block.
        causal: a row sees its block up to itself; else the whole block.
        window: a row sees the last `window` positions up to its own, in context and block; None is no limit.

    Returns:
        In the queries' dtype; scores, softmax and sums are float32.
    """
    b, a, r, n, _ = queries.shape
    size = max(1, min(a, _SCORES // max(1, b * r * n * context_keys.shape[1])))
    while a % size:
        size -= 1

    @jax.checkpoint
    def attend(blocks: tuple[Array, ...]) -> Array:
        return _attend(*blocks, context_keys, context_values, causal=causal, window=window)

    def cut(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(b, a // size, size, *x.shape[2:]), 1, 0)

    attended = jax.lax.map(attend, tuple(map(cut, (queries, keys, values, first, anchors))))
    return checkpoint_name(jnp.moveaxis(attended, 0, 1).reshape(queries.shape), KEPT)


def _attend(*operands: Array, causal: bool, window: int | None) -> Array:
    queries, keys, values, first, anchors, context_keys, context_values = operands
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
