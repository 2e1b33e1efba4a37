"""Mixture of experts: routes each token to a few experts and sums their outputs.

Rows are sorted by expert and multiplied group by group, so only the weights of chosen experts are read. TPUs use
`jax.lax.ragged_dot`, which XLA supports there. CPUs use a loop over the groups, because JAX lowers `ragged_dot` to one
dense product over all experts. So do quantised experts everywhere: a TPU's `ragged_dot` reads a float copy of all of
them. On a mesh every expert's columns are split over the model axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.dispatch import device, over_mesh, split_axes
from eagle3_jax.kernels.linear.api import multiply
from eagle3_jax.kernels.linear.layouts import Quantised
from eagle3_jax.models.layers import normal

_PRECISION = jax.lax.Precision.HIGHEST
# Rows of a group in one product of the loop: small enough for a group of one, large enough to read a matrix rarely.
_BLOCK = 32
_LARGE_BLOCK = 128  # on accelerators, which compute faster than they read

# (rows, matrices [experts, in, out]) -> float32: each row times its expert's matrix, of an array or `Quantised`.
Product = Callable[[Array, Any], Array]


class Experts(nnx.Module):
    """SwiGLU experts of a layer, or those of another activation; the family's router chooses among them.

    `expert_gate` and `expert_up` [experts, hidden, intermediate], `expert_down` [experts, intermediate, hidden].
    """

    activation: ClassVar[Any] = staticmethod(jax.nn.silu)  # (rows) -> rows

    def __init__(self, hidden: int, intermediate: int, experts: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        self.expert_gate = normal((experts, hidden, intermediate), dtype, rngs)
        self.expert_up = normal((experts, hidden, intermediate), dtype, rngs)
        self.expert_down = normal((experts, intermediate, hidden), dtype, rngs)

    def __call__(
        self, x: Float[Array, "b t h"], chosen: Int[Array, "b t k"], weights: Float[Array, "b t k"]
    ) -> Float[Array, "b t h"]:
        """Sums the chosen experts' outputs by weight, in float32 until the end."""

        def feed(rows: Array, product: Product, expert: Array, gate: Any, up: Any, down: Any) -> Array:
            hidden = self.activation(product(rows, gate)) * product(rows, up)
            return product(hidden.astype(x.dtype), down)

        columns = P(None, None, "model")
        matrices = self.expert_gate[...], self.expert_up[...], self.expert_down[...]
        return mixture(x, chosen, weights, feed, matrices, (columns, columns, P(None, "model"))).astype(x.dtype)


