"""Tree attention in XLA's operations; pages are gathered into rows."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from eagle3_jax.kernels.cache.xla import write


class Operands(NamedTuple):
    """Arrays of one call, see `tree_attention`; new entries are [b, k, t, d], in the cache's dtype."""

    queries: Float[Array, "b t n d"]
    new_keys: Array
    new_values: Array | None
    keys: Array
    values: Array | None
    lengths: Int[Array, " b"]
    tail_mask: Bool[Array, "b t m"] | None
    page_table: Int[Array, "b pages"] | None
    first: Int[Array, "b t"] | None
    sinks: Float[Array, " n"] | None


def attend_xla(o: Operands) -> tuple[Float[Array, "b t n d"], Array, Array | None]:
    """See `tree_attention`."""
    end = o.lengths + (o.queries.shape[1] if o.tail_mask is None else o.tail_mask.shape[-1])
    at, table = end - o.queries.shape[1], o.page_table
    new, caches = (o.new_keys, o.new_values), (o.keys, o.values)
    keys, values = jax.tree.map(lambda cache, x: write(cache, x, at, table), caches, new)
    seen = gathered(keys, table, end)
    return _attended(o, seen, seen if values is None else gathered(values, table, end)), keys, values


def gathered(
    pages: Num[Array, "p k s d"], page_table: Int[Array, "b n"] | None, written: Int[Array, " b"]
) -> Num[Array, "b k slots d"]:
    """Gathers each sequence's pages in a row, zeros where nothing was written; without a table they are rows."""
    if page_table is None:
        return pages
    found = jnp.take(pages, page_table, axis=0, mode="clip")  # [b, n, k, s, d]
    b, n, k, s, d = found.shape
    row = found.swapaxes(1, 2).reshape(b, k, n * s, d)
    slots = jnp.arange(n * s)[None, None, :, None]
    return jnp.where(slots < written[:, None, None, None], row, jnp.zeros((), row.dtype))


def visible(t: int, slots: int, lengths: Array, tail_mask: Array | None, first: Array | None) -> Bool[Array, "b t s"]:
    """Tells which slots each of t queries sees, see `tree_attention`."""
    tail = jnp.arange(slots)[None, :] - lengths[:, None]  # [b, s], index into the tail
    if tail_mask is None:
        seen = tail[:, None, :] <= jnp.arange(t)[None, :, None]
    else:
        m = tail_mask.shape[-1]
        inside = jnp.take_along_axis(tail_mask, jnp.clip(tail, 0, m - 1)[:, None, :], axis=-1)
        seen = (tail < 0)[:, None, :] | (inside & (tail >= 0)[:, None, :] & (tail < m)[:, None, :])
    return seen if first is None else seen & (jnp.arange(slots)[None, None, :] >= first[:, :, None])


def _attended(o: Operands, keys: Array, values: Array) -> Float[Array, "b t n d"]:
    queries, sinks = o.queries, o.sinks
    b, t, n, d = queries.shape
    kv_heads, slots = keys.shape[1], keys.shape[2]
    keys, values = keys.astype(queries.dtype), values.astype(queries.dtype)
    seen = visible(t, slots, o.lengths, o.tail_mask, o.first)
    rows = queries.reshape(b, t, kv_heads, n // kv_heads, d).transpose(0, 2, 3, 1, 4).reshape(b, kv_heads, -1, d)
    scores = jnp.einsum(
        "bkrd,bksd->bkrs", rows, keys, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    scores = scores.reshape(b, kv_heads, -1, t, slots) * d**-0.5
    scores = jnp.where(seen[:, None, None], scores, jnp.finfo(jnp.float32).min)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(kv_heads, -1, 1, 1), (*scores.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1]
    weights = weights.astype(values.dtype).reshape(b, kv_heads, -1, slots)
    attended = jnp.einsum("bkrs,bksd->bkrd", weights, values, precision=jax.lax.Precision.HIGHEST)
    return attended.reshape(b, kv_heads, -1, t, d).transpose(0, 3, 1, 2, 4).reshape(b, t, n, d)
