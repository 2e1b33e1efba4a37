"""Attention of a few new tokens over a committed prefix and their own tail under an ancestor mask.

One function serves prefill (empty prefix, causal tail), one-token decode (a tail of one), the verification of a draft
tree and the drafting of it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, Bool, Float, Int, Num

from eagle3_jax.kernels.cache_write import write
from eagle3_jax.kernels.dispatch import Implementation, cores, default_implementation, device, over_mesh
from eagle3_jax.kernels.tpu.packed_rows import tile_rows
from eagle3_jax.kernels.tpu.registers import LANES, SMEM_LIMIT, VMEM_LIMIT, check_fits
from eagle3_jax.kernels.tree_attention.packed_heads import own_parts, pack_heads, spread_queries
from eagle3_jax.kernels.tree_attention.plan import Shape
from eagle3_jax.kernels.tree_attention.tpu import attend
from eagle3_jax.kernels.tree_attention.xla import attend_xla

# How the kernel's work is cut, by the kind of chip, else "default"; chosen by libtpu's simulation (docs/benchmarks.md).
# At most: keys of a block over all KV heads, those of one head in it, scores of an item, and rows of a tile, all query
# heads of a KV head together.
BLOCKS: dict[str, dict[str, int]] = json.loads(
    (importlib.resources.files("eagle3_jax.kernels.tree_attention") / "blocks.json").read_text()
)
_ITEM = 512  # keys of an item, at least: the fixed costs of narrower ones outweigh what they save
_NODES = 16  # nodes come in multiples of this: the rows of a bfloat16 tile


def tree_attention(
    queries: Float[Array, "b t n d"],
    new_keys: Float[Array, "b t k d"],
    new_values: Float[Array, "b t k d"],
    keys: Array,
    values: Array,
    lengths: Int[Array, " b"],
    tail_mask: Bool[Array, "b t m"] | None = None,
    *,
    page_table: Int[Array, "b pages"] | None = None,
    continued: bool = False,
    first: Int[Array, "b t"] | None = None,
    sinks: Float[Array, " n"] | None = None,
    key_scale: Float[Array, " k"] | None = None,
    value_scale: Float[Array, " k"] | None = None,
    implementation: Implementation | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "b t n d"], Array, Array]:
    """Writes the new tokens' keys and values behind the tail that is there, and attends.

    softmax(q k^T / sqrt(d)) v over slots [0, length) without any mask and the tail at [length, length + m), whose last
    t slots are the new tokens' own.

    Args:
        queries: n = group * k query heads, grouped by KV head.
        new_keys, new_values: of the new tokens. The cache holds them in its dtype, divided by its scale; int8 rounds to
            the nearest, and what is beyond int8's or float8's range becomes its end.
        keys, values: the cache, [b, k, slots, d], contiguous; with a page table [pages, k, page_size, d]. For the
            kernel a row may hold several heads side by side, and zeros behind them (`packed_heads.cache_rows`). Any
            dtype, int8 and float8 included: it is read as the queries' dtype. To have it written in place, donate it.
            No two sequences may share a page that is written, unless `continued`.
        lengths: int32, committed tokens of each sequence; length + m must not exceed the slots.
        tail_mask: which of the m >= t tail slots each query sees; None is causal with m = t. Every query sees one slot
            at least.
        page_table: int32, the page that holds each stretch of page_size slots; entries behind the tail may be anything.
        continued: sequences may hold consecutive stretches of one prompt, on the same pages: the entries of all are
            written before any query attends.
        first: int32, the first slot that each query sees (of its window, of its chunk). A tree's nodes do not stand at
            their positions: which of the tail are too far back, the mask must say.
        sinks: a logit of each query head that takes part in its softmax and attends to nothing (gpt-oss).
        key_scale, value_scale: float32, what the entries of each KV head are to be multiplied by.
        implementation: the default is "pallas" on a TPU and "xla" elsewhere.
        interpret: runs the kernel without a TPU, `pltpu.InterpretParams` included.

    Returns:
        What is attended, in the queries' dtype (scores, softmax and sums are float32), and the keys and values with the
        new ones; all other slots are as they were.

    Raises:
        ValueError: a tail without room for the new tokens; slots or pages that the kernel cannot read, or more than it
            can hold in VMEM; with the numbers.
    """
    t, (kv_heads, d) = queries.shape[1], new_keys.shape[2:]
    if tail_mask is not None and tail_mask.shape[-1] < t:
        raise ValueError(f"tail_mask: got {tail_mask.shape[-1]} slots, expected those of the {t} new tokens at least")
    scaled = queries if key_scale is None else _scaled(queries, key_scale)
    new_keys, new_values = _stored(new_keys, key_scale, keys.dtype), _stored(new_values, value_scale, values.dtype)
    rest = keys, values, lengths, tail_mask, page_table, first, sinks
    if (implementation or default_implementation()) == "xla":
        attended, keys, values = attend_xla(scaled, new_keys, new_values, *rest)
    else:
        _, rows, _, width = keys.shape
        beside, packed = kv_heads // rows, (rows, width) != (kv_heads, d)
        if packed:
            scaled = spread_queries(scaled, beside, rows, width)
            new_keys, new_values = pack_heads(new_keys, rows, width), pack_heads(new_values, rows, width)
        tokens, cache, each = P("data", None, "model"), P("data", "model"), P("data")
        attended, keys, values = over_mesh(
            functools.partial(_pallas, scale=d**-0.5, continued=continued, interpret=interpret),
            (scaled, new_keys, new_values, *rest),
            (tokens, cache, cache, cache, cache, each, each, each, each, P("model")),
            (tokens, cache, cache),
            # Pages belong to no sequence: every device of the data axis needs all of them.
            {"model": keys.shape[1]} | ({"data": len(queries)} if page_table is None else {}),
        )
        attended = own_parts(attended, beside, rows, d) if packed else attended
    return attended if value_scale is None else _scaled(attended, value_scale), keys, values


def _stored(new: Float[Array, "b t k d"], scale: Float[Array, " k"] | None, dtype: Any) -> Num[Array, "b k t d"]:
    """New entries as the cache holds them."""
    new = new.swapaxes(1, 2)
    if scale is not None:
        new = new.astype(scale.dtype) / scale[None, :, None, None]
    if jnp.dtype(dtype).itemsize > 1:
        return new.astype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        new, limits = jnp.round(new), jnp.iinfo(dtype)
    else:
        limits = jnp.finfo(dtype)
    return jnp.clip(new, float(limits.min), float(limits.max)).astype(dtype)


def _scaled(x: Float[Array, "b t n d"], scale: Float[Array, " k"]) -> Float[Array, "b t n d"]:
    """By the scale of each KV head, in its dtype: rounded to bfloat16 it would bias all that is attended."""
    each = jnp.repeat(scale, x.shape[2] // scale.shape[0])
    return (x.astype(scale.dtype) * each[None, None, :, None]).astype(x.dtype)


def _pallas(
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
    pad = ((0, 0), (0, s.nodes - t))
    folded = jnp.pad(queries, (*pad, (0, 0), (0, 0))).reshape(b, -1, s.tile, s.kv_heads, s.group, d)
    folded = folded.transpose(0, 3, 1, 4, 2, 5).reshape(b, s.kv_heads, -1, d)  # rows: tile, group, node
    bits = None if tail_mask is None else jnp.pad(pack(tail_mask), (*pad, (0, 0)))
    first = None if first is None else jnp.pad(first, pad, mode="edge")
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(s.kv_heads, s.group) * math.log2(math.e)
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
    return attended.reshape(b, s.nodes, n, d)[:, :t], keys, values


def _parts(batch: int, kv_heads: int) -> int:
    """Of a sequence's KV heads, for the cores of a device to share where they cannot share the sequences evenly."""
    return cores() if batch % cores() and kv_heads % cores() == 0 else 1


