"""Matrix products on CPUs: x @ W with W in panels, which all cores together read once, at the speed of memory.

XLA packs W anew for every product. That costs more than the product if x has few rows. Here W is stored as the kernel
reads it: panels of a few columns, each [k, columns]. The kernel multiplies a panel with up to `rows` rows of x in
registers. One load of W serves all these rows, so 8 rows take about as long as one. A row is summed in order of k, so
its result does not depend on the number of rows, to the bit.

A float32 matrix whose values are exact in bfloat16, as in most checkpoints, is stored in bfloat16 and widened in
registers. The products are the same, from half the bytes.

With AVX512_BF16, panels of bfloat16 hold two rows of W side by side. One instruction adds both to a sum, which halves
the instructions of float32. It treats subnormal numbers as zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32
from llvmlite import ir

from eagle3_jax.kernels.cpu import compiler, handler
from eagle3_jax.kernels.cpu.handler import Buffer
from eagle3_jax.kernels.cpu.ir import ELEMENTS, F32, I32, I64, POINTER, Code, Value, constant, internal, vector
from eagle3_jax.kernels.linear.layouts import Panels

# (rows, columns) of a block whose sums fit into the vector registers: 32 of 512 bits, or 16 of 256.
_BLOCKS = {True: (8, 32), False: (4, 16)}
_PAIRS = 16  # bfloat16 pairs per instruction
_CHUNKS = 2  # chunks per thread: a delayed thread delays less work, but each chunk begins a stream of memory


def pack(matrix: Float[Array | np.ndarray, "k n"], stored: Any = None) -> Panels:
    """Packs a float32 or bfloat16 matrix into panels of this machine's width, of dtype `stored` if it is known."""
    width = _BLOCKS[compiler.has_wide_vectors()][1]
    group = 2 if matrix.dtype == jnp.bfloat16 and compiler.has_bfloat16_products() else 1
    panels = _panels(matrix, width, group, form_of(matrix) if stored is None else stored)
    return Panels(panels, matrix.shape[1], matrix.dtype)


def form_of(matrix: Float[Array | np.ndarray, "k n"]) -> Any:
    """Chooses the dtype of a matrix's panels."""
    # The first row mostly tells.
    narrow = matrix.dtype == jnp.float32 and bool(_in_bfloat16(matrix[:1])) and bool(_in_bfloat16(matrix))
    return jnp.dtype(jnp.bfloat16) if narrow else matrix.dtype


