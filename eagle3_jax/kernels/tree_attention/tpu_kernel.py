"""Tree attention as a Pallas kernel for TPU: FlashAttention's online softmax over a cache that the kernel prefetches.

Pages of the cache stream from HBM to VMEM once, with all their KV heads, several to a block, through a double buffer
(`tpu_pages.py`). Only needed blocks take a step, and the next tile of queries finds its first block in VMEM. Queries,
masks and results go through Pallas' own pipeline. Nodes and the query heads of a KV head are folded into the rows of
one matrix, so that the matrix unit sees full tiles. The rows of a single node are its query heads alone: its products
are bound by loading keys and values into the matrix unit, its softmax by rows. Blocks of the committed prefix need no
mask; only blocks that hold the tail expand the ancestor bits, once for all heads.

Software pipelining: work is cut into items, each a KV head and a stretch of keys. The scores of the next item are
computed before the softmax of the current one, so that matrix and vector units work at the same time.

The same pass writes the new tokens' keys and values (`tpu_write.py`), a read-modify-write while their block is in VMEM.
No page is read after it was written: a single tile of queries reads every page once, and with several tiles the caller
writes first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.dispatch import cores
from eagle3_jax.kernels.tpu.registers import LANES, NEVER, VMEM_LIMIT, dot, rescaled, to_lanes
from eagle3_jax.kernels.tree_attention.plan import WORD, Shape
from eagle3_jax.kernels.tree_attention.tpu_pages import Pages, Scalars, scalars
from eagle3_jax.kernels.tree_attention.tpu_write import NewEntries


def attend(
    shape: Shape,
    scale: float,
    queries: Float[Array, "b k r d"],
    caches: Sequence[Array],
    table: Int[Array, "b pages"] | None,
    lengths: Int[Array, " b"],
    bits: Int[Array, "b t w"] | None = None,
    first: Int[Array, "b t"] | None = None,
    sinks: Float[Array, "k g"] | None = None,
    new: Sequence[Array] = (),
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Array, ...]:
    """Computes softmax(q k^T * scale) v; a row is a (tile, query head of the group, node of the tile).

    The cores of a device share the sequences.

    Args:
        caches: keys and values, or keys that are the values too: [pages, k, page_size, d] with a table, else [b, k,
            slots, d]; any type that converts to queries'.
        table: the page of each page_size slots; None is contiguous.
        bits: int32 words; bit i is set if the node sees tail slot i. None is causal: node i sees slots 0..i of the
            tail.
        first: the lowest slot that a node sees; None is 0.
        sinks: a base-2 logit per query head that joins the softmax and has no value.
        new: entries to write to each of the caches, [b, k, shape.new_rows(dtype), d] in the cache's dtype.

    Returns:
        Attended rows [b, k, r, d], and the caches with the new entries; donated caches are written in place.
    """
    s, dtype = shape, caches[0].dtype
    known = scalars(s, table, lengths, first, len(caches[0]))
    tile = pl.BlockSpec((1, s.kv_heads, s.rows, s.head_dim), lambda b, q: (b, 0, q, 0))
    words, lowest = (pl.BlockSpec((1, s.tile, width), lambda b, q: (b, q, 0)) for width in (s.words, 1))
    entries = pl.BlockSpec((1, s.kv_heads, s.new_rows(dtype), s.head_dim), lambda b, q: (b, 0, 0, 0))
    # Operands that go through Pallas' pipeline, a block at a time.
    streamed = {"queries": (tile, queries)}
    if bits is not None:
        streamed["bits"] = words, bits
    if first is not None:
        streamed["first"] = lowest, first[..., None]
    if s.written:
        streamed |= {f"new {i}": (entries, x) for i, x in enumerate(new)}
    specs = {name: spec for name, (spec, _) in streamed.items()}
    operands = {name: operand for name, (_, operand) in streamed.items()}
    if sinks is not None:
        sinks = jnp.repeat(sinks, s.tile, axis=1)[..., None]
    buffers, writing = Pages.scratch(s, dtype), NewEntries.scratch(s, dtype) if s.written else []

    def kernel(known: Scalars, inputs: Mapping[str, Any], sinks: Any, _: Any, out: Any, *refs: Any) -> None:
        caches, scratch = refs[: s.caches], refs[s.caches :]
        *buffered, arrived = scratch[: len(buffers)]
        softmax = _Softmax(s, sinks, *scratch[len(buffers) + len(writing) :])
        pages = Pages(s, known, caches, tuple(buffered), arrived)
        entries = None
        if writing:
            *held, sent = scratch[len(buffers) : len(buffers) + len(writing)]
            entries = NewEntries(pages, tuple(held), sent)
        share = s.batch * s.tiles // pl.num_programs(0)  # tiles of queries per core
        begin = pl.program_id(0) * share
        pages.prefetch(begin, pages.needed(begin)[0])
        softmax.reset()

        def body(*refs: Any) -> None:
            *given, out = refs
            blocks = dict(zip(specs, given, strict=True))
            number = pl.program_id(0) * s.tiles + pl.program_id(1)
            if entries is not None:
                entries.hold([blocks[f"new {i}"] for i in range(s.caches)])
            tile = _Tile(number, blocks["queries"], blocks.get("bits"), blocks.get("first"), out)
            _attend_tile(s, scale, pages, entries, softmax, tile, begin + share)

        pltpu.emit_pipeline(
            body,
            grid=(s.batch, s.tiles),
            in_specs=list(specs.values()),
            out_specs=[tile],
            core_axis=0,
            dimension_semantics=(pltpu.PARALLEL, pltpu.ARBITRARY),
        )(*(inputs[name] for name in specs), out)

    anywhere, hbm, vmem = (pl.BlockSpec(memory_space=space) for space in (pl.ANY, pltpu.HBM, pltpu.VMEM))
    arguments = known, operands, sinks, tuple(caches)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,  # `known`
            grid=(math.gcd(s.batch, cores()),),
            in_specs=[dict.fromkeys(operands, anywhere), None if sinks is None else vmem, (hbm,) * s.caches],
            out_specs=[anywhere, *[hbm] * s.caches],
            scratch_shapes=[
                *buffers,
                *writing,
                *[pltpu.VMEM((s.kv_heads, s.rows, LANES), jnp.float32)] * 2,
                pltpu.VMEM((s.kv_heads, s.rows, s.head_dim), jnp.float32),
            ],
        ),
        # The caches stay in HBM: XLA would copy small ones to VMEM and back.
        out_shape=[
            jax.ShapeDtypeStruct(queries.shape, queries.dtype),
            *(pltpu.HBM(cache.shape, cache.dtype) for cache in caches),
        ],
        input_output_aliases={len(jax.tree.leaves(arguments[:3])) + i: 1 + i for i in range(s.caches)},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=VMEM_LIMIT,
            disable_bounds_checks=True,  # `scalars` keeps every copy within bounds
        ),
        interpret=interpret,
        name="tree_attention",
    )(*arguments)


class _Softmax:
    """The online softmax of each KV head's rows: maximum (equal in all lanes), partial sums, attended values."""

    def __init__(self, s: Shape, sinks: Any, maximum: Any, total: Any, attended: Any) -> None:
        self.shape, self.sinks, self.refs = s, sinks, (maximum, total, attended)

    def initial(self, head: int) -> tuple[Array, Array, Array]:
        """Returns the state before the first block."""
        s = self.shape
        maximum, total = jnp.full((s.rows, LANES), NEVER, jnp.float32), jnp.zeros((s.rows, LANES), jnp.float32)
        if self.sinks is not None:
            maximum = jnp.broadcast_to(self.sinks[head], maximum.shape)
            total = jnp.where(jax.lax.broadcasted_iota(jnp.int32, total.shape, 1) == 0, 1.0, 0.0)
        return maximum, total, jnp.zeros((s.rows, s.head_dim), jnp.float32)

    def reset(self) -> None:
        for head in range(self.shape.kv_heads):
            self.store(head, self.initial(head))

    def load(self, head: int) -> tuple[Array, Array, Array]:
        maximum, total, attended = (ref[head] for ref in self.refs)
        return maximum, total, attended

    def store(self, head: int, state: Sequence[Array]) -> None:
        for ref, value in zip(self.refs, state, strict=True):
            ref[head] = value


