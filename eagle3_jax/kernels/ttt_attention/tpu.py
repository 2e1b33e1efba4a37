"""Attention of the training-time test on a TPU: operand layouts, the split over a mesh, and the gradient."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from eagle3_jax.kernels.contraction import KEPT
from eagle3_jax.kernels.dispatch import over_mesh
from eagle3_jax.kernels.tpu.registers import LANES, VMEM_LIMIT, check_fits
from eagle3_jax.kernels.ttt_attention import tpu_kernel
from eagle3_jax.kernels.ttt_attention.tpu_kernel import Operands, TTTShape

# Rows of a tile, over all query heads of a KV head; the second if the first does not fit into VMEM.
_ROWS = (1024, 512)
_CHUNK = 512  # most keys per step of the kernel's loop
# Specs of [b, t, n, d], [s, b, t, k, d] and [b, k, tiles, rows] over a mesh.
_TOKENS, _LATER, _NUMBERS = P("data", None, "model"), P(None, "data", None, "model"), P("data", "model")
_INPUTS = (_TOKENS, _TOKENS, _TOKENS, _LATER, _LATER, P("data"), P(), P())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_tpu(interpret: Any, *operands: Array) -> Array:
    """See `attend_xla`."""
    return _forward(interpret, *operands)[0]


def _forward(interpret: Any, *inputs: Array) -> tuple[Array, tuple[Array, ...]]:
    def local(*inputs: Array) -> tuple[Array, Array]:
        s, operands = _operands(*inputs)
        attended, normaliser = tpu_kernel.forward(s, operands, interpret=interpret)
        return _unfolded(attended, s, inputs[0].shape), normaliser

    attended, normaliser = over_mesh(local, inputs, _INPUTS, (_TOKENS, _NUMBERS), _sizes(*inputs[:2]))
    attended, normaliser = checkpoint_name(attended, KEPT), checkpoint_name(normaliser, KEPT)
    return attended, (*inputs, attended, normaliser)


def _backward(interpret: Any, saved: Any, cotangents: Array) -> tuple[Array | None, ...]:
    def local(*operands: Array) -> tuple[Array, ...]:
        *inputs, attended, normaliser, cotangents = operands
        queries, keys = inputs[:2]
        s, operands = _operands(*inputs)
        delta = jnp.sum(attended.astype(jnp.float32) * cotangents.astype(jnp.float32), axis=-1, keepdims=True)
        d_queries, *first, d_later_keys, d_later_values = tpu_kernel.backward(
            s,
            operands,
            cotangents=_folded(cotangents, s),
            normaliser=normaliser,
            delta=_folded(delta, s)[..., 0],
            interpret=interpret,
        )
        d_keys, d_values = (x.swapaxes(1, 2)[:, : keys.shape[1]].astype(keys.dtype) for x in first)
        later = (_later_apart(x, s)[:, :, : queries.shape[1]] for x in (d_later_keys, d_later_values))
        return _unfolded(d_queries, s, queries.shape), d_keys, d_values, *later

    saved = tuple(jnp.asarray(x) for x in saved)  # constants may be NumPy arrays
    specs, results = (*_INPUTS, _TOKENS, _NUMBERS, _TOKENS), (_TOKENS, _TOKENS, _TOKENS, _LATER, _LATER)
    gradients = over_mesh(local, (*saved, cotangents), specs, results, _sizes(*saved[:2]))
    return (*gradients, None, None, None)


attend_tpu.defvjp(_forward, _backward)


def _sizes(queries: Array, keys: Array) -> dict[str, int]:
    """Returns the sizes that a mesh's axes split: rows of the batch, and KV heads."""
    return {"data": queries.shape[0], "model": keys.shape[2]}