@jax.jit
def _in_bfloat16(matrix: Float32[Array, "k n"]) -> Bool[Array, ""]:
    """Tells whether bfloat16 holds all numbers."""
    return ((jax.lax.bitcast_convert_type(matrix, jnp.uint32) & 0xFFFF) == 0).all()


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _panels(matrix: Float[Array, "k n"], width: int, group: int, dtype: Any) -> Float[Array, "p groups w group"]:
    rows, columns = matrix.shape
    padded = jnp.pad(matrix.astype(dtype), ((0, -rows % group), (0, -columns % width)))
    return padded.reshape(len(padded) // group, group, -1, width).transpose(2, 0, 3, 1)


def product(x: Float[Array, "m k"], *matrices: Panels) -> Float32[Array, "m n"]:
    """Computes x @ matrix, or of two matrices silu(x @ gate) * (x @ up), in float32, summed in order of k.

    A matrix is cast to x's dtype, float32 or bfloat16.
    """
    panels = [matrix.for_rows(x) for matrix in matrices]
    count, groups, width, group = panels[0].shape
    rows = _BLOCKS[compiler.has_wide_vectors()][0]
    stored = tuple(matrix.dtype.name for matrix in panels)
    name = f"eagle3_jax_product_{x.dtype}_{'_'.join(stored)}_{group}"
    compiler.kernel(name, write_product, rows, width, x.dtype.name, stored, group)
    result = jax.ShapeDtypeStruct((x.shape[0], count * width), jnp.float32)
    padded = jnp.pad(x, ((0, 0), (0, groups * group - x.shape[1])))
    return jax.ffi.ffi_call(name, result)(padded, *panels)[:, : matrices[0].columns]


def write_product(
    module: ir.Module, name: str, rows: int, width: int, dtype: str, stored: Sequence[str], group: int
) -> None:
    """Writes the kernel (x [m, k], panels [p, k / group, w, group]) -> float32 [m, p * w]; a chunk is a few panels.

    Args:
        rows, width: of a block in registers. dtype: dtype of x.
        stored: dtypes of the panels (of `gate` and `up` if there are two): x's, or one that is widened to x's.
        group: rows of the matrix per instruction: 1, or 2 for bfloat16.
    """
    # A pair is read as one number.
    of_rows, *elements = (ELEMENTS[kind] if group == 1 else I32 for kind in (dtype, *stored))
    blocks = {
        (kind, height): _write_block(module, f"{name}.{kind}.rows{height}", height, width, of_rows, kind)
        for kind in dict.fromkeys(elements)
        for height in range(1, rows + 1)
    }

    def plan(code: Code, operands: Sequence[Buffer], results: Sequence[Buffer]) -> tuple[list[Value], Value]:
        x, *panels = operands
        count = panels[0].size(0)
        values = [*(matrix.data for matrix in panels), x.data, results[0].data, count, x.size(0), panels[0].size(1)]
        return values, chunks(code, count)

    def body(code: Code, values: Sequence[Value], chunk: Value) -> None:
        *matrices, x, y, count, m, k = values

        def multiply(index: int, height: int, number: Value, row: Value, out: Value, stride: Value) -> None:
            element = elements[index]
            panel = code.at(matrices[index], code.mul(number, code.mul(k, width)), element)
            of_x = code.at(x, code.mul(row, k), of_rows)
            code.b.call(blocks[element, height], [panel, of_x, out, k, stride])

        write_chunk(code, chunk, count, m, y, (rows, width), multiply, gated=len(stored) > 1)

    handler.write_kernel(module, name, 1 + len(stored), 1, plan, body)


def chunks(code: Code, count: Value) -> Value:
    """Returns the number of chunks that share `count` panels."""
    return code.least(_CHUNKS * compiler.threads(), count)


def write_chunk(
    code: Code,
    chunk: Value,
    count: Value,
    m: Value,
    y: Value,
    block: tuple[int, int],
    multiply: Callable[[int, int, Value, Value, Value, Value], None],
    *,
    gated: bool,
) -> None:
    """Writes a chunk's part of the result y [m, count * width]: its panels, each times all rows.

    Args:
        block: rows and columns of a block in registers. gated: whether the matrices are `gate` and `up`.
        multiply: (which matrix, rows, number of the panel, first row, where the block's result begins, its stride)
            writes one block.
    """
    rows, width = block
    total = chunks(code, count)
    first = code.div(code.mul(chunk, count), total)
    last = code.div(code.mul(code.add(chunk, 1), count), total)
    stride = code.mul(count, width)
    gates = code.variable(F32, count=rows * width)
    with code.loop(first, last) as number:

        def write(height: int, row: Value) -> None:
            of_y = code.at(y, code.add(code.mul(row, stride), code.mul(number, width)), F32)
            multiply(int(gated), height, number, row, of_y, stride)
            if gated:
                multiply(0, height, number, row, gates, code.integer(width))
                for r in range(height):
                    _gate(code, code.at(gates, r * width, F32), code.at(of_y, code.mul(stride, r), F32), width)

        whole = code.mul(code.div(m, rows), rows)
        with code.loop(0, whole, rows) as row:
            write(rows, row)
        for left in range(1, rows):
            with code.when(code.b.icmp_signed("==", code.sub(m, whole), code.integer(left))):
                write(left, whole)


def _write_block(module: ir.Module, name: str, rows: int, width: int, element: ir.Type, stored: ir.Type) -> ir.Function:
    """Writes the function y[r, :] = sum over i of x[r, i] * panel[i, :], with the sums in registers.

    `element` is the type of x, `stored` that of the panel, which is widened to x's; i32 is a pair of bfloat16.
    """
    part = _PAIRS if element == I32 else width  # columns per instruction
    kind = vector(part)
    with internal(module, name, [POINTER] * 3 + [I64, I64]) as code:
        panel, x, y, k, stride = code.function.args
        for argument in (panel, x, y):
            argument.add_attribute("noalias")
        starts = range(0, width, part)
        of_x = [code.at(x, code.mul(k, r), element) for r in range(rows)]
        totals = [[code.variable(kind, constant(0.0, part)) for _ in starts] for _ in range(rows)]

        def load(base: Value, index: Value, count: int, kind: ir.Type) -> Value:
            place = code.at(base, index, kind)
            if kind != I32:
                return code.load_floats(place, count, kind)
            return code.load(place, I32 if count == 1 else ir.VectorType(I32, count), align=4)

        with code.loop(0, k) as i:
            weights = [load(panel, code.add(code.mul(i, width), start), part, stored) for start in starts]
            for row, sums in zip(of_x, totals, strict=True):
                value = code.broadcast(load(row, i, 1, element), part)
                for weight, total in zip(weights, sums, strict=True):
                    add = code.dot_pairs if element == I32 else code.fma
                    code.b.store(add(value, weight, code.load(total, kind)), total)
        for r, sums in enumerate(totals):
            for start, total in zip(starts, sums, strict=True):
                code.b.store(code.load(total, kind), code.at(y, code.add(code.mul(stride, r), start), F32), align=4)
    return code.function


def _gate(code: Code, gate: Value, y: Value, width: int) -> None:
    """Writes y[:] = silu(gate[:]) * y[:]."""
    kind, one = vector(width), constant(1.0, width)
    value = code.load(gate, kind, align=4)
    sigmoid = code.b.fdiv(one, code.b.fadd(one, code.exp(code.b.fneg(value))))
    code.b.store(code.b.fmul(code.b.fmul(value, sigmoid), code.load(y, kind, align=4)), y, align=4)