class _Tile(NamedTuple):
    """A tile of queries: its index over all sequences, and references to its blocks of the operands."""

    number: Any
    queries: Any
    bits: Any
    first: Any
    out: Any


def _attend_tile(
    s: Shape, scale: float, pages: Pages, entries: NewEntries | None, softmax: _Softmax, tile: _Tile, share: Any
) -> None:
    """Attends to all blocks that a tile of queries needs; `share` is one past the core's last tile."""
    low, high, plain, masked = pages.needed(tile.number)

    def each(block: Any, _: None) -> None:
        last = block + 1 == high
        pl.when(jnp.logical_not(last))(lambda: pages.prefetch(tile.number, block + 1))
        following = tile.number + 1
        pl.when(last & (following < share))(lambda: pages.prefetch(following, pages.needed(following)[0]))
        pages.wait(tile.number, block)
        if entries is not None:
            entries.write(tile.number, block)
        bare = (plain <= block) & (block < masked)
        pl.when(bare)(lambda: _attend_block(s, scale, pages, softmax, tile, block, masked=False))
        pl.when(jnp.logical_not(bare))(lambda: _attend_block(s, scale, pages, softmax, tile, block, masked=True))
        if entries is not None:
            entries.wait(tile.number, block)

    jax.lax.fori_loop(low, high, each, None)


