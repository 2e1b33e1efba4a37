"""Matrix layouts that `linear` takes beside a plain array: registered pytrees, so that a model can hold them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.tpu.registers import SUBLANES

# Of the TPU's kernel for groups of few bits: numbers of a row in a product, and rows of values at a time.
WIDE = 128
_CHUNK = 2048


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


class PanelForm(NamedTuple):
    """What the bytes of `QuantisedPanels` are.

    Attributes:
        bits: of a value, 8 or 4.
        zero: the value that stands for 0.
        scale: dtype of scales and offsets.
        parts: 1 for scales alone, 2 with offsets.
        group: rows that share a scale, 32 or 16 of the 32 of a group; 0: all rows of a column.
    """

    bits: int
    zero: int
    scale: str
    parts: int
    group: int

    def bytes_of_scales(self, columns: int) -> int:
        """Bytes of the scales and offsets of a group, or of all rows."""
        count = 32 // self.group if self.group else 1
        return columns * count * self.parts * jnp.dtype(self.scale).itemsize

    def bytes_of_head(self, columns: int) -> int:
        """Bytes in front of a panel's groups."""
        return 0 if self.group else self.bytes_of_scales(columns)

    def bytes_of_group(self, columns: int) -> int:
        return columns * 4 * self.bits + (self.bytes_of_scales(columns) if self.group else 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantisedPanels(Panels):
    """A matrix [k, n] in few bits as the CPU kernel reads it (`quantised_cpu.pack`): uint8 [p, bytes of a panel]."""

    form: PanelForm = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantised(_Parameter):
    """A matrix in few bits: `values * scale`, plus `offset` if there is one.

    The product's sum runs over the axis k: the last but one of a matrix, the last of a vocabulary's rows. A scale
    belongs to a group of consecutive values along k, or to all of them.

    Attributes:
        values: int8, int4 or a narrow float: [k, n], experts [e, k, n], or a vocabulary [v, k].
        scale: float32 or bfloat16, of the values' shape with groups in place of k.
        offset: as `scale`, or None.
        dtype: dtype of the matrix that the values stand for.
    """

    values: Any  # arrays, or the leaves of another tree of this structure
    scale: Any
    offset: Any
    dtype: Any = dataclasses.field(metadata={"static": True})

    shape = property(lambda self: self.values.shape)
    sharding = property(lambda self: self.values.sharding)
    committed = property(lambda self: self.values.committed)

    def array(self) -> Float[Array, "..."]:
        """Multiplies the matrix out, in its dtype."""
        return _multiplied_out(self.values, self.scale, self.offset).astype(self.dtype)

    def rows(self, index: Int[Array, "*batch"]) -> Float[Array, "*batch k"]:
        """Looks up rows of a vocabulary, in the matrix's dtype."""
        taken = jax.tree.map(lambda x: x[index], (self.values, self.scale, self.offset))
        return _multiplied_out(*taken).astype(self.dtype)


def dense(matrix: Any) -> Any:
    """Returns a matrix as an array; a `Quantised` is multiplied out."""
    return matrix.array() if isinstance(matrix, Quantised) else matrix


def _multiplied_out(values: Array, scale: Array, offset: Array | None) -> Array:
    def spread(x: Array) -> Array:
        for axis in (-2, -1):
            x = jnp.repeat(x, values.shape[axis] // x.shape[axis], axis=axis)
        return x.astype(jnp.float32)

    result = values.astype(jnp.float32) * spread(scale)
    return result if offset is None else result + spread(offset)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Padded(_Parameter):
    """A matrix ([k, n], or a vocabulary's [n, k]) whose products pad x to the next of `rows`, which ascend, if any."""

    matrix: Any  # Float[Array, "..."], or the leaf of another tree of this structure
    rows: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    shape = property(lambda self: self.matrix.shape)
    dtype = property(lambda self: self.matrix.dtype)

    def apply(self, product: Callable[[Array, Any], Array], x: Float[Array, "m k"]) -> Float[Array, "m n"]:
        """Applies `product` to the padded x and the matrix, and drops the padding's rows."""
        count = next((rows for rows in self.rows if rows >= len(x)), len(x))
        return product(jnp.pad(x, ((0, count - len(x)), (0, 0))), self.matrix)[: len(x)]


def bytes_of(leaf: Any) -> int:
    """Counts an array's bytes; numbers of 4 bits are packed, as accelerators hold them."""
    packed = any(leaf.dtype == kind for kind in (jnp.int4, jnp.uint4, jnp.float4_e2m1fn))
    return math.prod(leaf.shape) * (4 if packed else 8 * leaf.dtype.itemsize) // 8


def chunk_of(k: int, group: int) -> int | None:
    """Returns how many rows of values the TPU's kernel takes at a time: whole registers of values and of scales."""
    fitting = (size for size in range(min(k, _CHUNK) // WIDE * WIDE, 0, -WIDE) if k % size == 0)
    return next((size for size in fitting if size == k or size // group % SUBLANES == 0), None)
