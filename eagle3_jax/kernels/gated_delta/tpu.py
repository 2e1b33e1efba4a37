"""The gated delta rule as a Pallas kernel for TPU: the system of `solve`, whose matrices stay in VMEM.

A grid step reads the states of some key heads' value heads, and a chunk of their tokens or the nodes of a tree. Over
the chunks of a prompt the states stay in VMEM. The unit-triangular system is solved by forward substitution: products
of a block of rows with the updates before it, then row by row. The matrix's powers would lose digits.
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
from jaxtyping import Array, Bool, Float

from eagle3_jax.kernels.dispatch import over_mesh
from eagle3_jax.kernels.gated_delta.solve import CHUNK, Tokens
from eagle3_jax.kernels.tpu.registers import SUBLANES, dot

# Chosen by static profiles (tools/tpu_kernels.py).
_KEY_HEADS = 8  # of a grid step, at most
_ROWS = 16  # of the system that are solved row by row
_VMEM = 32 << 20  # bytes that the compiler may use

_HEADS = P("data", None, "model")


def chain(
    tokens: Tokens, states: Float[Array, "b n d_k d_v"], begins: Bool[Array, "b t"], *, interpret: Any
) -> tuple[Float[Array, "b t n d_v"], Float[Array, "b n d_k d_v"]]:
    """See `api.chain`."""
    t = begins.shape[1]
    size = min(CHUNK, -(-t // SUBLANES) * SUBLANES)
    begins = _padded(begins, size).reshape(len(begins), -1, size)
    documents = jnp.cumsum(begins, axis=-1)
    sees = jnp.tril(documents[..., :, None] == documents[..., None, :]), (documents == 0)[..., None]
    sees = jnp.concatenate(sees, axis=-1).astype(jnp.float32)
    return _split(tokens, states, sees, False, interpret)


def tree(
    tokens: Tokens, states: Float[Array, "b n d_k d_v"], mask: Bool[Array, "b t t"], *, interpret: Any
) -> tuple[Float[Array, "b t n d_v"], Float[Array, "b t n d_v"]]:
    """See `api.tree`."""
    pad = -mask.shape[1] % SUBLANES
    sees = jnp.pad(mask.astype(jnp.float32), ((0, 0), (0, pad), (0, pad)))
    sees = jnp.pad(sees, ((0, 0), (0, 0), (0, 1)), constant_values=1)
    return _split(tokens, states, sees[:, None], True, interpret)


def _padded(x: Array, size: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), *((0, 0),) * (x.ndim - 2)))


def _split(
    tokens: Tokens, states: Float[Array, "b n d_k d_v"], sees: Float[Array, "b c t over"], nodes: bool, interpret: Any
) -> tuple[Array, Array]:
    """Calls the kernel for each device's sequences and heads; of `nodes` of a tree returns the updates, else states.

    `sees` is 1 where a token of a chunk sees another one, and in the last column where it sees the states in front.
    """
    (b, t, _), key_heads = tokens.betas.shape, tokens.keys.shape[2]
    outputs, kept = over_mesh(
        functools.partial(_local, nodes=nodes, interpret=interpret),
        (Tokens(*(_padded(x, sees.shape[2]) for x in tokens)), states, sees),
        (_HEADS, P("data", "model"), P("data")),
        (_HEADS, _HEADS if nodes else P("data", "model")),
        {"data": b, "model": key_heads},
    )
    return outputs[:, :t], kept[:, :t] if nodes else kept


def _local(tokens: Tokens, states: Array, sees: Array, *, nodes: bool, interpret: Any) -> tuple[Array, Array]:
    """Calls the kernel, whose arrays have heads in front of tokens."""
    queries, keys, values, decays, betas = (x.swapaxes(1, 2) for x in tokens)
    (b, n, _, d_v), (k, d_k), (chunks, size) = values.shape, keys.shape[1::2], sees.shape[1:3]
    heads = math.gcd(k, _KEY_HEADS)
    value_heads = n // k * heads
    gates = jnp.stack([decays, betas], axis=2)[:, :, :, None]  # [b, n, 2, 1, t]
    gates = gates.reshape(b, n, 2, chunks, size).swapaxes(2, 3)

    def of_heads(count: int, width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, count, size, width), lambda b, h, c: (b, h, c, 0))

    state = pl.BlockSpec((1, value_heads, d_k, d_v), lambda b, h, c: (b, h, 0, 0))
    outputs, kept = pl.pallas_call(
        functools.partial(_kernel, nodes),
        grid=(b, k // heads, chunks),
        in_specs=[
            of_heads(heads, d_k),
            of_heads(heads, d_k),
            of_heads(value_heads, d_v),
            pl.BlockSpec((1, value_heads, 1, 2, size), lambda b, h, c: (b, h, c, 0, 0)),
            pl.BlockSpec((1, 1, size, size + 1), lambda b, h, c: (b, c, 0, 0)),
            state,
        ],
        out_specs=[of_heads(value_heads, d_v), of_heads(value_heads, d_v) if nodes else state],
        out_shape=[jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (values, values if nodes else states)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=_VMEM
        ),
        interpret=interpret,
        name="gated_delta",
    )(queries, keys, values, gates, sees, states)
    return outputs.swapaxes(1, 2), kept.swapaxes(1, 2) if nodes else kept


def _kernel(
    nodes: bool, queries: Any, keys: Any, values: Any, gates: Any, sees: Any, states: Any, outputs: Any, kept: Any
) -> None:
    """Reads a chunk of tokens; the names are those of `solve`. Arrays are [value heads, rows, columns]."""
    if nodes:
        state = states[0]
    else:

        @pl.when(pl.program_id(2) == 0)
        def begin() -> None:
            kept[...] = states[...]

        state = kept[0]
    group, size = values.shape[1] // keys.shape[1], values.shape[2]
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (1, size, size), axis) for axis in (1, 2))

    def standing(x: Array) -> Array:
        """Turns [n, 1, size] into [n, size, 1]."""
        return jnp.where(row == column, x, 0).sum(axis=2, keepdims=True)

    seen, goes_on = sees[0, :, :, :size], sees[0, :, :, size:]
    total = (seen * gates[0, :, 0, :1]).sum(axis=2, keepdims=True)
    lying = jnp.where(row == column, total, 0).sum(axis=1, keepdims=True)
    decay = jnp.where(seen > 0, jnp.exp(total - lying), 0)
    since, beta = goes_on * jnp.exp(total), standing(gates[0, :, 0, 1:])
    both = jnp.concatenate([keys[0], queries[0]], axis=1)
    similar = jnp.repeat(_product(both, keys[0], 1, 1), group, axis=0)
    before = _product(jnp.repeat(both, group, axis=0), state, 1, 0)
    strict = jnp.where(row > column, decay * similar[:, :size], 0) * beta
    updates = _substituted(strict, (values[0] - before[:, :size] * since) * beta)
    outputs[0] = before[:, size:] * since + _product(decay * similar[:, size:], updates, 1, 0)
    if nodes:
        kept[0] = updates
    else:
        rows = jnp.repeat(keys[0], group, axis=0) * standing(decay[:, size - 1 :])
        kept[0] = state * since[:, size - 1 :] + _product(rows, updates, 0, 0)


def _substituted(strict: Float[Array, "n t t"], right: Float[Array, "n t d_v"]) -> Float[Array, "n t d_v"]:
    """Returns X with X + strict X = right; strict is zero on and above the diagonal."""
    size, solved = right.shape[1], list[Array]()
    for start in range(0, size, _ROWS):
        block, rest = strict[:, start : start + _ROWS], right[:, start : start + _ROWS]
        if start:
            rest -= _product(block[:, :, :start], jnp.concatenate(solved, axis=1), 1, 0)
        for i in range(rest.shape[1] - 1):
            rest -= block[:, :, start + i : start + i + 1] * rest[:, i : i + 1]
        solved.append(rest)
    return jnp.concatenate(solved, axis=1)


def _product(x: Array, y: Array, x_contracted: int, y_contracted: int) -> Array:
    """Multiplies matrices head by head, see `dot`."""
    return jax.vmap(lambda x, y: dot(x, y, x_contracted, y_contracted))(x, y)
