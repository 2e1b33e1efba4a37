"""Mixture of experts: each token's rows go through the few SwiGLU experts that its router prefers.

Rows are sorted by expert and multiplied group by group (`jax.lax.ragged_dot`): a product reads the weights of the
experts that were chosen and no others. On a mesh every expert's columns are split over the model axis.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.dispatch import over_mesh, split_axes
from eagle3_jax.models.layers import normal

_PRECISION = jax.lax.Precision.HIGHEST


class Experts(nnx.Module):
    """The experts of a layer; which of them a token goes to, the family decides.

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
        matrices = self.expert_gate[...], self.expert_up[...], self.expert_down[...]
        sizes = {"data": x.shape[0], "model": self.expert_gate.shape[2]}

        def local(*operands: Array) -> Array:
            mixed = _mixed(*operands)
            return jax.lax.psum(mixed, "model") if "model" in split_axes(sizes) else mixed

        rows, columns = P("data"), P(None, None, "model")
        specs = (rows, rows, rows, columns, columns, P(None, "model"))
        return over_mesh(local, (x, chosen, weights, *matrices), specs, rows, sizes).astype(x.dtype)


def _mixed(x: Array, chosen: Array, weights: Array, gate: Array, up: Array, down: Array) -> Array:
    b, t, k = chosen.shape
    experts = chosen.reshape(-1)
    order = jnp.argsort(experts, stable=True)
    sizes = jnp.bincount(experts, length=gate.shape[0]).astype(jnp.int32)
    rows = x.reshape(b * t, -1)[order // k]

    def grouped(rows: Array, matrices: Array) -> Array:
        return jax.lax.ragged_dot(
            rows, matrices.astype(rows.dtype), sizes, precision=_PRECISION, preferred_element_type=jnp.float32
        )

    hidden = jax.nn.silu(grouped(rows, gate)) * grouped(rows, up)
    # Back in each token's own order: its sum does not depend on its neighbours' experts.
    outputs = grouped(hidden.astype(x.dtype), down)[jnp.argsort(order)].reshape(b, t, k, -1)
    return jnp.einsum("btkh,btk->bth", outputs, weights.astype(jnp.float32), precision=_PRECISION)
