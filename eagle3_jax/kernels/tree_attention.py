"""Attention of a few new tokens over a committed prefix and their own tail under an ancestor mask.

One function serves prefill (empty prefix, causal tail), one-token decode (a tail of one), the verification of a draft
tree and the drafting of it (EAGLE3_SPEC section 5.2).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def tree_attention(
    queries: Float[Array, "b t n d"],
    keys: Float[Array, "b k s d"],
    values: Float[Array, "b k s d"],
    lengths: Int[Array, " b"],
    tail_mask: Bool[Array, "b t m"] | None = None,
) -> Float[Array, "b t n d"]:
    """softmax(q k^T / sqrt(d)) v over slots [0, length) without any mask and the tail at [length, length + m).

    Args:
        queries: n = group * k query heads, grouped by KV head.
        keys, values: contiguous caches of s slots; the new tokens' own are already in the tail.
        lengths: int32, committed tokens of each sequence.
        tail_mask: which of the m tail slots each query sees; None is causal with m = t.

    Returns:
        In the queries' dtype; the softmax is float32.
    """
    b, t, n, d = queries.shape
    kv_heads, slots = keys.shape[1], keys.shape[2]
    tail = jnp.arange(slots)[None, :] - lengths[:, None]  # [b, s], index into the tail
    if tail_mask is None:
        visible = tail[:, None, :] <= jnp.arange(t)[None, :, None]
    else:
        m = tail_mask.shape[-1]
        inside = jnp.take_along_axis(tail_mask, jnp.clip(tail, 0, m - 1)[:, None, :], axis=-1)
        visible = (tail < 0)[:, None, :] | (inside & (tail >= 0)[:, None, :] & (tail < m)[:, None, :])
    rows = queries.reshape(b, t, kv_heads, n // kv_heads, d).transpose(0, 2, 3, 1, 4).reshape(b, kv_heads, -1, d)
    scores = jnp.einsum(
        "bkrd,bksd->bkrs", rows, keys, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    scores = scores.reshape(b, kv_heads, -1, t, slots) * d**-0.5
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype).reshape(b, kv_heads, -1, slots)
    attended = jnp.einsum("bkrs,bksd->bkrd", weights, values, precision=jax.lax.Precision.HIGHEST)
    return attended.reshape(b, kv_heads, -1, t, d).transpose(0, 3, 1, 2, 4).reshape(b, t, n, d)
