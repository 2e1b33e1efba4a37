"""Attention of the training-time test as Pallas kernels for TPU, forward and backward.

One grid step is a tile of queries and a block of keys. All query heads of one KV head are folded into the rows of one
matrix. The KV head's keys and values are in VMEM whole unless the row is long, so only the chunks between a document's
start and the diagonal are read. The online softmax starts from the keys of the later steps, one per query;
FlashAttention's starts empty.

The backward pass is one kernel. It sums the gradients of a block's keys and values in VMEM over the tiles of queries.
Scores never reach HBM; of partial sums only those of the queries, one for each block. Memory is O(T).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.tpu.registers import LANES, NEVER, VMEM_LIMIT, dot, rescaled, to_lanes

_LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class TTTShape:
    """The static shape of one call of the kernels.

    Attributes:
        length: queries of a row, padded to a multiple of `tile`.
        row: keys of step 0 of a row, padded to a multiple of `block`: more than `length` where the queries are a
            stretch of the row.
        later: most keys of later steps per query (the number of steps, less one).
        tile: queries of one grid step.
        block: keys of one grid step, a multiple of `chunk`.
        chunk: keys per step of the loop.
    """

    batch: int
    length: int
    row: int
    later: int
    group: int
    kv_heads: int
    head_dim: int
    tile: int
    block: int
    chunk: int

    @property
    def rows(self) -> int:
        """Rows of the matrix of one KV head and tile."""
        return self.group * self.tile

    @property
    def tiles(self) -> int:
        return self.length // self.tile

    @property
    def blocks(self) -> int:
        return self.row // self.block

    def vmem_bytes(self, itemsize: int) -> int:
        """Returns the backward (larger) kernel's bytes of VMEM: buffers (twice, for the pipeline), sums, scores."""
        lanes = -(-self.head_dim // LANES) * LANES
        keys = 2 * self.block * lanes * (itemsize + 4)
        tiles = (3 * self.rows * itemsize + 2 * self.later * self.tile * (itemsize + itemsize)) * lanes
        scores = 4 * self.rows * self.chunk * 4
        return 2 * (keys + tiles) + self.rows * lanes * 4 + scores


class Operands(NamedTuple):
    """What both kernels read.

    Attributes:
        queries: a row for each (query head of the group, query of the tile).
        later_keys, later_values: an entry for each (step 1, 2, ..., query of the tile); entries after step `newest` are
            unused.
        starts: first index in its row of each query's document; ascending.
        begin: index in their rows of the first queries.
    """

    queries: Float[Array, "b k tiles rows d"]
    keys: Float[Array, "b k row d"]
    values: Float[Array, "b k row d"]
    later_keys: Float[Array, "b k tiles later d"]
    later_values: Float[Array, "b k tiles later d"]
    starts: Int[Array, "b t"]
    begin: Int[Array, ""]
    newest: Int[Array, ""]

    def in_order(self, s: TTTShape) -> list[Array]:
        """Lists what a call takes: first the scalars, whose last has the newest step and `begin`."""
        scalars = self.starts[:, :: s.tile].reshape(-1), self.starts[:, s.tile - 1 :: s.tile].reshape(-1)
        later = [self.later_keys, self.later_values] if s.later else []
        return [*scalars, jnp.stack([self.newest, self.begin]), *self[:3], *later, self.starts[:, None]]


def forward(
    shape: TTTShape, of: Operands, *, interpret: bool | pltpu.InterpretParams = False
) -> tuple[Float[Array, "b k tiles rows d"], Float[Array, "b k tiles rows"]]:
    """Returns the attended values, and the base-2 logarithm of each row's normaliser (float32)."""
    s = shape
    at = _At(s, lambda q, j: (q, j))
    out_shape = [
        jax.ShapeDtypeStruct(of.queries.shape, of.queries.dtype),
        jax.ShapeDtypeStruct((s.batch, s.kv_heads, s.tiles, 1, s.rows), jnp.float32),
    ]
    attended, normaliser = _call(
        functools.partial(_forward, s),
        grid=(s.batch, s.kv_heads, s.tiles, s.blocks),
        in_specs=[at.tile, at.seen_keys, at.seen_keys, *([at.later, at.later] if s.later else []), at.starts],
        out_specs=[at.tile, at.row],
        out_shape=out_shape,
        scratch_shapes=[
            pltpu.VMEM((s.rows, LANES), jnp.float32),
            pltpu.VMEM((s.rows, LANES), jnp.float32),
            pltpu.VMEM((s.rows, s.head_dim), jnp.float32),
        ],
        name="ttt_attention",
        interpret=interpret,
    )(*of.in_order(s))
    return attended, normaliser[..., 0, :]


def backward(
    shape: TTTShape,
    of: Operands,
    *,
    cotangents: Float[Array, "b k tiles rows d"],
    normaliser: Float[Array, "b k tiles rows"],
    delta: Float[Array, "b k tiles rows"],
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Array, Array, Array, Array, Array]:
    """Returns the gradients of queries, keys, values (float32 for these two), later keys and later values.

    `normaliser` is `forward`'s; `delta` the sum over d of attended values times their cotangents.
    """
    s = shape
    at = _At(s, lambda j, q: (q, j))
    laters = [at.first_later, at.first_later] if s.later else []
    like = [of.later_keys, of.later_values] if s.later else []
    outputs = _call(
        functools.partial(_backward, s),
        grid=(s.batch, s.kv_heads, s.blocks, s.tiles),
        in_specs=[at.tile, at.keys, at.keys, *laters, at.starts, at.tile, at.row, at.row],
        out_specs=[at.partial, at.keys, at.keys, *laters],
        out_shape=[
            jax.ShapeDtypeStruct((s.blocks, *of.queries.shape), of.queries.dtype),
            *(jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (of.keys, of.values)),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like),
        ],
        scratch_shapes=[pltpu.VMEM((s.rows, s.head_dim), jnp.float32)],
        name="ttt_attention_backward",
        interpret=interpret,
    )(*of.in_order(s), cotangents, normaliser[..., None, :], delta[..., None, :])
    d_queries, d_keys, d_values, *d_later = outputs
    d_later = d_later or [jnp.zeros_like(of.later_keys), jnp.zeros_like(of.later_values)]
    if s.blocks == 1:
        return d_queries[0], d_keys, d_values, *d_later
    total = jnp.sum(d_queries, axis=0, dtype=jnp.float32).astype(of.queries.dtype)
    return total, d_keys, d_values, *d_later


