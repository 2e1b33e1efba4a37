"""Mixture of experts: each token's rows go through the few experts that its router prefers.

Rows are sorted by expert and multiplied group by group: a product reads the weights of the experts that were chosen and
no others. On a TPU it is `jax.lax.ragged_dot`, which XLA knows there; on CPUs, where JAX makes that one dense product
over all experts, a loop over the groups. On a mesh every expert's columns are split over the model axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.dispatch import device, over_mesh, split_axes
from eagle3_jax.models.layers import normal

_PRECISION = jax.lax.Precision.HIGHEST
# Rows of a group that one product of the loop takes: few enough for a group of one, enough to read a matrix seldom.
_BLOCK = 32

# (rows, matrices [experts, in, out]) -> float32: each row by its expert's matrix.
Product = Callable[[Array, Array], Array]


class Experts(nnx.Module):
    """SwiGLU experts of a layer; which of them a token goes to, the family decides.

    `expert_gate` and `expert_up` [experts, hidden, intermediate], `expert_down` [experts, intermediate, hidden].
    """

    def __init__(self, hidden: int, intermediate: int, experts: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        self.expert_gate = normal((experts, hidden, intermediate), dtype, rngs)
        self.expert_up = normal((experts, hidden, intermediate), dtype, rngs)
        self.expert_down = normal((experts, intermediate, hidden), dtype, rngs)

    def __call__(
        self, x: Float[Array, "b t h"], chosen: Int[Array, "b t k"], weights: Float[Array, "b t k"]
    ) -> Float[Array, "b t h"]:
        """The weighted sum of the chosen experts' outputs, in float32 until the end."""

        def feed(rows: Array, product: Product, expert: Array, gate: Array, up: Array, down: Array) -> Array:
            hidden = jax.nn.silu(product(rows, gate)) * product(rows, up)
            return product(hidden.astype(x.dtype), down)

        columns = P(None, None, "model")
        matrices = self.expert_gate[...], self.expert_up[...], self.expert_down[...]
        return mixture(x, chosen, weights, feed, matrices, (columns, columns, P(None, "model"))).astype(x.dtype)


def mixture(
    x: Float[Array, "b t h"],
    chosen: Int[Array, "b t k"],
    weights: Float[Array, "b t k"],
    feed: Callable[..., Array],
    parameters: tuple[Array, ...],
    specs: tuple[P, ...],
) -> Float[Array, "b t h"]:
    """float32: the sum over a token's experts of what `feed` makes of it there, by weight.

    Args:
        feed: (rows, product, the expert of each row, *parameters) -> what the experts make of rows that are sorted by
            expert, or, of parameters that are split, a part of that sum.
        parameters: the first is [experts, in, columns]. specs: how the model axis splits them.
    """
    sizes = {"data": x.shape[0], "model": parameters[0].shape[2]}

    def local(x: Array, chosen: Array, weights: Array, *parameters: Array) -> Array:
        b, t, k = chosen.shape
        experts = chosen.reshape(-1)
        order = jnp.argsort(experts, stable=True)
        counts = jnp.bincount(experts, length=parameters[0].shape[0]).astype(jnp.int32)

        def product(rows: Array, matrices: Array) -> Array:
            if device().platform == "cpu":
                return grouped(rows, matrices, counts)
            # Products of bfloat16 are exact in float32; asked for more precision, libtpu's kernel does not compile.
            precision = _PRECISION if rows.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
            return jax.lax.ragged_dot(
                rows, matrices.astype(rows.dtype), counts, precision=precision, preferred_element_type=jnp.float32
            )

        outputs = feed(x.reshape(b * t, -1)[order // k], product, experts[order], *parameters)
        # Back in each token's own order: its sum does not depend on its neighbours' experts.
        outputs = outputs[jnp.argsort(order)].reshape(b, t, k, -1)
        mixed = jnp.einsum("btkh,btk->bth", outputs, weights.astype(jnp.float32), precision=_PRECISION)
        return jax.lax.psum(mixed, "model") if "model" in split_axes(sizes) else mixed

    rows = P("data")
    return over_mesh(local, (x, chosen, weights, *parameters), (rows, rows, rows, *specs), rows, sizes)


def grouped(
    rows: Float[Array, "r i"], matrices: Float[Array, "e i o"], counts: Int[Array, " e"]
) -> Float[Array, "r o"]:
    """`jax.lax.ragged_dot` as a loop over blocks of the groups; a matrix without rows is not touched.

    Args:
        rows: sorted by group. counts: int32, rows of each group, of all together `r`.
    """
    size, (_, _, columns) = len(rows), matrices.shape
    ends = jnp.cumsum(counts)
    padded = jnp.pad(rows, ((0, _BLOCK), (0, 0)))

    def group(index: Array, sums: Array) -> Array:
        start = ends[index] - counts[index]

        def block(number: Array, sums: Array) -> Array:
            # What a block has beyond its group, the groups behind write again.
            first = start + number * _BLOCK
            taken = jax.lax.dynamic_slice_in_dim(padded, first, _BLOCK)
            product = jnp.matmul(
                taken, matrices[index].astype(rows.dtype), precision=_PRECISION, preferred_element_type=jnp.float32
            )
            return jax.lax.dynamic_update_slice_in_dim(sums, product, first, axis=0)

        return jax.lax.fori_loop(0, (counts[index] + _BLOCK - 1) // _BLOCK, block, sums)

    zeros = jnp.zeros((size + _BLOCK, columns), jnp.float32)
    return jax.lax.fori_loop(0, len(counts), group, zeros)[:size]
