"""Tree attention on a TPU: operands in the layout of the Pallas kernel (`tpu_kernel.py`), split over mesh and cores."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.kernels.cache.xla import write
from eagle3_jax.kernels.dispatch import cores, over_mesh
from eagle3_jax.kernels.tree_attention.packed_heads import own_parts, pack_heads, spread_queries
from eagle3_jax.kernels.tree_attention.plan import WORD, plan
from eagle3_jax.kernels.tree_attention.tpu_kernel import attend
from eagle3_jax.kernels.tree_attention.xla import Operands


def attend_tpu(o: Operands, *, continued: bool, interpret: Any) -> tuple[Float[Array, "b t n d"], Array, Array | None]:
    """See `tree_attention`; a cache row may hold several heads."""
    kv_heads, d = o.new_keys.shape[1], o.new_keys.shape[3]
    _, rows, _, width = o.keys.shape
    beside, packed = kv_heads // rows, (rows, width) != (kv_heads, d)
    if packed:
        new_keys, new_values = jax.tree.map(lambda x: pack_heads(x, rows, width), (o.new_keys, o.new_values))
        queries = spread_queries(o.queries, beside, rows, width)
        o = o._replace(queries=queries, new_keys=new_keys, new_values=new_values)
    tokens, cache, each = P("data", None, "model"), P("data", "model"), P("data")
    attended, keys, values = over_mesh(
        functools.partial(_local, scale=d**-0.5, continued=continued, interpret=interpret),
        o,
        (tokens, cache, cache, cache, cache, each, each, each, each, P("model")),
        (tokens, cache, cache),
        # A page may hold tokens of any sequence: every device of the data axis needs all pages.
        {"model": rows} | ({"data": len(o.queries)} if o.page_table is None else {}),
    )
    return own_parts(attended, beside, rows, d) if packed else attended, keys, values


def _local(
    *operands: Any, scale: float, continued: bool, interpret: Any
) -> tuple[Float[Array, "b t n d"], Array, Array | None]:
    """Attends for one device's share, the fields of `Operands`."""
    queries, new_keys, new_values, keys, values, lengths, tail_mask, page_table, first, sinks = operands
    (b, t, n, d), new, caches = queries.shape, (new_keys, new_values), (keys, values)
    s = plan(
        queries.shape,
        keys.shape,
        (queries.dtype, keys.dtype),
        tail=t if tail_mask is None else tail_mask.shape[-1],
        pages=None if page_table is None else page_table.shape[1],
        continued=continued,
        caches=len(jax.tree.leaves(caches)),
    )
    if s.written:
        rows = ((0, 0), (0, 0), (0, s.new_rows(keys.dtype) - t), (0, 0))
        new = jax.tree.map(lambda x: jnp.pad(x, rows), new)
    else:
        at = lengths + s.tail - t
        caches, new = jax.tree.map(lambda cache, x: write(cache, x, at, page_table), caches, new), None
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
    # Cores share the KV heads if the batch is no multiple of the cores.
    parts = cores() if sinks is None and b % cores() and s.kv_heads % cores() == 0 else 1
    # Each part of the KV heads is a sequence (or page) of its own.
    folded, apart, new = jax.tree.map(
        lambda x: x.reshape(x.shape[0] * parts, x.shape[1] // parts, *x.shape[2:]), (folded, caches, new)
    )
    page_table, lengths, bits, first = jax.tree.map(
        lambda x: jnp.repeat(x, parts, axis=0), (page_table, lengths, bits, first)
    )
    table = None if page_table is None else page_table * parts + jnp.arange(b * parts)[:, None] % parts
    of_parts = dataclasses.replace(s, batch=b * parts, kv_heads=s.kv_heads // parts)
    operands = folded, jax.tree.leaves(apart), table, lengths, bits, first, sinks, jax.tree.leaves(new)
    attended, *kept = attend(of_parts, scale, *operands, interpret=interpret)
    attended = attended.reshape(b, s.kv_heads, -1, s.group, s.tile, d).transpose(0, 2, 4, 1, 3, 5)
    keys, values = jax.tree.unflatten(jax.tree.structure(caches), [cache.reshape(keys.shape) for cache in kept])
    attended = attended.reshape(b, s.nodes, s.kv_heads, s.group, d)[:, :t, :, :group]
    return attended.reshape(queries.shape), keys, values


def mask_words(mask: Bool[Array, "b t m"]) -> Int[Array, "b t w"]:
    """Packs the mask into int32 words; slot 0 is the lowest bit of the first word."""
    b, t, m = mask.shape
    bits = jnp.pad(mask, ((0, 0), (0, 0), (0, -m % WORD))).reshape(b, t, -1, WORD).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(
        (bits << jnp.arange(WORD, dtype=jnp.uint32)[None, None, None]).sum(axis=-1), jnp.int32
    )
