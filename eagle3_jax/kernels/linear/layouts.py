"""Matrix layouts that `linear` takes beside a plain array: registered pytrees, so that a model can hold them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class _Parameter:
    def __getitem__(self, index: Any) -> Any:
        """Returns itself: flax reads a parameter's value by `parameter[...]`."""
        assert index is Ellipsis
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Panels(_Parameter):
    """A matrix [k, n] as the CPU kernel reads it: column j is panels[j // w, :, j % w, :], flattened.

    Attributes:
        panels: rows in groups of 1, or of 2 for bfloat16 (`cpu.pack`); columns and rows are padded with zeros.
        columns: n.
        dtype: dtype of the matrix; the panels of a float32 matrix may be bfloat16.
    """

    panels: Any  # Float[Array, "p groups w group"], or the leaf of another tree of this structure
    columns: int = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})

    def for_rows(self, x: Array) -> Array:
        """Returns the panels for a product with x: in x's dtype, or in bfloat16 that the kernel widens."""
        count, groups, width, group = self.panels.shape
        if self.panels.dtype == x.dtype or (x.dtype == jnp.float32 and group == 1):
            return self.panels
        return self.panels.swapaxes(2, 3).reshape(count, groups * group, width, 1).astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Padded(_Parameter):
    """A matrix whose products pad x to the next number of rows in `rows`; x with more rows is not padded.

    Attributes:
        matrix: [k, n], or a vocabulary's [n, k].
        rows: ascending; see `few_rows.cheapest`.
    """

    matrix: Any  # Float[Array, "..."], or the leaf of another tree of this structure
    rows: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape

    @property
    def dtype(self) -> Any:
        return self.matrix.dtype

    def apply(self, product: Callable[[Array, Array], Array], x: Float[Array, "m k"]) -> Float[Array, "m n"]:
        """Applies `product` to the padded x and the matrix, and drops the padding's rows."""
        count = next((rows for rows in self.rows if rows >= len(x)), len(x))
        return product(jnp.pad(x, ((0, count - len(x)), (0, 0))), self.matrix)[: len(x)]
