"""Mixture of experts: each token's rows go through the few experts that its router prefers.

Rows are sorted by expert and multiplied group by group (`jax.lax.ragged_dot`): a product reads the weights of the
experts that were chosen and no others. On a mesh every expert's columns are split over the model axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.dispatch import over_mesh, split_axes
from eagle3_jax.models.layers import normal

_PRECISION = jax.lax.Precision.HIGHEST

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
            return jax.lax.ragged_dot(
                rows, matrices.astype(rows.dtype), counts, precision=_PRECISION, preferred_element_type=jnp.float32
            )

        outputs = feed(x.reshape(b * t, -1)[order // k], product, experts[order], *parameters)
        # Back in each token's own order: its sum does not depend on its neighbours' experts.
        outputs = outputs[jnp.argsort(order)].reshape(b, t, k, -1)
        mixed = jnp.einsum("btkh,btk->bth", outputs, weights.astype(jnp.float32), precision=_PRECISION)
        return jax.lax.psum(mixed, "model") if "model" in split_axes(sizes) else mixed

    rows = P("data")
    return over_mesh(local, (x, chosen, weights, *parameters), (rows, rows, rows, *specs), rows, sizes)
