"""Weights in 8 or 4 bits: made from float matrices, and multiplied without a float copy of the matrix.

Activations stay as they are. XLA converts the values on their way from memory into the product. int8 and float8 have
one scale for each column of the product, applied to its result. int4 has a scale and an offset for each group, and
groups have a kernel of their own on a TPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.contraction import contract
from eagle3_jax.kernels.dispatch import Implementation, choose, is_whole
from eagle3_jax.kernels.linear.layouts import WIDE, Quantised, chunk_of

Quantization = Literal["int8", "fp8", "int4"]
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)

_HIGHEST = jax.lax.Precision.HIGHEST
_LARGEST: dict[str, tuple[Any, float]] = {
    "int8": (jnp.int8, 127.0),
    "fp8": (jnp.float8_e4m3fn, float(ml_dtypes.finfo(jnp.float8_e4m3fn).max)),
}
_STEPS = 15  # of int4, from its least value to its greatest
_MOST_ROWS = 512  # of x in the TPU's kernel: for more rows a float copy of the matrix costs less


@functools.partial(jax.jit, static_argnames=("kind", "axis", "group"))
def quantise(matrix: Float[Array, "..."], kind: Quantization, *, axis: int = -2, group: int | None = None) -> Quantised:
    """Rounds a matrix to `kind`, in groups of values along the product's k: `axis` -2, or -1 for a vocabulary's rows.

    `group` is a divisor of k; None: all of a column.
    """
    axis %= matrix.ndim
    size = matrix.shape[axis]
    group = group or size
    parts = matrix.astype(jnp.float32).reshape(*matrix.shape[:axis], size // group, group, *matrix.shape[axis + 1 :])
    if kind == "int4":
        least, most = parts.min(axis + 1), parts.max(axis + 1)
        scale = _nonzero((most - least) / _STEPS)
        steps = jnp.round((parts - jnp.expand_dims(least, axis + 1)) / jnp.expand_dims(scale, axis + 1))
        middle = (_STEPS + 1) // 2
        values = (jnp.clip(steps, 0, _STEPS) - middle).astype(jnp.int4)
        return Quantised(values.reshape(matrix.shape), scale, least + middle * scale, matrix.dtype)
    dtype, largest = _LARGEST[kind]
    scale = _nonzero(jnp.abs(parts).max(axis + 1) / largest)
    scaled = jnp.clip(parts / jnp.expand_dims(scale, axis + 1), -largest, largest)
    values = (jnp.round(scaled) if kind == "int8" else scaled).astype(dtype)
    return Quantised(values.reshape(matrix.shape), scale, None, matrix.dtype)


def _nonzero(scale: Array) -> Array:
    """Replaces the scale of zeros by 1, and keeps others from vanishing."""
    return jnp.where(scale > 0, jnp.maximum(scale, jnp.finfo(jnp.float32).tiny), 1.0)


def product(
    x: Float[Array, "m k"],
    matrix: Quantised,
    dense: Callable[[Array, Array], Array],
    *,
    index: Int[Array, ""] | None = None,
    implementation: Implementation | None = None,
    interpret: Any = False,
) -> Float[Array, "m n"]:
    """Computes the product in float32; `dense` multiplies x by an array, which it casts to x's dtype.

    In bfloat16 each group is summed apart if these sums are smaller than a float copy of the matrix: if x has fewer
    rows than a group has values. In float32 a row's result had better not depend on the number of rows.

    Args:
        index: the matrix's place in a stack of matrices.
        implementation: the default is "pallas" on a TPU if `has_tpu_kernel`, and "xla" elsewhere.
        interpret: runs the Pallas kernel without a TPU; `pltpu.InterpretParams` included.
    """
    if choose(implementation, pallas=has_tpu_kernel(x, matrix)) == "pallas":
        from eagle3_jax.kernels.linear import tpu

        return tpu.product(x, matrix, index, interpret=interpret)
    if index is not None:
        matrix = jax.tree.map(lambda part: part[index], matrix)
    values, scale, offset = matrix.values, matrix.scale, matrix.offset
    if 1 in scale.shape and offset is None:
        return dense(x, values) * scale.reshape(1, -1).astype(jnp.float32)
    apart = x.dtype == jnp.bfloat16 and scale.shape[1] == values.shape[1] and len(x) * len(scale) < len(values)
    if not apart:
        return dense(x, matrix.array())
    groups = len(scale)
    x = x.reshape(len(x), groups, -1)
    sums = contract("mgk,gkn->gmn", x, values.reshape(groups, -1, values.shape[1]))
    result = jnp.einsum("gmn,gn->mn", sums, scale.astype(jnp.float32), precision=_HIGHEST)
    if offset is None:
        return result
    totals = x.astype(jnp.float32).sum(axis=-1)
    return result + jnp.matmul(totals, offset.astype(jnp.float32), precision=_HIGHEST)


def has_tpu_kernel(x: Float[Array, "m k"], matrix: Quantised) -> bool:
    """Tells whether the TPU's kernel takes a product of [k, n], or of one of a stack [e, k, n].

    It takes up to 512 rows of bfloat16, and groups whose size divides 128, on one device: XLA does not split its call.
    """
    *_, k, n = matrix.shape
    groups, columns = matrix.scale.shape[-2:]
    return (
        x.dtype == jnp.bfloat16
        and len(x) <= _MOST_ROWS
        and matrix.values.dtype in (jnp.int4, jnp.int8, jnp.float8_e4m3fn)
        and groups > 1
        and x.shape[1] == k
        and (k % WIDE, WIDE % (k // groups), n % WIDE, n % columns) == (0, 0, 0, 0)
        and chunk_of(k, k // groups) is not None
        and is_whole()
    )
