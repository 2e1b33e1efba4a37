"""Tree attention as a Pallas kernel for TPU.

Pages of the cache stream from HBM to VMEM once, with all their KV heads, several to a grid step. The query heads of a
KV head and the nodes are folded into the rows of one matrix, so that the matrix unit sees full tiles. Blocks of the
committed prefix are attended without any mask; only those that hold the tail expand the ancestor bits, once for all
heads. The softmax is the online one of FlashAttention, in base 2.

Work is cut into items, a KV head and a stretch of keys each, and the scores of the next item are computed before the
softmax of this one: matrix and vector units would otherwise wait for each other (1.2 times the static cycles on v6e).

The new tokens' keys and values are written in the same pass: put into the pages of their slots while these are in VMEM,
attended there, and the tiles that they touch sent to HBM meanwhile. No page is read after it was written: one tile of
queries reads every page once, and where there are several the caller writes first.

The pipeline is inside the kernel, which takes each cache once: XLA would copy an operand that is written in place and
given a second time, as the pages of a grid step would have it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.packed_rows import merge_rows, roll_rows, rows_between, tile_rows
from eagle3_jax.kernels.registers import LANES, NEVER, VMEM_LIMIT, dot, to_lanes

_WORD = 32


@dataclasses.dataclass(frozen=True)
class Shape:
    """What one call of the kernel looks like; all of it static.

    Attributes:
        nodes: queries of a sequence, padded to a multiple of 16.
        tile: nodes of one grid step, a divisor of `nodes`.
        pages: columns of the page table.
        step: pages of one grid step.
        width: keys of one item. Its matrix products are of a page at most, or of 256 keys.
        tail: cache slots behind the committed ones that the queries may see.
        written: new tokens, the tail's last, whose keys and values the kernel writes; 0 where they are in the cache.
        length: baked in (the same for all sequences, pages in order): for static profiles, which take what is only
            known at run time for nothing.
    """

    batch: int
    nodes: int
    group: int
    kv_heads: int
    head_dim: int
    page_size: int
    pages: int
    tile: int
    step: int
    width: int
    tail: int
    written: int
    paged: bool
    length: int | None = None

    @property
    def rows(self) -> int:
        """Of the matrix of one KV head and tile."""
        return self.group * self.tile

    @property
    def block(self) -> int:
        """Keys of one grid step."""
        return self.step * self.page_size

    @property
    def piece(self) -> int:
        """Keys of one matrix product: they must lie in one page."""
        return math.gcd(math.gcd(self.width, self.page_size), 256)

    @property
    def words(self) -> int:
        """int32 words that hold a node's ancestor bits."""
        return -(-self.tail // _WORD)

    def new_rows(self, dtype: Any) -> int:
        """Rows of the new entries, whole tiles."""
        return pl.cdiv(self.written, tile_rows(dtype)) * tile_rows(dtype)

    @property
    def steps(self) -> int:
        """Grid steps of a tile of queries."""
        return -(-self.pages // self.step)

    def vmem_bytes(self, query_bytes: int, key_bytes: int) -> int:
        """What the kernel holds in VMEM: buffers (twice, for the pipeline), sums, and scores of two items."""
        lanes = -(-self.head_dim // LANES) * LANES
        streamed = 2 * self.block * self.kv_heads * lanes * key_bytes
        tiles = 2 * self.kv_heads * self.rows * lanes * query_bytes
        words = self.tile * -(-self.words // LANES) * LANES * 4
        new = 2 * self.kv_heads * -(-self.written // _WORD) * _WORD * lanes * key_bytes
        sums = self.kv_heads * self.rows * (2 * LANES + lanes) * 4
        items = 2 * self.rows * self.width * (4 + 4 + query_bytes)
        return 2 * (streamed + tiles + words + new) + sums + items


def attend(
    shape: Shape,
    queries: Float[Array, "b k r d"],
    keys: Array,
    values: Array,
    table: Int[Array, "b pages"],
    lengths: Int[Array, " b"],
    bits: Int[Array, "b t w"] | None = None,
    first: Int[Array, "b t"] | None = None,
    sinks: Float[Array, "k r"] | None = None,
    new: tuple[Array, Array] | None = None,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "b k r d"], Array, Array]:
    """softmax(q k^T / sqrt(d)) v, a row for each (tile, query head of the group, node of the tile).

    Args:
        keys, values: [pages, k, page_size, d] when paged, else [b, k, slots, d]; any type that converts to queries'.
        table: page of each stretch of page_size slots; not read when contiguous.
        bits: int32 words, bit i: the node sees tail slot i. None is causal: node i sees slots 0..i of the tail.
        first: lowest slot that a node sees. None is 0.
        sinks: base-2 logit of each row that takes part in the softmax and attends to nothing.
        new: keys and values to write, each [b, k, shape.new_rows(dtype), d] in the cache's dtype.

    Returns:
        Attended rows, and keys and values with the new entries, in place where the caller gives its own away.
    """
    s = shape
    scalars = () if s.length is not None else (_fetched(s, table, lengths), lengths)
    tile = pl.BlockSpec((1, s.kv_heads, s.rows, s.head_dim), lambda b, q, j: (b, 0, q, 0))
    words, lowest = (pl.BlockSpec((1, s.tile, width), lambda b, q, j: (b, q, 0)) for width in (s.words, 1))
    rows = pl.BlockSpec((s.kv_heads, s.rows, 1), lambda b, q, j: (0, q, 0))
    entries = pl.BlockSpec((1, s.kv_heads, s.new_rows(keys.dtype), s.head_dim), lambda b, q, j: (b, 0, 0, 0))
    optional = (
        (words, bits),
        (lowest, None if first is None else first[..., None]),
        (rows, None if sinks is None else sinks[..., None]),
        *((entries, x) for x in new or (None, None)),
    )
    given = [operand is not None for _, operand in optional]
    streamed = [(tile, queries), *((spec, operand) for spec, operand in optional if operand is not None)]

    def kernel(*refs: Any) -> None:
        known, refs = refs[: len(scalars)], refs[len(scalars) :]
        inputs, (_, _, out, keys, values, *scratch) = refs[: len(streamed)], refs[len(streamed) :]

        def page(i: int) -> pl.BlockSpec:
            def index(b: Any, q: Any, j: Any) -> tuple[Any, ...]:
                row, column = _block(s, b, j, i, known)
                return row, 0, column, 0

            return pl.BlockSpec((1, s.kv_heads, s.page_size, s.head_dim), index)

        pltpu.emit_pipeline(
            functools.partial(_step, s, given, known, (keys, values), scratch),
            grid=(s.batch, s.nodes // s.tile, s.steps),
            in_specs=[
                *(spec for spec, _ in streamed),
                *(page(i) for i in range(s.step)),
                *(page(i) for i in range(s.step)),
            ],
            out_specs=[tile],
            core_axis=0,
            dimension_semantics=(pltpu.PARALLEL, pltpu.ARBITRARY, pltpu.ARBITRARY),
        )(*inputs, *[keys] * s.step, *[values] * s.step, out)

    anywhere, hbm = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.HBM)
    if interpret:  # the pipeline asks for the chip's tiling, and a CPU has none
        from jax._src.pallas.mosaic import tpu_info

        tpu_info.registry.setdefault("cpu", lambda: tpu_info.get_tpu_info_for_chip(tpu_info.ChipVersion.TPU_V5E, 1))
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(math.gcd(s.batch, pltpu.get_tpu_info().num_cores),),
            in_specs=[anywhere] * len(streamed) + [hbm] * 2,
            out_specs=[anywhere, hbm, hbm],
            scratch_shapes=[
                pltpu.VMEM((s.kv_heads, s.rows, LANES), jnp.float32),
                pltpu.VMEM((s.kv_heads, s.rows, LANES), jnp.float32),
                pltpu.VMEM((s.kv_heads, s.rows, s.head_dim), jnp.float32),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        # The caches stay in HBM: XLA would copy to VMEM and back what fits there.
        out_shape=[
            jax.ShapeDtypeStruct(queries.shape, queries.dtype),
            *(pltpu.HBM(cache.shape, cache.dtype) for cache in (keys, values)),
        ],
        input_output_aliases={len(scalars) + len(streamed) + i: 1 + i for i in range(2)},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=VMEM_LIMIT),
        interpret=interpret,
        name="tree_attention",
    )(*scalars, *(operand for _, operand in streamed), keys, values)


def _block(s: Shape, b: Any, j: Any, i: int, scalars: Sequence[Any]) -> tuple[Any, Any]:
    """Where in the cache the page lies that place i of step j holds: [row, :, column-th stretch of page_size]."""
    if s.length is not None:  # as `_fetched` has it
        last = (s.length + s.tail - 1) // s.page_size
        flat = b * s.pages + jnp.minimum(j * s.step + i, last)
    else:
        flat = scalars[0][(b * s.steps + j) * s.step + i]
    return (flat, 0) if s.paged else (flat // s.pages, flat % s.pages)


def _fetched(s: Shape, table: Array, lengths: Array) -> Int[Array, " n"]:
    """The page that each grid step brings to each of its places, flat.

    A place that has nothing to bring keeps what it has, or takes early what it will need: an index that does not change
    is not fetched again. One that will never need anything takes a page that is there for sure.
    """
    if not s.paged:
        table = jnp.arange(s.batch * s.pages, dtype=jnp.int32).reshape(s.batch, s.pages)
    padded = jnp.pad(table, ((0, 0), (0, s.steps * s.step - s.pages)))
    used = jnp.arange(s.steps * s.step) * s.page_size < (lengths + s.tail)[:, None]
    padded, used = padded.reshape(-1, s.step), used.reshape(-1, s.step)
    latest = jax.lax.cummax(jnp.where(used, jnp.arange(used.shape[0])[:, None], 0), axis=0)
    latest = jnp.maximum(latest, jnp.argmax(used, axis=0))
    found = jnp.where(used.any(axis=0), jnp.take_along_axis(padded, latest, axis=0), padded[0, 0])
    return found.reshape(-1).astype(jnp.int32)


def bytes_moved(
    s: Shape, table: Int[Array, "b pages"], lengths: Int[Array, " b"], *, query_bytes: int, key_bytes: int
) -> tuple[int, int]:
    """Bytes between HBM and VMEM: those of the kernel's own grid, and the least that would do.

    The pipeline copies a block whenever its index is not the one before; new entries come and go as whole tiles. The
    least: queries and results once, new entries once each way, and once each page that holds a token a query sees, for
    every tile of queries.
    """
    tiles = s.nodes // s.tile
    fetch = np.asarray(_fetched(s, table, lengths)).reshape(s.batch, 1, s.steps, s.step)
    order = np.broadcast_to(fetch, (s.batch, tiles, s.steps, s.step)).reshape(-1, s.step)
    copies = s.step + int((order[1:] != order[:-1]).sum())
    used = int((-(-(np.asarray(lengths) + s.tail) // s.page_size)).sum()) * tiles
    row = 2 * s.kv_heads * s.head_dim * key_bytes
    page = s.page_size * row
    height = 32 // key_bytes  # rows of a tile
    ends = np.asarray(lengths) + s.tail
    written = (-(-ends // height) - (ends - s.written) // height).sum() * height if s.written else 0
    entries = (s.batch * -(-s.written // height) * height + int(written)) * row
    queries = 2 * s.batch * s.kv_heads * s.group * s.nodes * s.head_dim * query_bytes
    bits = s.batch * s.nodes * s.words * 4
    return copies * page + entries + queries + bits, used * page + 2 * s.batch * s.written * row + queries


def _step(
    s: Shape, given: Sequence[bool], scalars: Sequence[Any], caches: Sequence[Any], scratch: Sequence[Any], *refs: Any
) -> None:
    """One grid step: a tile of queries and the pages of a block."""
    m_ref, l_ref, acc_ref, semaphore = scratch
    q_ref, *rest, o_ref = refs
    new: list[Any]
    bits_ref, first_ref, sinks_ref, *new = (rest.pop(0) if has else None for has in given)
    keys, values = rest[: s.step], rest[s.step :]
    b, tile, j = (pl.program_id(axis) for axis in range(3))
    length = scalars[1][b] if s.length is None else s.length
    start, end = j * s.block, length + s.tail
    height = tile_rows(keys[0].dtype)

    @pl.when(j == 0)
    def begin() -> None:
        for h in range(s.kv_heads):
            lane = jax.lax.broadcasted_iota(jnp.int32, (s.rows, LANES), 1)
            if sinks_ref is not None:
                m_ref[h] = jnp.broadcast_to(sinks_ref[h], (s.rows, LANES))
                l_ref[h] = jnp.where(lane == 0, 1.0, 0.0)
            else:
                m_ref[h] = jnp.full((s.rows, LANES), NEVER, jnp.float32)
                l_ref[h] = jnp.zeros((s.rows, LANES), jnp.float32)
            acc_ref[h] = jnp.zeros((s.rows, s.head_dim), jnp.float32)

    def visible(at: int) -> Array:
        """bool [tile, piece]: what each node sees of the keys from the block's `at` on."""
        slot = start + at + jax.lax.broadcasted_iota(jnp.int32, (s.tile, s.piece), 1)
        behind = slot - length
        if bits_ref is None:
            node = tile * s.tile + jax.lax.broadcasted_iota(jnp.int32, (s.tile, s.piece), 0)
            seen = behind <= node
        else:
            words = bits_ref[0]
            chosen = words[:, :1]
            for w in range(1, s.words):
                chosen = jnp.where(behind >= w * _WORD, words[:, w : w + 1], chosen)
            seen = (behind < 0) | ((behind < s.tail) & ((chosen >> (behind & (_WORD - 1))) & 1 != 0))
        if first_ref is not None:
            seen &= slot >= first_ref[0]
        return seen

    def each_tile(act: Callable[[int, Any, Any, Any], Any]) -> None:
        """act(place, row, low, high) for the tiles of the step's pages that new entries touch.

        They are rows [low, high) of the page at that place; the tile begins with its row `row`.
        """
        for place in range(s.step):
            slot = start + place * s.page_size
            low, high = (jnp.clip(x - slot, 0, s.page_size) for x in (end - s.written, end))

            def each(n: Any, _: None, place: int = place, low: Any = low, high: Any = high) -> None:
                act(place, pl.multiple_of(n * height, height), low, high)

            jax.lax.fori_loop(low // height, pl.cdiv(high, height), each, None)

    def sent(place: int, row: Any) -> list[Any]:
        """Copies of a tile of keys and of one of values, from the pages in VMEM to the cache."""
        there, column = _block(s, b, j, place, scalars)
        slot = pl.multiple_of(column * s.page_size + row, height)
        return [
            pltpu.make_async_copy(
                pages[place].at[0, :, pl.ds(row, height)], cache.at[there, :, pl.ds(slot, height)], semaphore
            )
            for pages, cache in zip((keys, values), caches, strict=True)
        ]

    def write(place: int, row: Any, low: Any, high: Any) -> None:
        """Puts the new entries of a tile into it, and sends it off."""
        first = start + place * s.page_size + row - (end - s.written)  # of the new ones, for the tile's first row
        number, by = first // height, first % height
        written = rows_between(low - row, high - row, keys[0].dtype, s.head_dim)
        below = rows_between(height - by, height, keys[0].dtype, s.head_dim)
        for pages, entries in zip((keys, values), new, strict=True):
            last = entries.shape[2] // height - 1
            for head in range(s.kv_heads):
                # Tiles in front of the first and behind the last hold nothing that is written: any will do.
                parts = [jnp.clip(n, 0, last) * height for n in (number, number + 1)]
                parts = [entries[0, head, pl.ds(pl.multiple_of(part, height), height)] for part in parts]
                fresh = merge_rows(roll_rows(parts[0], by), roll_rows(parts[1], by), below)
                pages[place][0, head, pl.ds(row, height)] = merge_rows(
                    pages[place][0, head, pl.ds(row, height)], fresh, written
                )
        for copy in sent(place, row):
            copy.start()

    def piece(refs: Sequence[Any], head: int, at: int) -> Array:
        """[piece, d] of a head, in the queries' dtype."""
        return refs[at // s.page_size][0, head, pl.ds(at % s.page_size, s.piece)].astype(q_ref.dtype)

    def score(head: int, at: int, masks: dict[int, Array] | None) -> list[Array]:
        """Scores of an item, a piece after the other."""
        scores = []
        for offset in range(at, at + s.width, s.piece):
            score = dot(q_ref[0, head], piece(keys, head, offset), 1, 1) * (s.head_dim**-0.5 * math.log2(math.e))
            if masks is not None:
                folded = score.reshape(s.group, s.tile, s.piece)
                score = jnp.where(masks[offset][None], folded, NEVER).reshape(s.rows, s.piece)
            scores.append(score)
        return scores

    def add(head: int, at: int, scores: list[Array], masked: bool) -> None:
        """One step of the online softmax."""
        columns = [[score[:, c : c + LANES] for c in range(0, s.piece, LANES)] for score in scores]
        before = m_ref[head]
        highest = functools.reduce(jnp.maximum, [column for piece in columns for column in piece])
        top = jnp.maximum(before, jnp.max(highest, axis=1, keepdims=True))
        shrink = jnp.exp2(before - top)
        total, attended = l_ref[head] * shrink, acc_ref[head] * to_lanes(shrink, s.head_dim)
        for number, parts in enumerate(columns):
            weights = [jnp.exp2(column - top) for column in parts]
            total = functools.reduce(jnp.add, weights, total)
            offset = at + number * s.piece
            value = piece(values, head, offset)
            if masked:  # nothing is known of slots that were never written, and 0 * NaN is NaN
                slot = start + offset + jax.lax.broadcasted_iota(jnp.int32, value.shape, 0)
                value = jnp.where(slot < end, value, 0)
            attended += dot(jnp.concatenate(weights, axis=1).astype(value.dtype), value, 1, 0)
        m_ref[head], l_ref[head], acc_ref[head] = top, total, attended
        if masked and at + s.width == s.block:  # as the last block with keys of a sequence is; what was there gives way
            o_ref[0, head] = (attended / jnp.sum(total, axis=1, keepdims=True)).astype(o_ref.dtype)

    def block(masked: bool) -> None:
        masks = {at: visible(at) for at in range(0, s.block, s.piece)} if masked else None
        items = [(head, at) for head in range(s.kv_heads) for at in range(0, s.block, s.width)]
        following = score(*items[0], masks)
        for item, after in zip(items, [*items[1:], None], strict=True):
            scores = following
            if after is not None:
                following = score(*after, masks)
            add(*item, scores, masked)

    if s.written:
        each_tile(write)

    if first_ref is None:
        plain = start + s.block <= length
        needed = start < end
    else:
        lowest, highest = jnp.min(first_ref[0]), jnp.max(first_ref[0])
        plain = (start + s.block <= length) & (start >= highest)
        needed = (start < end) & (start + s.block > lowest)
    pl.when(plain)(lambda: block(masked=False))
    pl.when(needed & jnp.logical_not(plain))(lambda: block(masked=True))

    if s.written:  # before the pipeline brings other pages to where these are
        each_tile(lambda place, row, low, high: [copy.wait() for copy in sent(place, row)])
