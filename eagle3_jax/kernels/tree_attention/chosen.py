"""Attention to chosen slots (DeepSeek-V3.2's sparse attention): an indexer scores what a token sees, the best are read.

In XLA's operations, on every device. Each node of a tree chooses among the prefix and its own ancestors. Slots are
chosen and attended in the order of their scores, so a node has the result of the same tokens in a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.kernels.dispatch import over_mesh
from eagle3_jax.kernels.tree_attention.xla import gathered, visible

_sum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
_BYTES = 64 << 20  # most bytes of scores, or of gathered rows, at a time


class Index(NamedTuple):
    """What an indexer of h heads makes of t tokens; weights are float32."""

    queries: Float[Array, "b t h d"]
    weights: Float[Array, "b t h"]
    keys: Float[Array, "b t 1 d"]


def best_slots(
    index: Index,
    keys: Array,
    lengths: Int[Array, " b"],
    tail_mask: Bool[Array, "b t m"] | None,
    page_table: Int[Array, "b pages"] | None,
    first: Int[Array, "b t"] | None,
    count: int,
) -> Int[Array, "b t c"]:
    """Chooses the `count` visible slots of the highest scores, sum_h weights * relu(queries k), in their order.

    Args:
        keys: the indexer's cache with the new keys; its forms, and the other arguments, are those of `tree_attention`.

    Returns:
        int32; -1 behind the last where fewer are visible. Of equal scores the lowest slot is chosen.
    """
    operands = index.queries, index.weights, keys, lengths, tail_mask, page_table, first
    sizes = {"data": len(index.queries)} if page_table is None else {}
    return over_mesh(functools.partial(_best, count=count), operands, (P("data"),) * 7, P("data"), sizes)


def attend_chosen(
    queries: Float[Array, "b t n d"],
    keys: Array,
    chosen: Int[Array, "b t c"],
    page_table: Int[Array, "b pages"] | None,
) -> Float[Array, "b t n d"]:
    """Computes `tree_attention` of all heads over the chosen slots of one row of keys, which are the values too."""
    heads, rows = P("data", None, "model"), P("data")
    sizes = {"model": queries.shape[2]} | ({"data": len(queries)} if page_table is None else {})
    return over_mesh(_attended, (queries, keys, chosen, page_table), (heads, rows, rows, rows), heads, sizes)


def _best(*operands: Any, count: int) -> Array:
    queries, weights, keys, lengths, tail_mask, page_table, first = operands
    b, t, h, d = queries.shape
    end = lengths + (t if tail_mask is None else tail_mask.shape[-1])
    rows = gathered(keys, page_table, end)[:, 0, :, :d].astype(queries.dtype)

    def one(query: Array, weight: Array, seen: Array) -> Array:
        scores = _sum("bhd,bsd->bhs", query, rows, preferred_element_type=jnp.float32)
        total = _sum("bhs,bh->bs", jax.nn.relu(scores), weight)
        best, slots = jax.lax.top_k(jnp.where(seen, total, -jnp.inf), count)
        return jnp.where(best > -jnp.inf, slots, -1)

    seen = visible(t, rows.shape[1], lengths, tail_mask, first)
    return _by_token(one, (queries, weights, seen), 4 * b * h * rows.shape[1])


def _attended(queries: Array, keys: Array, chosen: Array, page_table: Array | None) -> Array:
    b, _, _, d = queries.shape

    def one(query: Array, slots: Array) -> Array:
        at = jnp.maximum(slots, 0)
        if page_table is None:
            found = jnp.take_along_axis(keys[:, 0], at[..., None], axis=1)
        else:
            size = keys.shape[2]
            found = keys[jnp.take_along_axis(page_table, at // size, axis=1), 0, at % size]
        found = found[..., :d].astype(query.dtype)
        scores = _sum("bnd,bcd->bnc", query, found, preferred_element_type=jnp.float32) * d**-0.5
        shares = jax.nn.softmax(jnp.where(slots[:, None] >= 0, scores, jnp.finfo(jnp.float32).min), axis=-1)
        return _sum("bnc,bcd->bnd", shares.astype(query.dtype), found)

    return _by_token(one, (queries, chosen), b * chosen.shape[2] * keys.shape[3] * queries.dtype.itemsize)


def _by_token(one: Callable[..., Array], operands: tuple[Array, ...], size: int) -> Array:
    """Maps over tokens, the second axis, as many at a time as `_BYTES` hold intermediates of `size` bytes."""
    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in operands)
    return jnp.moveaxis(jax.lax.map(lambda x: one(*x), tokens, batch_size=max(1, _BYTES // size)), 0, 1)
