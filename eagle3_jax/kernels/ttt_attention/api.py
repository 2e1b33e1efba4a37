"""Attention of the training-time test (EAGLE-3, arXiv 2503.01840, section 3.2).

At step i a position attends the keys of step 0 up to itself, in its own document, and behind them one key of each later
step, its own: of the causal attention of i + 1 times as many tokens only the part that drafting would see.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.contraction import contract
from eagle3_jax.kernels.dispatch import Implementation, default_implementation, over_mesh
from eagle3_jax.kernels.tpu.registers import LANES, VMEM_LIMIT, check_fits
from eagle3_jax.kernels.ttt_attention import tpu

# The name under which `jax.checkpoint` finds what the backward pass needs and would have to run the kernel for.
KEPT = "ttt_attention"

# Of a tile, all query heads of a KV head together, where it can be; the second where the first does not fit.
_ROWS = (1024, 512)
_CHUNK = 512  # keys of one step of the kernel's loop, at most
# Queries per block of the XLA form: bounds the scores' memory, and skips what no query of the block may see.
_QUERIES = 256


def ttt_attention(
    queries: Float[Array, "b t n d"],
    keys: Float[Array, "s b t k d"],
    values: Float[Array, "s b t k d"],
    segment_ids: Int[Array, "b t"],
    newest: Int[Array, ""] | int,
    *,
    implementation: Implementation | None = None,
    interpret: Any = False,
) -> Float[Array, "b t n d"]:
    """softmax over the keys of step 0 that a position sees and its own of each later step, under one normaliser.

    Memory is O(t), in the backward pass too.

    Args:
        queries: of step `newest`, n = group * k query heads, grouped by KV head.
        keys, values: of all steps; those beyond `newest` may hold anything and get no gradient.
        segment_ids: documents of a row; each is one stretch.
        implementation: the default is "pallas" on a TPU and "xla" elsewhere.
        interpret: runs the kernels without a TPU, `pltpu.InterpretParams` included.

    Returns:
        In the queries' dtype; scores, softmax and sums are float32.

    Raises:
        ValueError: a row longer than the kernels can hold in VMEM; with the numbers.
    """
    newest, starts = jnp.asarray(newest, jnp.int32), document_starts(segment_ids)
    if (implementation or default_implementation()) == "xla":
        return _xla(queries, keys, values, starts, newest)
    return _pallas(interpret, queries, keys, values, starts, newest)


def document_starts(segment_ids: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """The first index of each position's document."""
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return jax.lax.cummax(jnp.where(begins, index, 0), axis=1)


# ------------------------------------------------------------------------------------------------------------------ XLA


def _xla(queries: Array, keys: Array, values: Array, starts: Array, newest: Array) -> Array:
    block = jax.checkpoint(_attend_block)  # scores are cheaper to compute again than to keep
    outputs = []
    for start in range(0, queries.shape[1], _QUERIES):
        rows, seen = slice(start, start + _QUERIES), slice(0, start + _QUERIES)
        index = jnp.arange(queries.shape[1])[None]
        visible = (index[:, None, seen] <= index[:, rows, None]) & (index[:, None, seen] >= starts[:, rows, None])
        later = keys[1:, :, rows], values[1:, :, rows]
        outputs.append(block(queries[:, rows], keys[0, :, seen], values[0, :, seen], *later, visible, newest))
    return jnp.concatenate(outputs, axis=1)