def _heads_apart(x: Num[Array, "b k s d"], parts: int) -> Num[Array, "rows heads s d"]:
    """Parts of the KV heads as if they were sequences (pages) of their own."""
    return x.reshape(x.shape[0] * parts, x.shape[1] // parts, *x.shape[2:])


def _repeated(x: Num[Array, "b *rest"], parts: int) -> Num[Array, "rows *rest"]:
    """What is a sequence's, for each part of its heads."""
    return jnp.repeat(x, parts, axis=0)


def plan(
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    dtypes: tuple[Any, Any],
    *,
    tail: int,
    pages: int | None,
    continued: bool = False,
) -> Shape:
    """How the kernel cuts its work.

    Args:
        queries, keys: shapes, as `tree_attention` takes them. dtypes: of both.
        tail: slots of the tail.
        pages: columns of the page table; None is contiguous.
        continued: see `tree_attention`.

    Raises:
        ValueError: with the numbers, where something does not fit.
    """
    b, t, n, d = queries
    kv_heads, slots = keys[1], keys[2]
    group = n // kv_heads
    paged = pages is not None
    page_size = slots if paged else math.gcd(slots, 256)
    height = tile_rows(dtypes[1])
    if page_size % height:
        what = "page_size" if paged else "slots"
        raise ValueError(f"{what}: got {slots}, expected a multiple of {height} for the TPU kernel")
    pages = pages or slots // page_size
    nodes = -(-t // _NODES) * _NODES
    blocks = BLOCKS.get(device().device_kind, BLOCKS["default"])
    tile = min(nodes, max(_NODES, blocks["rows"] // group // _NODES * _NODES))
    unit = math.lcm(page_size, LANES)  # whole pages, whole registers of scores
    most = min(blocks["keys_per_head"], blocks["keys_per_step"] // kv_heads, -(-pages * page_size // unit) * unit)
    block = max(unit, most // unit * unit)
    piece = math.gcd(block, 256)

    def cut(tile: int) -> Shape:
        item = max(_ITEM, blocks["scores_per_item"] // (group * tile))
        width = max(piece, min(item, block) // piece * piece)
        while block % width:  # a block is a whole number of items
            width -= piece
        return Shape(
            batch=b,
            nodes=-(-nodes // tile) * tile,
            group=group,
            kv_heads=kv_heads,
            head_dim=d,
            page_size=page_size,
            pages=pages,
            tile=tile,
            step=block // page_size,
            width=width,
            tail=tail,
            # A later tile of queries would read what an earlier one writes, and so would a later sequence.
            written=t if tile == nodes and not continued else 0,
        )

    sizes = [jnp.dtype(dtype).itemsize for dtype in dtypes]
    shape = cut(tile)
    while shape.vmem_bytes(*sizes) > VMEM_LIMIT and tile > _NODES:  # many KV heads
        tile = max(_NODES, tile // 2 // _NODES * _NODES)
        shape = cut(tile)
    check_fits("VMEM", shape.vmem_bytes(*sizes), VMEM_LIMIT, shape)
    check_fits("SMEM", shape.smem_bytes(paged), SMEM_LIMIT, f"{b} sequences, {pages if paged else 0} pages each")
    return shape


def pack(mask: Bool[Array, "b t m"]) -> Int[Array, "b t w"]:
    """Rows of bits as int32 words, the first slot in the lowest bit of the first word."""
    b, t, m = mask.shape
    bits = jnp.pad(mask, ((0, 0), (0, 0), (0, -m % 32))).reshape(b, t, -1, 32).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(
        (bits << jnp.arange(32, dtype=jnp.uint32)[None, None, None]).sum(axis=-1), jnp.int32
    )
