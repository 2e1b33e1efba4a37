"""Products of rows with a matrix in any of its layouts.

The layout decides the implementation: CPU kernels multiply `Panels`, which `pack` makes; XLA multiplies arrays and
`Quantised`, and a Pallas kernel groups of few bits on a TPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.contraction import contract
from eagle3_jax.kernels.cpu import compiler
from eagle3_jax.kernels.linear import cpu, quantised, quantised_cpu
from eagle3_jax.kernels.linear.layouts import Padded, Panels, Quantised, QuantisedPanels
from eagle3_jax.kernels.linear.quantised import quantise as quantise

# From so many rows on the product itself rounds its sums, see `contract`. For fewer ones XLA for TPUs would copy
# matrices into another layout; and scales of few bits multiply sums that are not rounded.
_MANY_ROWS = 256
_COLUMNS = 8192  # that `pack_rows` packs at a time, a multiple of a panel's


def pack(matrix: Float[Array, "k n"] | Quantised) -> Panels | Quantised:
    """Packs a matrix into panels of this machine's CPU kernels; one that they cannot multiply is returned as it is."""
    if not isinstance(matrix, Quantised):
        return cpu.pack(matrix)
    return quantised_cpu.pack(matrix) if quantised_cpu.multiplies(matrix) else matrix


def pack_rows(rows: Float[Array, "v k"] | Quantised) -> Iterator[Panels]:
    """Packs the transpose of a vocabulary's rows as `pack` does, a few columns at a time.

    Joined, the panels are those of the whole; there are none where the kernels cannot multiply it.
    """
    matrix = jax.tree.map(lambda x: np.asarray(x).T, rows)
    if isinstance(matrix, Quantised) and not quantised_cpu.multiplies(matrix):
        return
    # XLA would copy the transpose of an array, whose form is the array's.
    form = cpu.form_of(rows) if not isinstance(rows, Quantised) else quantised_cpu.form_of(matrix)
    kernels = quantised_cpu if isinstance(rows, Quantised) else cpu
    for start in range(0, matrix.shape[1], _COLUMNS):
        part = jax.tree.map(lambda x, start=start: x[:, start : start + _COLUMNS], matrix)
        yield dataclasses.replace(kernels.pack(part, form), columns=matrix.shape[1])


def panels_of_processor() -> list[Any]:
    """Returns what of this machine's processor decides panels."""
    return [*quantised_cpu.dots(), compiler.has_wide_vectors(), compiler.has_bfloat16_products()]


def xla_is_faster(dtype: Any) -> bool:
    """Tells whether XLA multiplies thousands of rows faster than the kernels of panels do, on a CPU.

    It multiplies bfloat16 with AMX, they with AVX-512: 8,192 tokens of SmolLM2-135M take 7 to 9 s by the one and 20 to
    23 s by the other.
    """
    return dtype == jnp.bfloat16 and compiler.has_tiles()


def linear(
    x: Float[Array, "*batch h"], matrix: Float[Array, "h out"] | Panels | Padded | Quantised
) -> Float[Array, "*batch out"]:
    """Computes x @ matrix in x's dtype; the matrix is cast to it."""
    many = x.size // x.shape[-1] >= _MANY_ROWS and isinstance(matrix, jax.Array)
    dtype = x.dtype if many else jnp.float32

    def dense(x: Array, matrix: Array) -> Array:
        return contract("mk,kn->mn", x, matrix, dtype)

    return multiply(x.reshape(-1, x.shape[-1]), matrix, dense).astype(x.dtype).reshape(*x.shape[:-1], -1)


def gated_linear(
    x: Float[Array, "*batch h"],
    gate: Float[Array, "h out"] | Panels | Padded | Quantised,
    up: Float[Array, "h out"] | Panels | Padded | Quantised,
) -> Float[Array, "*batch out"]:
    """Computes silu(x @ gate) * (x @ up) in x's dtype."""
    if isinstance(gate, Panels) and type(gate) is type(up):
        gated = _kernels(gate).product(x.reshape(-1, x.shape[-1]), gate, up)
        return gated.astype(x.dtype).reshape(*x.shape[:-1], -1)
    return jax.nn.silu(linear(x, gate)) * linear(x, up)


def multiply(
    x: Float[Array, "m k"],
    matrix: Float[Array, "..."] | Panels | Padded | Quantised,
    dense: Callable[[Array, Array], Array],
    index: Int[Array, ""] | None = None,
) -> Float[Array, "m n"]:
    """Computes the product in float32, or in the dtype of `dense`, which multiplies x by an array.

    `index` is the matrix's place in a stack of matrices, of arrays or `Quantised`.
    """
    if isinstance(matrix, Panels):
        return _kernels(matrix).product(x, matrix)
    if isinstance(matrix, Padded):
        return matrix.apply(lambda x, matrix: multiply(x, matrix, dense), x)
    if isinstance(matrix, Quantised):
        return quantised.product(x, matrix, dense, index=index)
    return dense(x, matrix if index is None else matrix[index])


def _kernels(matrix: Panels) -> Any:
    return quantised_cpu if isinstance(matrix, QuantisedPanels) else cpu