def _attend_block(
    queries: Array, keys: Array, values: Array, later_keys: Array, later_values: Array, visible: Array, newest: Array
) -> Array:
    """Queries [b, t, n, d] against keys of step 0 [b, s, k, d] and their own of later steps, [steps, b, t, k, d]."""
    b, t, n, d = queries.shape
    s, kv_heads = keys.shape[1], keys.shape[2]
    group = n // kv_heads
    scale = d**-0.5
    q = queries.reshape(b, t, kv_heads, group, d).transpose(0, 2, 3, 1, 4)  # [b, k, g, t, d]
    flat = q.reshape(b, kv_heads, group * t, d)
    scores = contract("bkrd,bskd->bkrs", flat, keys)
    scores = scores.reshape(b, kv_heads, group, t, s) * scale
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    q32 = q.astype(jnp.float32)
    live = [j < newest for j in range(len(later_keys))]
    own_keys = [jnp.where(is_live, _heads_first(k), 0) for is_live, k in zip(live, later_keys, strict=True)]
    own_values = [jnp.where(is_live, _heads_first(v), 0) for is_live, v in zip(live, later_values, strict=True)]
    own = [
        jnp.where(is_live, jnp.sum(q32 * k, axis=-1) * scale, -jnp.inf)
        for is_live, k in zip(live, own_keys, strict=True)
    ]  # [b, k, g, t] each
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, own, jnp.max(scores, axis=-1)))
    unnormed = jnp.exp(scores - top[..., None])
    total = jnp.sum(unnormed, axis=-1)
    weights = unnormed.reshape(b, kv_heads, group * t, s).astype(values.dtype)
    attended = contract("bkrs,bskd->bkrd", weights, values).reshape(q.shape)
    for score, value in zip(own, own_values, strict=True):
        weight = jnp.exp(score - top)
        total += weight
        attended += weight[..., None] * value
    attended /= total[..., None]
    return attended.transpose(0, 3, 1, 2, 4).reshape(b, t, n, d).astype(queries.dtype)


def _heads_first(x: Array) -> Array:
    """[b, t, k, d] -> float32 [b, k, 1, t, d]."""
    return x.astype(jnp.float32).transpose(0, 2, 1, 3)[:, :, None]


# --------------------------------------------------------------------------------------------------------------- Pallas

# Where [b, t, n, d], [s, b, t, k, d] and [b, k, tiles, rows] lie on a mesh.
_TOKENS, _KEYS, _NUMBERS = P("data", None, "model"), P(None, "data", None, "model"), P("data", "model")
_INPUTS = (_TOKENS, _KEYS, _KEYS, P("data"), P())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pallas(interpret: Any, queries: Array, keys: Array, values: Array, starts: Array, newest: Array) -> Array:
    return _pallas_forward(interpret, queries, keys, values, starts, newest)[0]


def _pallas_forward(
    interpret: Any, queries: Array, keys: Array, values: Array, starts: Array, newest: Array
) -> tuple[Array, tuple[Array, ...]]:
    def local(queries: Array, keys: Array, values: Array, starts: Array, newest: Array) -> tuple[Array, Array]:
        s, operands = _operands(queries, keys, values, starts, newest)
        attended, normaliser = tpu.forward(s, *operands, interpret=interpret)
        return _unfolded(attended, s, queries.shape), normaliser

    inputs = queries, keys, values, starts, newest
    attended, normaliser = over_mesh(local, inputs, _INPUTS, (_TOKENS, _NUMBERS), _sizes(queries, keys))
    attended, normaliser = checkpoint_name(attended, KEPT), checkpoint_name(normaliser, KEPT)
    return attended, (*inputs, attended, normaliser)


def _pallas_backward(interpret: Any, saved: Any, cotangents: Array) -> tuple[Array | None, ...]:
    def local(
        queries: Array,
        keys: Array,
        values: Array,
        starts: Array,
        newest: Array,
        attended: Array,
        normaliser: Array,
        cotangents: Array,
    ) -> tuple[Array, Array, Array]:
        s, operands = _operands(queries, keys, values, starts, newest)
        delta = jnp.sum(attended.astype(jnp.float32) * cotangents.astype(jnp.float32), axis=-1, keepdims=True)
        d_queries, *first, d_later_keys, d_later_values = tpu.backward(
            s,
            *operands,
            cotangents=_folded(cotangents, s),
            normaliser=normaliser,
            delta=_folded(delta, s)[..., 0],
            interpret=interpret,
        )
        d_keys, d_values = (
            _joined(step0, later, s)[:, :, : keys.shape[2]]
            for step0, later in zip(first, (d_later_keys, d_later_values), strict=True)
        )
        return _unfolded(d_queries, s, queries.shape), d_keys, d_values

    saved = tuple(jnp.asarray(x) for x in saved)  # a constant among them is none of JAX's arrays
    queries, keys = saved[:2]
    specs, results = (*_INPUTS, _TOKENS, _NUMBERS, _TOKENS), (_TOKENS, _KEYS, _KEYS)
    gradients = over_mesh(local, (*saved, cotangents), specs, results, _sizes(queries, keys))
    return (*gradients, None, None)