def _attend_block(
    s: Shape, scale: float, pages: Pages, softmax: _Softmax, tile: _Tile, block: Any, *, masked: bool
) -> None:
    """Attends to one block of keys. The last block of a tile has masks, and writes the tile's results."""
    keys, values = pages.buffers[0], pages.buffers[-1]
    buffer, length, end = pages.buffer(tile.number, block), pages.length(tile.number), pages.end(tile.number)
    start = block * s.block

    def visible(at: int) -> Array:
        """Returns bool [mask_rows, piece]: whether each node sees each key from the block's `at` on."""
        slot = start + at + jax.lax.broadcasted_iota(jnp.int32, (s.mask_rows, s.piece), 1)
        behind = slot - length
        if tile.bits is None:
            node = tile.number % s.tiles * s.tile + jax.lax.broadcasted_iota(jnp.int32, slot.shape, 0)
            seen = behind <= (0 if s.nodes == 1 else node)
        else:
            words = tile.bits[0]
            chosen = words[:, :1]
            for w in range(1, s.words):
                chosen = jnp.where(behind >= w * WORD, words[:, w : w + 1], chosen)
            seen = (behind < 0) | ((behind < s.tail) & ((chosen >> (behind & (WORD - 1))) & 1 != 0))
        if tile.first is not None:
            seen &= slot >= tile.first[0]
        return seen

    masks = {at: visible(at) for at in range(0, s.block, s.piece)} if masked else {}

    def value(head: int, at: int) -> Array:
        """Returns [piece, d] of a head, in the queries' dtype."""
        found = values[buffer, head, pl.ds(at, s.piece)].astype(tile.queries.dtype)
        if masked:  # unwritten slots may hold NaN, and 0 * NaN is NaN
            slot = start + at + jax.lax.broadcasted_iota(jnp.int32, found.shape, 0)
            found = jnp.where(slot < end, found, 0)
        return found

    def score(head: int, at: int) -> list[Array]:
        """Returns the scores of an item, piece by piece."""
        scores = []
        for piece in range(at, at + s.width, s.piece):
            key = keys[buffer, head, pl.ds(piece, s.piece)].astype(tile.queries.dtype)
            score = dot(tile.queries[0, head], key, 1, 1) * (scale * math.log2(math.e))
            if masked:
                folded = score.reshape(-1, s.mask_rows, s.piece)
                score = jnp.where(masks[piece][None], folded, NEVER).reshape(s.rows, s.piece)
            scores.append(score)
        return scores

    def add(head: int, at: int, scores: list[Array]) -> None:
        """Runs one step of the online softmax."""
        columns = [[score[:, c : c + LANES] for c in range(0, s.piece, LANES)] for score in scores]
        before, total, attended = softmax.load(head)
        top, shrink = rescaled(before, [column for piece in columns for column in piece])
        total, attended = total * shrink, attended * to_lanes(shrink, s.head_dim)
        for number, parts in enumerate(columns):
            weights = [jnp.exp2(column - top) for column in parts]
            total = functools.reduce(jnp.add, weights, total)
            found = value(head, at + number * s.piece)
            attended += dot(jnp.concatenate(weights, axis=1).astype(found.dtype), found, 1, 0)
        state = top, total, attended
        if masked and at + s.width == s.block:
            tile.out[0, head] = (attended / jnp.sum(total, axis=1, keepdims=True)).astype(tile.out.dtype)
            over = start + s.block >= end  # starts anew for the next tile of queries
            state = [jnp.where(over, *both) for both in zip(softmax.initial(head), state, strict=True)]
        softmax.store(head, state)

    items = [(head, at) for head in range(s.kv_heads) for at in range(0, s.block, s.width)]
    following = score(*items[0])
    for item, after in zip(items, [*items[1:], None], strict=True):
        scores = following
        if after is not None:
            following = score(*after)
        add(*item, scores)