class _At:
    """Block specs at a grid step.

    Args:
        order: the last two indices of the grid -> tile of queries, block of keys.

    Attributes:
        tile: of queries. row: one number per row of a tile. starts: of a tile's documents.
        keys: of a KV head; seen_keys: of the blocks that the tile sees, so that no other block is copied.
        later: keys of later steps. first_later: the same, where they are read with the first block of keys alone; with
            the others the last tile's stay, so that nothing is written over.
        partial: gradients of a tile's queries by a block of keys.
    """

    def __init__(self, s: TTTShape, order: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        def spec(shape: tuple[int, ...], index: Callable[..., tuple[Any, ...]]) -> pl.BlockSpec:
            return pl.BlockSpec(shape, lambda b, k, x, y, *scalars: index(b, k, *order(x, y), *scalars))

        def seen(b: Any, k: Any, q: Any, j: Any, firsts: Any, lasts: Any, place: Any) -> tuple[Any, ...]:
            if s.blocks == 1:
                return b, k, 0, 0
            lowest = firsts[b * s.tiles + q] // s.block
            highest = jnp.minimum((place[1] + (q + 1) * s.tile - 1) // s.block, s.blocks - 1)
            return b, k, jnp.clip(j, lowest, highest), 0

        tile, later = (1, 1, 1, s.rows, s.head_dim), (1, 1, 1, s.later * s.tile, s.head_dim)
        keys = (1, 1, s.block, s.head_dim)
        self.tile = spec(tile, lambda b, k, q, j, *_: (b, k, q, 0, 0))
        self.row = spec((1, 1, 1, 1, s.rows), lambda b, k, q, j, *_: (b, k, q, 0, 0))
        self.starts = spec((1, 1, s.tile), lambda b, k, q, j, *_: (b, 0, q))
        self.keys = spec(keys, lambda b, k, q, j, *_: (b, k, j, 0))
        self.seen_keys = spec(keys, seen)
        self.later = spec(later, lambda b, k, q, j, *_: (b, k, q, 0, 0))
        self.first_later = spec(later, lambda b, k, q, j, *_: (b, k, jnp.where(j == 0, q, s.tiles - 1), 0, 0))
        self.partial = spec((1, *tile), lambda b, k, q, j, *_: (j, b, k, q, 0, 0))


def _call(kernel: Any, *, out_shape: list[Any], name: str, interpret: Any, **of_grid: Any) -> Any:
    semantics = ("parallel", "parallel", "arbitrary", "arbitrary")
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=3, **of_grid),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=VMEM_LIMIT),
        interpret=interpret,
        name=name,
    )


@dataclasses.dataclass(frozen=True)
class _Place:
    """Position of a grid step, as indices into its block of keys.

    Attributes:
        at: the tile's first query. first, last: the first and last start of its documents.
        block: index in the row of the block's first key.
        newest: the newest step.
    """

    at: Any
    first: Any
    last: Any
    block: Any
    newest: Any