_pallas.defvjp(_pallas_forward, _pallas_backward)


def _sizes(queries: Array, keys: Array) -> dict[str, int]:
    """What the axes of a mesh split: rows of the batch and KV heads."""
    return {"data": queries.shape[0], "model": keys.shape[3]}


def _operands(
    queries: Array, keys: Array, values: Array, starts: Array, newest: Array
) -> tuple[tpu.TTTShape, tuple[Array, ...]]:
    """What both kernels read, in the layouts that they want."""
    s = plan(queries.shape, keys.shape, queries.dtype)
    missing = s.length - queries.shape[1]
    # Queries of the padding see themselves and nothing else.
    own = jnp.broadcast_to(jnp.arange(queries.shape[1], s.length, dtype=jnp.int32), (s.batch, missing))
    padded = [jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0), (0, 0))) for x in (keys, values)]
    first = [x[0].swapaxes(1, 2) for x in padded]
    # [s, b, (tiles, tile), k, d] -> [b, k, tiles, (s, tile), d]
    later = [
        x[1:]
        .reshape(s.later, s.batch, s.tiles, s.tile, s.kv_heads, s.head_dim)
        .transpose(1, 4, 2, 0, 3, 5)
        .reshape(s.batch, s.kv_heads, s.tiles, s.later * s.tile, s.head_dim)
        for x in padded
    ]
    return s, (_folded(queries, s), *first, *later, jnp.concatenate([starts, own], axis=1), newest)


def _joined(first: Array, later: Array, s: tpu.TTTShape) -> Array:
    """Gradients of step 0 [b, k, t, d] and of later steps [b, k, tiles, (s, tile), d] -> [s, b, t, k, d]."""
    later = later.reshape(s.batch, s.kv_heads, s.tiles, s.later, s.tile, s.head_dim).transpose(3, 0, 2, 4, 1, 5)
    later = later.reshape(s.later, s.batch, s.length, s.kv_heads, s.head_dim)
    return jnp.concatenate([first.swapaxes(1, 2)[None].astype(later.dtype), later])


def _folded(x: Array, s: tpu.TTTShape) -> Array:
    """[b, t, n, d] -> [b, k, tiles, (group, tile), d]."""
    x = jnp.pad(x, ((0, 0), (0, s.length - x.shape[1]), (0, 0), (0, 0)))
    x = x.reshape(s.batch, s.tiles, s.tile, s.kv_heads, s.group, -1).transpose(0, 3, 1, 4, 2, 5)
    return x.reshape(s.batch, s.kv_heads, s.tiles, s.rows, -1)


def _unfolded(x: Array, s: tpu.TTTShape, shape: tuple[int, ...]) -> Array:
    """[b, k, tiles, (group, tile), d] -> [b, t, n, d]."""
    x = x.reshape(s.batch, s.kv_heads, s.tiles, s.group, s.tile, -1).transpose(0, 2, 4, 1, 3, 5)
    return x.reshape(s.batch, s.length, *shape[2:])[:, : shape[1]]


def plan(queries: tuple[int, ...], keys: tuple[int, ...], dtype: Any) -> tpu.TTTShape:
    """How the kernels cut their work, for shapes as `ttt_attention` takes them.

    Raises:
        ValueError: with the numbers, where it does not fit.
    """
    b, t, n, d = queries
    steps, kv_heads = keys[0], keys[3]
    group = n // kv_heads
    length = -(-t // LANES) * LANES

    def shape(rows: int) -> tpu.TTTShape:
        tile = LANES
        while tile * 2 * group <= rows and length % (tile * 2) == 0:
            tile *= 2
        return tpu.TTTShape(
            batch=b,
            length=length,
            later=steps - 1,
            group=group,
            kv_heads=kv_heads,
            head_dim=d,
            tile=tile,
            chunk=math.gcd(length, _CHUNK),
        )

    itemsize = jnp.dtype(dtype).itemsize
    larger, smaller = map(shape, _ROWS)
    chosen = larger if larger.vmem_bytes(itemsize) <= VMEM_LIMIT else smaller
    check_fits("VMEM", chosen.vmem_bytes(itemsize), VMEM_LIMIT, chosen)
    return chosen