def _operands(*given: Array) -> tuple[TTTShape, Operands]:
    """Returns the operands of both kernels in their layouts."""
    queries, keys, values, later_keys, later_values, starts, begin, newest = given
    s = plan(queries.shape, (len(later_keys) + 1, *keys.shape), queries.dtype)
    missing = s.length - queries.shape[1]
    # Queries of the padding see only themselves.
    own = begin + jnp.arange(queries.shape[1], s.length, dtype=jnp.int32)
    starts = jnp.concatenate([starts, jnp.broadcast_to(own, (s.batch, missing))], axis=1)
    first = [jnp.pad(x, ((0, 0), (0, s.row - x.shape[1]), (0, 0), (0, 0))).swapaxes(1, 2) for x in (keys, values)]
    # [s, b, (tiles, tile), k, d] -> [b, k, tiles, (s, tile), d]
    later = [
        jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0), (0, 0)))
        .reshape(s.later, s.batch, s.tiles, s.tile, s.kv_heads, s.head_dim)
        .transpose(1, 4, 2, 0, 3, 5)
        .reshape(s.batch, s.kv_heads, s.tiles, s.later * s.tile, s.head_dim)
        for x in (later_keys, later_values)
    ]
    return s, Operands._make((_folded(queries, s), *first, *later, starts, begin, newest))


def _later_apart(x: Array, s: TTTShape) -> Array:
    """[b, k, tiles, (s, tile), d] -> [s, b, t, k, d]."""
    x = x.reshape(s.batch, s.kv_heads, s.tiles, s.later, s.tile, s.head_dim).transpose(3, 0, 2, 4, 1, 5)
    return x.reshape(s.later, s.batch, s.length, s.kv_heads, s.head_dim)


def _folded(x: Array, s: TTTShape) -> Array:
    """Folds [b, t, n, d] -> [b, k, tiles, (group, tile), d]."""
    x = jnp.pad(x, ((0, 0), (0, s.length - x.shape[1]), (0, 0), (0, 0)))
    x = x.reshape(s.batch, s.tiles, s.tile, s.kv_heads, s.group, -1).transpose(0, 3, 1, 4, 2, 5)
    return x.reshape(s.batch, s.kv_heads, s.tiles, s.rows, -1)


def _unfolded(x: Array, s: TTTShape, shape: tuple[int, ...]) -> Array:
    """Unfolds [b, k, tiles, (group, tile), d] -> [b, t, n, d]."""
    x = x.reshape(s.batch, s.kv_heads, s.tiles, s.group, s.tile, -1).transpose(0, 2, 4, 1, 3, 5)
    return x.reshape(s.batch, s.length, *shape[2:])[:, : shape[1]]


def plan(queries: tuple[int, ...], keys: tuple[int, ...], dtype: Any) -> TTTShape:
    """Chooses the tiling: the fewest blocks of keys that fit, then the larger tile.

    Shapes are [b, t, n, d] and [s, b, row, k, d]. Raises ValueError, with the numbers, if the call does not fit.
    """
    b, t, n, d = queries
    steps, _, row, kv_heads, _ = keys
    group = n // kv_heads
    length = -(-t // LANES) * LANES
    row = -(-(row + length - t) // LANES) * LANES  # queries of the padding have keys of their own
    chunk = math.gcd(row, _CHUNK)

    def shape(block: int, rows: int) -> TTTShape:
        tile = LANES
        while tile * 2 * group <= rows and length % (tile * 2) == 0:
            tile *= 2
        return TTTShape(b, length, row, steps - 1, group, kv_heads, d, tile, block, chunk)

    itemsize = jnp.dtype(dtype).itemsize
    chunks = row // chunk
    blocks = [row // count for count in range(1, chunks + 1) if chunks % count == 0]
    shapes = [shape(block, rows) for block in blocks for rows in _ROWS]
    chosen = next((s for s in shapes if s.vmem_bytes(itemsize) <= VMEM_LIMIT), shapes[-1])
    check_fits("VMEM", chosen.vmem_bytes(itemsize), VMEM_LIMIT, chosen)
    return chosen
