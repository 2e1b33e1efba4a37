"""A product of at most 16 rows that reads its matrix once: a Pallas kernel for GPUs, by Triton."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from eagle3_jax.kernels.linear.layouts import Quantised

ROWS = 16  # the fewest that Triton multiplies; fewer ones are padded
PROGRAMS = 264  # two for each multiprocessor of an H200


def stream_product(
    x: Float[Array, "m k"], matrix: Array | Quantised, columns=64, depth=128, stages=4, warps=4, *, interpret=False
) -> Float[Array, "m n"]:
    """Computes x @ matrix in x's dtype, with float32 sums; each program multiplies all rows, over a stretch of k.

    Args:
        matrix: [k, n] in x's dtype, or int8 with one scale for each column.
        columns, depth: of the part of the matrix in one load; divisors of n and k.
        stages: loads in flight. warps: of a program.
        interpret: runs the kernel without a GPU.
    """
    values = matrix.values if isinstance(matrix, Quantised) else matrix
    (m, k), n, splits = x.shape, values.shape[1], 1
    while n // columns * splits < PROGRAMS and k % (2 * splits * depth) == 0:
        splits *= 2

    def kernel(x_ref: Any, matrix_ref: Any, sums_ref: Any) -> None:
        def add(step: Any, total: Array) -> Array:
            part = pl.ds(step * depth, depth)
            weights = matrix_ref[part, :].astype(x.dtype)
            return total + jnp.dot(x_ref[:, part], weights, preferred_element_type=jnp.float32)

        sums_ref[...] = jax.lax.fori_loop(0, k // splits // depth, add, jnp.zeros((ROWS, columns), jnp.float32))

    sums = pl.pallas_call(
        kernel,
        grid=(n // columns, splits),
        in_specs=[
            pl.BlockSpec((ROWS, k // splits), lambda column, split: (0, split)),
            pl.BlockSpec((k // splits, columns), lambda column, split: (split, column)),
        ],
        out_specs=pl.BlockSpec((None, ROWS, columns), lambda column, split: (split, 0, column)),
        out_shape=jax.ShapeDtypeStruct((splits, ROWS, n), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="stream_product",
    )(jnp.pad(x, ((0, ROWS - m), (0, 0))), values)
    found = sums.sum(axis=0)[:m]
    return (found * matrix.scale if isinstance(matrix, Quantised) else found).astype(x.dtype)