def mixture(
    x: Float[Array, "b t h"],
    chosen: Int[Array, "b t k"],
    weights: Float[Array, "b t k"],
    feed: Callable[..., Array],
    parameters: tuple[Any, ...],
    specs: tuple[P, ...],
) -> Float[Array, "b t h"]:
    """Sums each token's expert outputs by weight, in float32; `specs`: how the model axis splits the parameters.

    `feed` maps (rows, product, the expert of each row, *parameters) to outputs of rows sorted by expert, to partial
    sums where the parameters are split: arrays or `Quantised`, of which the first is [experts, in, columns].
    """
    sizes = {"data": x.shape[0], "model": parameters[0].shape[2]}
    split = "model" in split_axes(sizes)

    def local(x: Array, chosen: Array, weights: Array, *parameters: Any) -> Array:
        b, t, k = chosen.shape
        experts = chosen.reshape(-1)
        order = jnp.argsort(experts, stable=True)
        counts = jnp.bincount(experts, length=parameters[0].shape[0]).astype(jnp.int32)

        def product(rows: Array, matrices: Any) -> Array:
            if isinstance(matrices, Quantised) or device().platform == "cpu":
                return grouped(rows, matrices, counts)
            # bfloat16 products are exact in float32; libtpu's kernel does not compile at a higher precision.
            precision = _PRECISION if rows.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
            return jax.lax.ragged_dot(
                rows, matrices.astype(rows.dtype), counts, precision=precision, preferred_element_type=jnp.float32
            )

        outputs = feed(x.reshape(b * t, -1)[order // k], product, experts[order], *parameters)
        # Restores each token's own order of experts, so its sum does not depend on neighbouring tokens.
        outputs = outputs[jnp.argsort(order)].reshape(b, t, k, -1)
        mixed = jnp.einsum("btkh,btk->bth", outputs, weights.astype(jnp.float32), precision=_PRECISION)
        return jax.lax.psum(mixed, "model") if split else mixed

    rows = P("data")
    return over_mesh(local, (x, chosen, weights, *parameters), (rows, rows, rows, *specs), rows, sizes)


@jax.custom_vjp
def grouped(
    rows: Float[Array, "r i"], matrices: Float[Array, "e i o"] | Quantised, counts: Int[Array, " e"]
) -> Float[Array, "r o"]:
    """Computes `jax.lax.ragged_dot` by a loop over blocks of each group; matrices without rows are not read.

    Rows are sorted by group; `counts` are the rows of each, int32, whose sum is r.
    """
    size, (_, _, columns) = len(rows), matrices.shape
    ends = jnp.cumsum(counts)
    most = _BLOCK if device().platform == "cpu" else min(_LARGE_BLOCK, size)
    padded = jnp.pad(rows, ((0, most), (0, 0)))

    def dense(x: Array, matrix: Array) -> Array:
        return jnp.matmul(x, matrix.astype(x.dtype), precision=_PRECISION, preferred_element_type=jnp.float32)

    def group(index: Array, sums: Array) -> Array:
        start = ends[index] - counts[index]

        def block(number: Array, sums: Array) -> Array:
            # Rows past the group's end are overwritten by the next groups.
            first = start + number * most
            taken = jax.lax.dynamic_slice_in_dim(padded, first, most)
            product = multiply(taken, matrices, dense, index)
            return jax.lax.dynamic_update_slice_in_dim(sums, product, first, axis=0)

        return jax.lax.fori_loop(0, (counts[index] + most - 1) // most, block, sums)

    zeros = jnp.zeros((size + most, columns), jnp.float32)
    return jax.lax.fori_loop(0, len(counts), group, zeros)[:size]


def _grouped_backward(saved: tuple[Array, ...], cotangents: Array) -> tuple[Array, Array, None]:
    """Gradients of rows and matrices: a loop of unknown length has none of its own."""
    rows, matrices, counts = saved
    ends, index = jnp.cumsum(counts), jnp.arange(_BLOCK)[:, None]
    inputs, outputs = (jnp.pad(x.astype(jnp.float32), ((0, _BLOCK), (0, 0))) for x in (rows, cotangents))

    def group(number: Array, gradients: Array) -> Array:
        start = ends[number] - counts[number]

        def block(part: Array, gradient: Array) -> Array:
            first = start + part * _BLOCK
            taken, given = (jax.lax.dynamic_slice_in_dim(x, first, _BLOCK) for x in (inputs, outputs))
            taken = jnp.where(first + index < ends[number], taken, 0)
            return gradient + jnp.matmul(taken.T, given, precision=_PRECISION)

        blocks = (counts[number] + _BLOCK - 1) // _BLOCK
        gradient = jax.lax.fori_loop(0, blocks, block, jnp.zeros(matrices.shape[1:], jnp.float32))
        return jax.lax.dynamic_update_index_in_dim(gradients, gradient, number, axis=0)

    zeros = jnp.zeros(matrices.shape, jnp.float32)
    gradients = jax.lax.fori_loop(0, len(counts), group, zeros).astype(matrices.dtype)
    back = grouped(cotangents.astype(rows.dtype), matrices.swapaxes(1, 2), counts)
    return back.astype(rows.dtype), gradients, None


grouped.defvjp(lambda *operands: (grouped(*operands), operands), _grouped_backward)
