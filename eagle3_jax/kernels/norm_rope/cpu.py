"""What lies between the products of a layer, for a CPU: RMSNorm, and RoPE of a fused projection, each in one pass.

XLA makes several loops of each, some of them on one core: with few rows they take longer than the products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float, Float32
from llvmlite import ir

from eagle3_jax.kernels.cpu import compiler, handler
from eagle3_jax.kernels.cpu.handler import Buffer
from eagle3_jax.kernels.cpu.ir import ELEMENTS, F32, Code, Value, constant, vector

WIDTH = 16  # numbers of one step: their count must be a multiple of it
_CHUNKS = 4  # for each thread, see `linear_cpu`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NormWeight:
    """A norm's weight [h] of a model whose norms this kernel computes."""

    values: Any  # Float[Array, " h"], or what a tree of other leaves has in its place

    def __getitem__(self, index: Any) -> NormWeight:
        """As an array's [...]."""
        assert index is Ellipsis
        return self


def rms_norm(x: Float[Array, "m h"], weight: NormWeight, eps: float) -> Float[Array, "m h"]:
    """As `layers.rms_norm`, the squares summed in another order; h is a multiple of `WIDTH`."""
    name = compiler.kernel(f"eagle3_jax_rms_norm_{x.dtype}_{eps}", write_norm, x.dtype.name, eps)
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, weight.values.astype(x.dtype))


def rotated_heads(
    fused: Float[Array, "m out"], cos: Float32[Array, "m half"], sin: Float32[Array, "m half"], kv_heads: int
) -> tuple[Float[Array, "m q"], Float[Array, "m k"], Float[Array, "m k"]]:
    """Queries and keys, rotated, and values of a fused projection (see `layers.Attention`), head by head.

    Half of a head's dimension is a multiple of `WIDTH`.
    """
    m, half = cos.shape
    group = fused.shape[1] // (2 * half * kv_heads) - 2
    name = compiler.kernel(f"eagle3_jax_rotated_heads_{fused.dtype}_{group}", write_heads, fused.dtype.name, group)
    sizes = (kv_heads * group, kv_heads, kv_heads)
    results = [jax.ShapeDtypeStruct((m, 2 * half * size), fused.dtype) for size in sizes]
    q, k, v = jax.ffi.ffi_call(name, results)(fused, cos, sin)
    return q, k, v


def write_norm(module: ir.Module, name: str, dtype: str, eps: float) -> None:
    """The kernel (x [m, h], weight [h]) -> [m, h]; a chunk is a few rows."""
    element, chunks = ELEMENTS[dtype], _CHUNKS * compiler.threads()

    def plan(code: Code, operands: Sequence[Buffer], results: Sequence[Buffer]) -> tuple[list[Value], Value]:
        x, weight = operands
        return [x.data, weight.data, results[0].data, x.size(0), x.size(1)], code.least(chunks, x.size(0))

    def body(code: Code, values: Sequence[Value], chunk: Value) -> None:
        x, weight, y, m, h = values
        with _rows(code, chunk, chunks, m) as row:
            of_x, of_y = (code.at(base, code.mul(row, h), element) for base in (x, y))
            squares = code.variable(vector(WIDTH), constant(0.0, WIDTH))
            with code.loop(0, h, WIDTH) as i:
                part = code.load_floats(code.at(of_x, i, element), WIDTH, element)
                code.b.store(code.fma(part, part, code.load(squares, vector(WIDTH))), squares)
            total = code.total(code.load(squares, vector(WIDTH)))
            mean = code.b.fdiv(total, code.b.uitofp(h, F32))
            root = code.call("llvm.sqrt.f32", F32, code.b.fadd(mean, constant(eps)))
            scale = code.broadcast(code.b.fdiv(constant(1.0), root), WIDTH)
            with code.loop(0, h, WIDTH) as i:
                part = code.load_floats(code.at(of_x, i, element), WIDTH, element)
                place = code.at(of_y, i, element)
                code.store_floats(code.b.fmul(part, scale), place, element)  # in x's dtype, as the product with
                normed = code.load_floats(place, WIDTH, element)  # the weight is
                factor = code.load_floats(code.at(weight, i, element), WIDTH, element)
                code.store_floats(code.b.fmul(normed, factor), place, element)

    handler.write_kernel(module, name, 2, 1, plan, body)


def write_heads(module: ir.Module, name: str, dtype: str, group: int) -> None:
    """The kernel (fused [m, kv * (group + 2) * d], cos, sin [m, d / 2]) -> q, k, v; a chunk is a few rows."""
    element, chunks = ELEMENTS[dtype], _CHUNKS * compiler.threads()

    def plan(code: Code, operands: Sequence[Buffer], results: Sequence[Buffer]) -> tuple[list[Value], Value]:
        fused, cos = operands[:2]
        pointers = [buffer.data for buffer in (*operands, *results)]
        return [*pointers, fused.size(0), fused.size(1), cos.size(1)], code.least(chunks, fused.size(0))

    def body(code: Code, values: Sequence[Value], chunk: Value) -> None:
        fused, cos, sin, q, k, v, m, width, half = values
        d = code.mul(half, 2)
        kv_heads = code.div(width, code.mul(d, group + 2))

        def rotate(source: Value, target: Value, row: Value) -> None:
            with code.loop(0, half, WIDTH) as i:
                other = code.add(i, half)
                first, second = (code.load_floats(code.at(source, j, element), WIDTH, element) for j in (i, other))
                at = code.add(code.mul(row, half), i)
                c, s = (code.load_floats(code.at(table, at, F32), WIDTH, F32) for table in (cos, sin))
                turned = code.b.fsub(code.b.fmul(first, c), code.b.fmul(second, s))
                code.store_floats(turned, code.at(target, i, element), element)
                turned = code.b.fadd(code.b.fmul(second, c), code.b.fmul(first, s))
                code.store_floats(turned, code.at(target, other, element), element)

        with _rows(code, chunk, chunks, m) as row, code.loop(0, kv_heads) as head:
            source = code.add(code.mul(row, width), code.mul(head, code.mul(d, group + 2)))
            number = code.add(code.mul(row, kv_heads), head)  # of this row's KV head among all
            with code.loop(0, group) as j:
                target = code.mul(code.add(code.mul(number, group), j), d)
                from_ = code.at(fused, code.add(source, code.mul(j, d)), element)
                rotate(from_, code.at(q, target, element), row)
            target = code.mul(number, d)
            rotate(code.at(fused, code.add(source, code.mul(d, group)), element), code.at(k, target, element), row)
            values_of = code.at(fused, code.add(source, code.mul(d, group + 1)), element)
            with code.loop(0, d, WIDTH) as i:
                part = code.load_floats(code.at(values_of, i, element), WIDTH, element)
                code.store_floats(part, code.at(code.at(v, target, element), i, element), element)

    handler.write_kernel(module, name, 3, 3, plan, body)


def _rows(code: Code, chunk: Value, chunks: int, m: Value) -> Any:
    """Loop over the rows of a chunk."""
    total = code.least(chunks, m)
    return code.loop(code.div(code.mul(chunk, m), total), code.div(code.mul(code.add(chunk, 1), m), total))
