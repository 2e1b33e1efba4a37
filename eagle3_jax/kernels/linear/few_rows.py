"""Products of a few rows, padded to the number of rows that costs least.

XLA for GPUs chooses a product's kernel by its shape: on an H100 one row takes longer than four (docs/benchmarks.md). On a
CPU the panels of `linear_cpu` take few rows as they are, on a TPU they fill a tile of the matrix unit in any case.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from eagle3_jax.kernels.dispatch import device

# Numbers of rows that are worth measuring: decode programs of few requests have no more.
COUNTS = (1, 2, 4, 8, 16)
# Matrices of one shape to measure: more than caches hold, where it matters.
SAMPLE = 8
_GAIN = 0.03  # of the time that padding must save: less is noise


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Padded:
    """A matrix whose product takes x with as many rows as `rows` has next; x with more stays as it is.

    Attributes:
        matrix: [k, n], or a vocabulary's [n, k].
        rows: ascending.
    """

    matrix: Any  # Float[Array, "..."], or what a tree of other leaves has in its place
    rows: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def __getitem__(self, index: Any) -> Padded:
        """As an array's [...]."""
        assert index is Ellipsis
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape

    @property
    def dtype(self) -> Any:
        return self.matrix.dtype

    def apply(self, product: Callable[[Array, Array], Array], x: Float[Array, "m k"]) -> Float[Array, "m n"]:
        """`product` of x, padded, and the matrix."""
        count = next((rows for rows in self.rows if rows >= len(x)), len(x))
        return product(jnp.pad(x, ((0, count - len(x)), (0, 0))), self.matrix)[: len(x)]


def counts() -> tuple[int, ...]:
    """Numbers of rows to measure products with on this device; none where padding has no use."""
    return COUNTS if device().platform in ("gpu", "cuda", "rocm") else ()


def cheapest(seconds: Mapping[int, float]) -> tuple[int, ...]:
    """`Padded.rows`: numbers of rows that no larger one costs less than; none where that is so of all.

    Args:
        seconds: of a product, by its rows, ascending.
    """
    kept = [
        rows
        for rows, taken in seconds.items()
        if all(taken * (1 - _GAIN) <= more for other, more in seconds.items() if other > rows)
    ]
    return () if len(kept) == len(seconds) else tuple(kept)


@functools.partial(jax.jit, static_argnames=("rows", "product"))
def multiply(
    matrices: Sequence[Array], x: Float[Array, " k"], *, rows: int, product: Callable[[Array, Array], Array]
) -> Float[Array, "m k"]:
    """`product` of so many rows and each matrix, one after the other: to be timed.

    Each waits for the one before, or XLA may join products of the same rows.
    """
    x = jnp.broadcast_to(x, (rows, len(x)))
    for matrix in matrices:
        x += jnp.tanh(product(x, matrix)[:, :1]).astype(x.dtype)
    return x
