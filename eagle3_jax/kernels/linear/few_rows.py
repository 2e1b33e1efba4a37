"""Products of a few rows, padded to the number of rows that costs least.

XLA for GPUs chooses a product's kernel by its shape: on an H100 one row takes longer than four (docs/benchmarks.md).
XLA for TPUs multiplies one row in its vector unit, two and more in the matrix unit. Its own estimates of the vector
unit's time differ sevenfold, so a TPU must measure too. CPUs need no padding: their kernel takes any number of rows.
`layouts.Padded` holds a matrix with the numbers of rows to pad to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from eagle3_jax.kernels.dispatch import device
from eagle3_jax.kernels.linear.layouts import Quantised

# Numbers of rows to measure: decode programs of few requests have no more.
COUNTS = (1, 2, 4, 8, 16)
# Matrices of one shape to measure: together larger than the caches of a device where that matters.
SAMPLE = 8
_GAIN = 0.03  # share of the time that padding must save; less is noise


def counts() -> tuple[int, ...]:
    """Returns the numbers of rows to measure on this device; none where padding is of no use."""
    return () if device().platform == "cpu" else COUNTS


def cheapest(seconds: Mapping[int, float]) -> tuple[int, ...]:
    """Returns the numbers of rows that cost no more than any larger number, for `Padded.rows`; none if all do."""
    kept = [
        rows
        for rows, taken in seconds.items()
        if all(taken * (1 - _GAIN) <= more for other, more in seconds.items() if other > rows)
    ]
    return () if len(kept) == len(seconds) else tuple(kept)


@functools.partial(jax.jit, static_argnames=("rows", "product"))
def multiply(
    matrices: Sequence[Array | Quantised], x: Float[Array, " k"], *, rows: int, product: Callable[[Array, Any], Array]
) -> Float[Array, "m k"]:
    """Multiplies `rows` rows with each matrix in turn, to be timed."""
    # Each product depends on the one before it, else XLA may merge them; the barrier keeps all its columns.
    x = jnp.broadcast_to(x, (rows, len(x)))
    for matrix in matrices:
        x += jnp.tanh(jax.lax.optimization_barrier(product(x, matrix))[:, :1]).astype(x.dtype)
    return x