def _place(s: TTTShape, q: Any, j: Any, refs: tuple[Any, ...]) -> tuple[_Place, tuple[Any, ...]]:
    """Returns the position of tile q of queries and block j of keys, and the refs behind the scalars."""
    firsts, lasts, place, *rest = refs
    flat, block = pl.program_id(0) * s.tiles + q, j * s.block
    at = place[1] + q * s.tile - block
    return _Place(at, firsts[flat] - block, lasts[flat] - block, block, place[0]), tuple(rest)


def _each_chunk(s: TTTShape, place: _Place, body: Callable[[Any, bool], None]) -> None:
    """Calls body(chunk, masked) for the chunks of the block that a tile sees; the middle ones need no mask."""

    def chunk(index: Any) -> Any:
        """The chunk of a key, within the block's."""
        return jnp.clip(index // s.chunk, 0, s.block // s.chunk)

    first, end = chunk(place.first), chunk(place.at + s.tile - 1 + s.chunk)
    plain = jnp.minimum(chunk(place.last + s.chunk - 1), end)
    masked = jnp.maximum(plain, chunk(place.at + 1))
    for start, stop, is_masked in ((first, plain, True), (plain, masked, False), (masked, end, True)):
        jax.lax.fori_loop(start, stop, lambda c, _, is_masked=is_masked: body(c, is_masked), None)


def _forward(s: TTTShape, *refs: Any) -> None:
    block = pl.program_id(3)
    place, refs = _place(s, pl.program_id(2), block, refs)
    q_ref, k_ref, v_ref, *later, starts_ref, o_ref, normaliser_ref, m_ref, l_ref, acc_ref = refs
    scale = s.head_dim**-0.5 * _LOG2_E

    # ------------------------------------------------------------------------------------------------- later steps
    @pl.when(block == 0)
    def start() -> None:
        if s.later:
            later_keys, later_values = later
            q = _grouped(s, q_ref)
            scores = []
            for j in range(s.later):
                score = jnp.sum(q * _later(s, later_keys, j), axis=-1, keepdims=True) * scale
                scores.append(jnp.where(j < place.newest, score, NEVER))  # [g, t, 1]
            top = functools.reduce(jnp.maximum, scores)
            total, attended = jnp.zeros_like(top), jnp.zeros_like(q)
            for j, score in enumerate(scores):
                weight = jnp.where(j < place.newest, jnp.exp2(score - top), 0.0)
                total += weight
                attended += weight * jnp.where(j < place.newest, _later(s, later_values, j), 0.0)
            lane = jax.lax.broadcasted_iota(jnp.int32, (s.rows, LANES), 1)
            m_ref[...] = jnp.broadcast_to(top.reshape(s.rows, 1), (s.rows, LANES))
            l_ref[...] = jnp.where(lane == 0, total.reshape(s.rows, 1), 0.0)
            acc_ref[...] = attended.reshape(s.rows, s.head_dim)
        else:
            m_ref[...] = jnp.full_like(m_ref, NEVER)
            l_ref[...] = jnp.zeros_like(l_ref)
            acc_ref[...] = jnp.zeros_like(acc_ref)

    # ---------------------------------------------------------------------------------------------- step 0, causal
    starts = _column(starts_ref[0], s.tile)[:, :1] - place.block

    def chunk(c: Any, masked: bool) -> None:
        """Runs one step of the online softmax."""
        start = pl.multiple_of(c * s.chunk, s.chunk)
        scores = dot(q_ref[0, 0, 0], k_ref[0, 0, pl.ds(start, s.chunk)], 1, 1) * scale
        if masked:
            key = start + jax.lax.broadcasted_iota(jnp.int32, (s.tile, s.chunk), 1)
            query = place.at + jax.lax.broadcasted_iota(jnp.int32, (s.tile, s.chunk), 0)
            seen = (key <= query) & (key >= starts)
            scores = jnp.where(seen[None], scores.reshape(s.group, s.tile, s.chunk), NEVER).reshape(s.rows, s.chunk)
        columns = [scores[:, at : at + LANES] for at in range(0, s.chunk, LANES)]
        top, shrink = rescaled(m_ref[...], columns)
        weights = [jnp.exp2(column - top) for column in columns]
        value = v_ref[0, 0, pl.ds(start, s.chunk)]
        m_ref[...] = top
        l_ref[...] = functools.reduce(jnp.add, weights, l_ref[...] * shrink)
        acc_ref[...] = acc_ref[...] * to_lanes(shrink, s.head_dim) + dot(
            jnp.concatenate(weights, axis=1).astype(value.dtype), value, 1, 0
        )

    _each_chunk(s, place, chunk)

    @pl.when(block == s.blocks - 1)
    def finish() -> None:
        total = jnp.sum(l_ref[...], axis=1, keepdims=True)
        o_ref[0, 0, 0] = (acc_ref[...] / total).astype(o_ref.dtype)
        normaliser_ref[0, 0, 0] = jnp.transpose(m_ref[...] + jnp.log2(total))[:1]


def _backward(s: TTTShape, *refs: Any) -> None:
    block, tile = pl.program_id(2), pl.program_id(3)
    place, refs = _place(s, tile, block, refs)
    later = s.later > 0
    q_ref, k_ref, v_ref, *rest = refs
    later_keys, later_values = (rest.pop(0), rest.pop(0)) if later else (None, None)
    starts_ref, do_ref, normaliser_ref, delta_ref, dq_ref, dk_ref, dv_ref, *d_later, acc_ref = rest
    scale = s.head_dim**-0.5

    @pl.when(tile == 0)
    def begin() -> None:
        dk_ref[...] = jnp.zeros_like(dk_ref)
        dv_ref[...] = jnp.zeros_like(dv_ref)

    # ------------------------------------------------------------------------------------------------- later steps
    acc_ref[...] = jnp.zeros_like(acc_ref)
    if later:
        normaliser = _column(normaliser_ref[0, 0, 0], s.rows).reshape(s.group, s.tile, LANES)[..., :1]
        delta = _column(delta_ref[0, 0, 0], s.rows).reshape(s.group, s.tile, LANES)[..., :1]
    for j in range(s.later):
        own = pl.ds(j * s.tile, s.tile)

        def step(j: int, own: Any) -> None:
            q, do = _grouped(s, q_ref), _grouped(s, do_ref)
            key, value = _later(s, later_keys, j), _later(s, later_values, j)
            weight = jnp.exp2(jnp.sum(q * key, axis=-1, keepdims=True) * (scale * _LOG2_E) - normaliser)
            d_score = weight * (jnp.sum(do * value, axis=-1, keepdims=True) - delta) * scale
            acc_ref[...] += (d_score * key).reshape(s.rows, s.head_dim)
            d_later[0][0, 0, 0, own] = jnp.sum(d_score * q, axis=0).astype(d_later[0].dtype)
            d_later[1][0, 0, 0, own] = jnp.sum(weight * do, axis=0).astype(d_later[1].dtype)

        def none(own: Any) -> None:
            for ref in d_later:
                ref[0, 0, 0, own] = jnp.zeros((s.tile, s.head_dim), ref.dtype)

        pl.when((block == 0) & (j < place.newest))(functools.partial(step, j, own))
        pl.when((block == 0) & (j >= place.newest))(functools.partial(none, own))

    # ---------------------------------------------------------------------------------------------- step 0, causal
    def chunk(c: Any, masked: bool) -> None:
        """Keeps scores transposed, [keys, rows]: then one of the three products transposes them, not two."""
        q, do = q_ref[0, 0, 0], do_ref[0, 0, 0]
        start = pl.multiple_of(c * s.chunk, s.chunk)
        window = pl.ds(start, s.chunk)
        key, value = k_ref[0, 0, window], v_ref[0, 0, window]
        scores = dot(key, q, 1, 1) * (scale * _LOG2_E)
        if masked:
            at = start + jax.lax.broadcasted_iota(jnp.int32, (s.chunk, s.tile), 0)
            query = place.at + jax.lax.broadcasted_iota(jnp.int32, (s.chunk, s.tile), 1)
            seen = (at <= query) & (at >= starts_ref[0] - place.block)
            scores = jnp.where(jnp.concatenate([seen] * s.group, axis=1), scores, NEVER)
        weights = jnp.exp2(scores - normaliser_ref[0, 0, 0])
        d_scores = weights * (dot(value, do, 1, 1) - delta_ref[0, 0, 0])
        d_scores = d_scores.astype(q.dtype)
        dv_ref[0, 0, window] += dot(weights.astype(do.dtype), do, 1, 0)
        dk_ref[0, 0, window] += dot(d_scores, q, 1, 0) * scale
        acc_ref[...] += dot(d_scores, key, 0, 0) * scale

    _each_chunk(s, place, chunk)
    dq_ref[0, 0, 0, 0] = acc_ref[...].astype(dq_ref.dtype)


def _grouped(s: TTTShape, ref: Any) -> Array:
    """Reads a tile's rows as float32 [group, tile, d]."""
    return ref[0, 0, 0].astype(jnp.float32).reshape(s.group, s.tile, s.head_dim)


def _later(s: TTTShape, ref: Any, j: int) -> Array:
    """Reads a tile's keys or values of step j + 1 as float32 [1, tile, d]."""
    return ref[0, 0, 0, pl.ds(j * s.tile, s.tile)].astype(jnp.float32)[None]


def _column(row: Array, size: int) -> Array:
    """Broadcasts [1, size] to [size, lanes]: each entry in all lanes of its row."""
    return jnp.transpose(jnp.broadcast_to(row, (LANES, size)))
