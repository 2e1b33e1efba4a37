"""Products of rows with a matrix in groups of few bits, as a Pallas kernel for TPU.

XLA would write either a float copy of the matrix to memory, or the sums of each group. Here columns stream from HBM to
VMEM in their few bits, and no more. Of few rows the groups' sums are scaled: a row is multiplied by 128 values of a
column at a time, once for each of their groups, with zeros in place of the others. For more rows the values are scaled,
in VMEM.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int

from eagle3_jax.kernels.linear.layouts import WIDE, Quantised, bytes_of, chunk_of
from eagle3_jax.kernels.tpu.registers import SUBLANES, dot

# The tiling, chosen by static profiles (tools/tpu_kernels.py).
_SCALED_SUMS = 24  # rows of which the sums are scaled, not the values, which for more rows costs less
_BLOCK_BYTES = 4 << 20  # of values: a step of the grid costs as much as half a megabyte
_BLOCK_COLUMNS = 1024
_VMEM = 48 << 20  # bytes that the compiler may use


def product(
    x: Float[Array, "m k"], matrix: Quantised, index: Int[Array, ""] | None = None, *, interpret: Any = False
) -> Float32[Array, "m n"]:
    """See `quantised.product`; `quantised.has_tpu_kernel` tells for which operands."""
    (rows, k), (*_, n) = x.shape, matrix.shape
    group = k // matrix.scale.shape[-2]
    chunk = chunk_of(k, group)
    assert chunk is not None
    m = -(-rows // SUBLANES) * SUBLANES
    x = jnp.pad(x, ((0, m - rows), (0, 0)))

    def chunks(x: Array, width: int) -> Array:
        """Lays the columns of x out as the kernel's loop takes them."""
        return x.reshape(m, k // chunk, -1, width).transpose(1, 2, 0, 3)

    scaled_sums = rows <= _SCALED_SUMS
    operands = [chunks(x, WIDE if scaled_sums else chunk)]
    if scaled_sums and matrix.offset is not None:
        totals = x.astype(jnp.float32).reshape(m, -1, group).sum(axis=-1)
        operands.append(chunks(totals, chunk // group))
    column = bytes_of(jax.ShapeDtypeStruct((k,), matrix.values.dtype))
    block = min(max(_BLOCK_BYTES // column // WIDE * WIDE, WIDE), _BLOCK_COLUMNS, n)

    def part(stored: Array) -> tuple[Array, pl.BlockSpec]:
        """Lays values or scales out as a stack, of which the kernel reads blocks of one matrix's columns."""
        if index is not None and stored.shape[-1] < n:
            stored = stored[index]
        own = stored.ndim == 3
        stored = jnp.repeat(stored, n // stored.shape[-1], axis=-1)  # scales that columns share
        spec = pl.BlockSpec((None, stored.shape[-2], block), lambda i, index: (index[0] if own else 0, 0, i))
        return stored if own else stored[None], spec

    parts, specs = zip(*(part(x) for x in (matrix.values, matrix.scale, matrix.offset) if x is not None), strict=True)
    kernel = _scaled_sums if scaled_sums else _scaled_values
    result = pl.pallas_call(
        functools.partial(kernel, chunk, group),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(n, block),),
            in_specs=[*(pl.BlockSpec(x.shape, lambda i, index: (0, 0, 0, 0)) for x in operands), *specs],
            out_specs=pl.BlockSpec((m, block), lambda i, index: (0, i)),
        ),
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=_VMEM),
        interpret=interpret,
        name="grouped_product",
    )(jnp.asarray(0 if index is None else index, jnp.int32)[None], *operands, *parts)
    return result[:rows]


def _scaled_sums(chunk: int, group: int, _: Any, x: Any, *refs: Any) -> None:
    totals, values, scale, offset, out = refs if len(refs) == 5 else (None, *refs[:2], None, refs[2])
    count, size = WIDE // group, chunk // group

    def add(c: Any, sums: Array) -> Array:
        at = pl.ds(pl.multiple_of(c * size, size), size)
        scales, numbers = scale[at].astype(jnp.float32), values[pl.ds(pl.multiple_of(c * chunk, chunk), chunk)]
        if totals is not None and offset is not None:
            sums += dot(totals[c, 0], offset[at].astype(jnp.float32), 1, 0)
        m = len(sums)
        owner = jax.lax.broadcasted_iota(jnp.int32, (m, WIDE), 1) // group
        for p in range(chunk // WIDE):
            row = x[c, p].astype(jnp.float32)
            split = jnp.concatenate([jnp.where(owner == g, row, 0.0) for g in range(count)]).astype(x.dtype)
            products = dot(split, numbers[p * WIDE : (p + 1) * WIDE].astype(x.dtype), 1, 0)
            for g in range(count):
                sums += products[g * m : (g + 1) * m] * scales[p * count + g][None]
        return sums

    out[...] = jax.lax.fori_loop(0, len(values) // chunk, add, jnp.zeros(out.shape, jnp.float32))


def _scaled_values(chunk: int, group: int, _: Any, x: Any, *refs: Any) -> None:
    values, scale, offset, out = refs if len(refs) == 4 else (*refs[:2], None, refs[2])
    size = chunk // group

    def add(c: Any, sums: Array) -> Array:
        at = pl.ds(pl.multiple_of(c * size, size), size)
        numbers = values[pl.ds(pl.multiple_of(c * chunk, chunk), chunk)].astype(jnp.float32)
        wide = numbers.reshape(size, group, -1) * scale[at].astype(jnp.float32)[:, None]
        if offset is not None:
            wide += offset[at].astype(jnp.float32)[:, None]
        return sums + dot(x[c, 0], wide.reshape(chunk, -1).astype(x.dtype), 1, 0)

    out[...] = jax.lax.fori_loop(0, len(values) // chunk, add, jnp.zeros(out.shape, jnp.float32))
