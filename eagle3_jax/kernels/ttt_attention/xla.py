"""Attention of the training-time test in XLA's operations, a block of queries at a time."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from eagle3_jax.kernels.contraction import contract

# Queries per block: bounds the memory for scores, and skips keys that no query of the block sees.
_QUERIES = 256


def attend_xla(*operands: Array) -> Array:
    """See `ttt_attention`.

    Operands: queries; keys and values of step 0, and of later steps; the first index in its row of each query's
    document; the index in their rows of the first queries; the newest step.
    """
    queries, keys, values, later_keys, later_values, starts, begin, newest = operands
    block = jax.checkpoint(_attend_block)  # recomputing scores is cheaper than keeping them
    length, row = queries.shape[1], keys.shape[1]
    index, own = jnp.arange(row)[None, None], (begin + jnp.arange(length))[None, :, None]
    outputs = []
    for start in range(0, length, _QUERIES):
        rows = slice(start, start + _QUERIES)
        seen = slice(0, start + _QUERIES if row == length else row)
        visible = (index[..., seen] <= own[:, rows]) & (index[..., seen] >= starts[:, rows, None])
        later = later_keys[:, :, rows], later_values[:, :, rows]
        outputs.append(block(queries[:, rows], keys[:, seen], values[:, seen], *later, visible, newest))
    return jnp.concatenate(outputs, axis=1)


def _attend_block(
    queries: Array, keys: Array, values: Array, later_keys: Array, later_values: Array, visible: Array, newest: Array
) -> Array:
    """Attends to keys of step 0, [b, s, k, d], and to each query's own of later steps, [steps, b, t, k, d]."""
    b, t, n, d = queries.shape
    s, kv_heads = keys.shape[1], keys.shape[2]
    group = n // kv_heads
    scale = d**-0.5
    q = queries.reshape(b, t, kv_heads, group, d).transpose(0, 2, 3, 1, 4)  # [b, k, g, t, d]
    flat = q.reshape(b, kv_heads, group * t, d)
    scores = contract("bkrd,bskd->bkrs", flat, keys)
    scores = scores.reshape(b, kv_heads, group, t, s) * scale
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    q32 = q.astype(jnp.float32)
    live = [j < newest for j in range(len(later_keys))]
    own_keys = [jnp.where(is_live, _heads_first(k), 0) for is_live, k in zip(live, later_keys, strict=True)]
    own_values = [jnp.where(is_live, _heads_first(v), 0) for is_live, v in zip(live, later_values, strict=True)]
    own = [
        jnp.where(is_live, jnp.sum(q32 * k, axis=-1) * scale, -jnp.inf)
        for is_live, k in zip(live, own_keys, strict=True)
    ]  # [b, k, g, t] each
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, own, jnp.max(scores, axis=-1)))
    unnormed = jnp.exp(scores - top[..., None])
    total = jnp.sum(unnormed, axis=-1)
    weights = unnormed.reshape(b, kv_heads, group * t, s).astype(values.dtype)
    attended = contract("bkrs,bskd->bkrd", weights, values).reshape(q.shape)
    for score, value in zip(own, own_values, strict=True):
        weight = jnp.exp(score - top)
        total += weight
        attended += weight[..., None] * value
    attended /= total[..., None]
    return attended.transpose(0, 3, 1, 2, 4).reshape(b, t, n, d).astype(queries.dtype)


def _heads_first(x: Array) -> Array:
    """Transposes [b, t, k, d] to float32 [b, k, 1, t, d]."""
    return x.astype(jnp.float32).transpose(0, 2, 1, 3)[:, :, None]
