"""Tree attention on a TPU: operands in the layout of the Pallas kernel (`tpu_kernel.py`), split over mesh and cores."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, Bool, Float, Int, Num

from eagle3_jax.kernels.cache.xla import write
from eagle3_jax.kernels.dispatch import cores, over_mesh
from eagle3_jax.kernels.tree_attention.packed_heads import own_parts, pack_heads, spread_queries
from eagle3_jax.kernels.tree_attention.plan import WORD, plan
from eagle3_jax.kernels.tree_attention.tpu_kernel import attend


def attend_tpu(
    queries: Float[Array, "b t n d"],
    new_keys: Array,
    new_values: Array,
    keys: Array,
    values: Array,
    lengths: Int[Array, " b"],
    tail_mask: Bool[Array, "b t m"] | None,
    page_table: Int[Array, "b pages"] | None,
    first: Int[Array, "b t"] | None,
    sinks: Float[Array, " n"] | None,
    *,
    continued: bool,
    interpret: Any,
) -> tuple[Float[Array, "b t n d"], Array, Array]:
    """See `tree_attention`. New entries [b, k, t, d] have the cache's dtype; a cache row may hold several heads."""
    kv_heads, d = new_keys.shape[1], new_keys.shape[3]
    _, rows, _, width = keys.shape
    beside, packed = kv_heads // rows, (rows, width) != (kv_heads, d)
    if packed:
        queries = spread_queries(queries, beside, rows, width)
        new_keys, new_values = pack_heads(new_keys, rows, width), pack_heads(new_values, rows, width)
    tokens, cache, each = P("data", None, "model"), P("data", "model"), P("data")
    attended, keys, values = over_mesh(
        functools.partial(_local, scale=d**-0.5, continued=continued, interpret=interpret),
        (queries, new_keys, new_values, keys, values, lengths, tail_mask, page_table, first, sinks),
        (tokens, cache, cache, cache, cache, each, each, each, each, P("model")),
        (tokens, cache, cache),
        # A page may hold tokens of any sequence: every device of the data axis needs all pages.
        {"model": keys.shape[1]} | ({"data": len(queries)} if page_table is None else {}),
    )
    return own_parts(attended, beside, rows, d) if packed else attended, keys, values


def _local(
    queries: Float[Array, "b t n d"],
    new_keys: Array,
    new_values: Array,
    keys: Array,
    values: Array,
    lengths: Int[Array, " b"],
    tail_mask: Bool[Array, "b t m"] | None,
    page_table: Int[Array, "b pages"] | None,
    first: Int[Array, "b t"] | None,
    sinks: Float[Array, " n"] | None,
    *,
    scale: float,
    continued: bool,
    interpret: Any,
) -> tuple[Float[Array, "b t n d"], Array, Array]:
    """Attends for one device's share."""
    b, t, n, d = queries.shape
    s = plan(
        queries.shape,
        keys.shape,
        (queries.dtype, keys.dtype),
        tail=t if tail_mask is None else tail_mask.shape[-1],
        pages=None if page_table is None else page_table.shape[1],
        continued=continued,
    )
    if s.written:
        rows = ((0, 0), (0, 0), (0, s.new_rows(keys.dtype) - t), (0, 0))
        new = jnp.pad(new_keys, rows), jnp.pad(new_values, rows)
    else:
        new, at = None, lengths + s.tail - t
        keys, values = write(keys, new_keys, at, page_table), write(values, new_values, at, page_table)
    pad, group = ((0, 0), (0, s.nodes - t)), n // s.kv_heads
    more = (0, s.group - group)
    padded = jnp.pad(queries.reshape(b, t, s.kv_heads, group, d), (*pad, (0, 0), more, (0, 0)))
    folded = padded.reshape(b, -1, s.tile, s.kv_heads, s.group, d)
    folded = folded.transpose(0, 3, 1, 4, 2, 5).reshape(b, s.kv_heads, -1, d)  # rows: tile, group, node
    bits = None if tail_mask is None else jnp.pad(mask_words(tail_mask), (*pad, (0, 0)))
    first = None if first is None else jnp.pad(first, pad, mode="edge")
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(s.kv_heads, group) * math.log2(math.e)
        sinks = jnp.pad(sinks, ((0, 0), more))
    parts = 1 if sinks is not None else _parts(b, s.kv_heads)
    attended, *caches = attend(
        dataclasses.replace(s, batch=b * parts, kv_heads=s.kv_heads // parts),
        scale,
        _heads_apart(folded, parts),
        _heads_apart(keys, parts),
        _heads_apart(values, parts),
        None if page_table is None else _repeated(page_table, parts) * parts + jnp.arange(b * parts)[:, None] % parts,
        _repeated(lengths, parts),
        None if bits is None else _repeated(bits, parts),
        None if first is None else _repeated(first, parts),
        sinks,
        None if new is None else (_heads_apart(new[0], parts), _heads_apart(new[1], parts)),
        interpret=interpret,
    )
    attended = attended.reshape(b, s.kv_heads, -1, s.group, s.tile, d).transpose(0, 2, 4, 1, 3, 5)
    keys, values = (cache.reshape(before.shape) for cache, before in zip(caches, (keys, values), strict=True))
    attended = attended.reshape(b, s.nodes, s.kv_heads, s.group, d)[:, :t, :, :group]
    return attended.reshape(queries.shape), keys, values


def _parts(batch: int, kv_heads: int) -> int:
    """Returns the parts of a sequence's KV heads: cores share the heads if the batch is no multiple of the cores."""
    return cores() if batch % cores() and kv_heads % cores() == 0 else 1


def _heads_apart(x: Num[Array, "b k s d"], parts: int) -> Num[Array, "rows heads s d"]:
    """Makes each part of the KV heads a sequence (or page) of its own."""
    return x.reshape(x.shape[0] * parts, x.shape[1] // parts, *x.shape[2:])


def _repeated(x: Num[Array, "b *rest"], parts: int) -> Num[Array, "rows *rest"]:
    """Repeats an operand of each sequence for the parts of its heads."""
    return jnp.repeat(x, parts, axis=0)


def mask_words(mask: Bool[Array, "b t m"]) -> Int[Array, "b t w"]:
    """Packs the mask into int32 words; slot 0 is the lowest bit of the first word."""
    b, t, m = mask.shape
    bits = jnp.pad(mask, ((0, 0), (0, 0), (0, -m % WORD))).reshape(b, t, -1, WORD).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(
        (bits << jnp.arange(WORD, dtype=jnp.uint32)[None, None, None]).sum(axis=-1), jnp.int32
    )
