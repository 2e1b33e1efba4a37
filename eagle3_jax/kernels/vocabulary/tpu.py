"""Top-k over a vocabulary as a Pallas kernel for TPU.

Blocks of vocabulary rows stream from HBM to VMEM once, and their logits never leave VMEM. Each of the 128 lanes keeps,
for each query, a sorted list of its best tokens, and the sum of exponentials below its maximum. So a block costs a few
vector operations per k, whatever its values, and no reduction over lanes. The lanes' lists are merged once, after the
last block. Reading the weights takes longer than all of this.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.dispatch import cores, over_mesh, split_axes
from eagle3_jax.kernels.tpu.registers import LANES, NEVER, SUBLANES, dot
from eagle3_jax.kernels.vocabulary.lists import Lists, gathered, merged

# The tiling, chosen by static profiles (tools/tpu_kernels.py).
_BLOCK_BYTES = 8 << 20  # bytes of a block of vocabulary rows
_BLOCK_ROWS = 2048
_TILE_BYTES = 4 << 20  # bytes of a tile of queries
_TILE_ROWS = 256
_VMEM = 40 << 20  # bytes that the compiler may use


def top_k(
    x: Float[Array, "m h"], rows: Float[Array, "v h"], k: int, *, interpret: Any
) -> tuple[Float[Array, "m k"], Int[Array, "m k"]]:
    """See `vocabulary_top_k`; split over the current mesh and the cores of a device."""
    sizes = {"data": x.shape[0], "model": rows.shape[0]}
    split = "model" in split_axes(sizes)

    def local(x: Array, rows: Array) -> tuple[Array, Array]:
        found = lists(x, rows, k, parts=cores(), interpret=interpret)
        return merged(gathered(found, rows.shape[0]) if split else found, k)[:2]

    return over_mesh(local, (x, rows), (P("data"), P("model")), (P("data"), P("data")), sizes)


def lists(
    hidden: Float[Array, "m h"],
    rows: Float[Array, "v h"],
    k: int,
    *,
    parts: int,
    interpret: bool | pltpu.InterpretParams = False,
) -> Lists:
    """Lists the k greatest logits of each part, best first; ties go to the lower token.

    `rows` of any float type are read as the type of `hidden`. The `parts` of the vocabulary follow each other, shared
    by the cores of a device; one with fewer than k tokens is filled with logits of -1e30.
    """
    (m, h), v = hidden.shape, rows.shape[0]
    packed = SUBLANES * 4 // hidden.dtype.itemsize  # rows of a tile of the hidden states' type
    most = max(packed, min(_TILE_ROWS, _TILE_BYTES // (h * hidden.dtype.itemsize) // packed * packed))
    tiles = -(-m // most)
    tile = -(-m // (tiles * packed)) * packed
    wider = max(hidden.dtype.itemsize, rows.dtype.itemsize)
    fitting = max(LANES, _BLOCK_BYTES // (h * wider) // LANES * LANES)
    block = min(_BLOCK_ROWS, fitting, -(-v // LANES) * LANES)
    blocks = -(-v // block)
    steps = -(-blocks // parts)
    lists = (k, tile, LANES)

    def streamed(p: Any, i: Any, j: Any) -> tuple[Any, ...]:
        return jnp.minimum(p * steps + j, blocks - 1), 0

    def results(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, tile, width), lambda p, i, j: (p, i, 0))

    outputs = (k, jnp.float32), (k, jnp.int32), (1, jnp.float32)
    found = pl.pallas_call(
        functools.partial(_kernel, v, steps),
        grid=(parts, tiles, steps),
        in_specs=[pl.BlockSpec((tile, h), lambda p, i, j: (i, 0)), pl.BlockSpec((block, h), streamed)],
        out_specs=[results(width) for width, _ in outputs],
        out_shape=[jax.ShapeDtypeStruct((parts, tiles * tile, width), dtype) for width, dtype in outputs],
        scratch_shapes=[
            pltpu.VMEM(lists, jnp.float32),
            pltpu.VMEM(lists, jnp.int32),
            pltpu.VMEM(lists[1:], jnp.float32),
            pltpu.VMEM((tile, block), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=_VMEM
        ),
        interpret=interpret,
        name="vocabulary_top_k",
    )(jnp.pad(hidden, ((0, tiles * tile - m), (0, 0))), rows)
    return Lists(*(x[:, :m] for x in found))


def _kernel(vocabulary: int, steps: int, *refs: Any) -> None:
    hidden, rows, best, tokens, normalizer, values, ids, sums, logits = refs
    k, tile, _ = values.shape
    block = rows.shape[0]
    part, step = pl.program_id(0), pl.program_id(2)
    start = (part * steps + step) * block

    @pl.when(step == 0)
    def begin() -> None:
        values[...] = jnp.full(values.shape, NEVER, jnp.float32)
        ids[...] = jnp.zeros(ids.shape, jnp.int32)
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    logits[...] = dot(hidden[...], rows[...].astype(hidden.dtype), 1, 1)
    token = start + jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)

    def insert(group: Any, _: None) -> None:
        """Inserts the block's logits for eight queries into their lists."""
        at = pl.ds(pl.multiple_of(group * SUBLANES, SUBLANES), SUBLANES)

        def column(c: int) -> Array:  # the last block may reach beyond the vocabulary, into undefined values
            return jnp.where(token + c < vocabulary, logits[at, pl.ds(c, LANES)], NEVER)

        listed, named = [values[i, at] for i in range(k)], [ids[i, at] for i in range(k)]
        before = listed[0]
        for c in range(0, block, LANES):
            x = column(c)
            above = [x > value for value in listed]  # strict: ties go to the lower token
            for i in range(k - 1, 0, -1):
                listed[i] = jnp.maximum(listed[i], jnp.minimum(listed[i - 1], x))
                named[i] = jnp.where(above[i - 1], named[i - 1], jnp.where(above[i], token + c, named[i]))
            listed[0] = jnp.maximum(listed[0], x)
            named[0] = jnp.where(above[0], token + c, named[0])
        total = sums[at] * jnp.exp(before - listed[0])
        for c in range(0, block, LANES):
            total += jnp.exp(column(c) - listed[0])
        sums[at] = total
        for i in range(k):
            values[i, at], ids[i, at] = listed[i], named[i]

    jax.lax.fori_loop(0, tile // SUBLANES, insert, None)

    together = math.gcd(tile, 8 * SUBLANES)  # so many slow reductions over lanes overlap

    def merge(group: Any, _: None) -> None:
        """Merges the lanes' lists, best first."""
        at = pl.ds(pl.multiple_of(group * together, together), together)
        listed, named = [values[i, at] for i in range(k)], [ids[i, at] for i in range(k)]
        top = jnp.max(listed[0], axis=1, keepdims=True)
        total = jnp.sum(sums[at] * jnp.exp(listed[0] - top), axis=1, keepdims=True)
        normalizer[0, at] = top + jnp.log(total)
        for n in range(k):
            greatest = jnp.max(listed[0], axis=1, keepdims=True)
            first = jnp.min(jnp.where(listed[0] == greatest, named[0], vocabulary), axis=1, keepdims=True)
            best[0, at, n : n + 1], tokens[0, at, n : n + 1] = greatest, first
            taken = named[0] == first
            for i in range(k - 1 - n):
                listed[i] = jnp.where(taken, listed[i + 1], listed[i])
                named[i] = jnp.where(taken, named[i + 1], named[i])

    @pl.when(step == steps - 1)
    def finish() -> None:
        jax.lax.fori_loop(0, tile // together, merge, None)
