"""Products with quantised matrices on CPUs: rows of x in 8 bits times panels of 8 or 4 bits, summed in integers.

A token waits for the weights' bytes, so panels keep the bits that the matrix has. A row of x is quantised in groups of
32 numbers, each with the scale absmax / 127. The sum over a group is exact, in integers; the groups are added in order,
in float32. So a row's result does not depend on the number of rows, to the bit.

A panel holds the groups of a few columns one after the other: scales, offsets, then values, four of a column side by
side. One instruction of AVX-512 VNNI or of Arm, or a few of AVX2, add the products of these four to the column's sum. A
byte of 4-bit panels holds the values i and i + 16 of its group. The halves of a group of 8-bit values may have scales
of their own, as in GGUF's Q6_K.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32
from llvmlite import ir

from eagle3_jax.kernels.cpu import compiler, handler
from eagle3_jax.kernels.cpu.handler import Buffer
from eagle3_jax.kernels.cpu.ir import ELEMENTS, F16, F32, I8, I16, I32, I64, POINTER, Code, Value, internal, vector
from eagle3_jax.kernels.linear.cpu import chunks, write_chunk
from eagle3_jax.kernels.linear.layouts import PanelForm, Quantised, QuantisedPanels

GROUP = 32  # numbers of a row that share a scale
_HALF = GROUP // 2
_VALUES = {"int8": (8, 0), "int4": (4, 8), "uint4": (4, 0)}  # bits of values, and the stored value that is 0
_STEP = 4  # values of a column side by side
_STEPS = GROUP // _STEP
_SMALL, _AHEAD = 2, 4  # rows; groups that are read ahead of the one in work
_ROUND = 1.5 * 2**23  # added to a float32 below 2^22, it leaves the nearest integer in the low bits


class Dots(NamedTuple):
    """How four products of bytes are added to a sum; columns of a register; rows and columns of a block."""

    kind: str
    lanes: int
    rows: int
    width: int


VNNI, AVX2, SDOT, ANY = Dots("vnni", 16, 8, 32), Dots("avx2", 8, 4, 16), Dots("sdot", 4, 4, 16), Dots("any", 4, 4, 16)


def dots() -> Dots:
    """Chooses this machine's instructions."""
    if compiler.has_wide_vectors() and compiler.has_features("avx512vnni"):
        return VNNI
    if compiler.has_features("avx2", "f16c"):
        return AVX2
    return SDOT if compiler.has_features("dotprod") else ANY


def multiplies(matrix: Quantised) -> bool:
    """Tells whether the kernel multiplies a matrix.

    It has integers, and scales for whole columns, for multiples of 32 rows or, of 8 bits, for 16 rows.
    """
    values, groups = matrix.values, matrix.scale.shape[0]
    if values.ndim != 2 or values.dtype.name not in _VALUES:
        return False
    rows, whole = values.shape[0], groups == 1 and matrix.offset is None
    halves = values.dtype == jnp.int8 and rows == groups * _HALF and groups % 2 == 0
    return whole or halves or rows % (groups * GROUP) == 0


def form_of(matrix: Quantised) -> PanelForm:
    """Chooses the form of a matrix's panels."""
    scales, (bits, zero) = _scales(matrix), _VALUES[matrix.values.dtype.name]
    by_group = len(scales[0]) > 1 or len(scales) > 1
    group = (_HALF if len(scales[0]) > -(-matrix.shape[0] // GROUP) else GROUP) if by_group else 0
    in_float16 = by_group and all(_halved(x, scales[0]) for x in scales)
    return PanelForm(bits, zero * (len(scales) == 1), "float16" if in_float16 else "float32", len(scales), group)


def _scales(matrix: Quantised) -> list[np.ndarray]:
    """Returns the scales, and offsets if there are some: of the stored value 0, as in GGUF."""
    scale, (_, zero) = np.asarray(matrix.scale, np.float32), _VALUES[matrix.values.dtype.name]
    return [scale] if matrix.offset is None else [scale, np.asarray(matrix.offset, np.float32) - zero * scale]


def pack(matrix: Quantised, form: PanelForm | None = None) -> QuantisedPanels:
    """Packs a matrix [k, n] of 8 or 4 bits, see `multiplies`; `form` is that of one with more columns."""
    form, width = form or form_of(matrix), dots().width
    (k, columns), scales = matrix.shape, _scales(matrix)
    values = np.asarray(matrix.values).astype(np.int8) + np.int8(_VALUES[matrix.values.dtype.name][1])
    bits, group, groups = form.bits, form.group, -(-k // GROUP)

    def panels(x: np.ndarray, rows: int) -> np.ndarray:
        """Pads to [rows, p * width] and returns [p, rows, width]."""
        x = np.pad(x, ((0, rows - len(x)), (0, -columns % width)))
        return x.reshape(rows, -1, width).swapaxes(0, 1)

    stored = panels(values, groups * GROUP)
    if bits == 4:
        stored = stored.reshape(-1, groups, 2, GROUP // 2, width)
        stored = stored[:, :, 0] | stored[:, :, 1] << 4
    stored = stored.reshape(-1, groups, GROUP * bits // 8 // _STEP, _STEP, width).swapaxes(3, 4)
    rows = groups * GROUP // group if group else 1
    head = np.stack([panels(np.repeat(x, rows // len(x), axis=0), rows) for x in scales], axis=2).astype(form.scale)
    heads = groups if group else 1
    parts = [part.reshape(len(part), heads, -1).view(np.uint8) for part in (head, np.ascontiguousarray(stored))]
    laid = np.concatenate(parts, axis=-1)
    return QuantisedPanels(jnp.asarray(laid.reshape(len(laid), -1)), columns, matrix.dtype, form)


def _halved(x: np.ndarray, scale: np.ndarray) -> bool:
    """Tells whether float16 keeps scales or offsets to 11 bits, as those of most matrices, and GGUF's to the bit."""
    with np.errstate(over="ignore"):
        lost = np.abs(x - x.astype(np.float16))
    return bool((lost <= 2.0**-11 * np.maximum(np.abs(x), np.abs(scale))).all())


def product(x: Float[Array, "m k"], *matrices: QuantisedPanels) -> Float32[Array, "m n"]:
    """Computes as `cpu.product` does, with x quantised in groups of 32 numbers of a row."""
    ways, forms = dots(), tuple(matrix.form for matrix in matrices)
    named = "_".join("".join(map(str, form)) for form in forms)
    name = f"eagle3_jax_quantised_product_{ways.kind}_{x.dtype}_{named}"
    compiler.kernel(name, write_product, ways, x.dtype.name, forms)
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % GROUP)))
    m, groups = x.shape[0], x.shape[1] // GROUP
    results = (
        jax.ShapeDtypeStruct((m, matrices[0].panels.shape[0] * ways.width), jnp.float32),
        jax.ShapeDtypeStruct((m, groups * GROUP), jnp.int8),
        jax.ShapeDtypeStruct((m, groups), jnp.float32),
        jax.ShapeDtypeStruct((m, groups, _sums_of_group(forms)), jnp.int32),
    )
    return jax.ffi.ffi_call(name, results)(x, *(matrix.panels for matrix in matrices))[0][:, : matrices[0].columns]


def _sums_of_group(forms: Sequence[PanelForm]) -> int:
    """Counts the sums of x that are kept of a group: of its halves where these have scales of their own."""
    return max(GROUP // (form.group or GROUP) for form in forms)


def write_product(module: ir.Module, name: str, ways: Dots, dtype: str, forms: Sequence[PanelForm]) -> None:
    """Writes the kernel (x [m, k], panels [p, bytes]) -> float32 [m, p * width], and x quantised.

    x quantised is int8 [m, k], float32 scales [m, k / 32] and int32 sums [m, k / 32, `_sums_of_group`] of the int8.
    `gate` and `up` have a form of panels each.
    """
    kept = _sums_of_group(forms)
    blocks = {
        (form, height): _write_block(module, f"{name}.{i}.rows{height}", height, form, ways, kept)
        for i, form in enumerate(dict.fromkeys(forms))
        for height in range(1, ways.rows + 1)
    }

    def plan(code: Code, operands: Sequence[Buffer], results: Sequence[Buffer]) -> tuple[list[Value], Value]:
        x, *panels = operands
        y, *rounded = (result.data for result in results)
        count, m, groups = panels[0].size(0), x.size(0), results[2].size(1)
        _write_rounding(code, x.data, ELEMENTS[dtype], rounded, code.mul(m, groups), kept)
        return [*(matrix.data for matrix in panels), *rounded, y, count, m, groups], chunks(code, count)

    def body(code: Code, values: Sequence[Value], chunk: Value) -> None:
        *matrices, q, scales, sums, y, count, m, groups = values

        def multiply(index: int, height: int, number: Value, row: Value, out: Value, stride: Value) -> None:
            form, at = forms[index], code.mul(row, groups)
            size = code.add(code.mul(groups, form.bytes_of_group(ways.width)), form.bytes_of_head(ways.width))
            panel = code.at(matrices[index], code.mul(number, size), I8)
            of_x = [
                code.at(q, code.mul(at, GROUP), I8),
                code.at(scales, at, F32),
                code.at(sums, code.mul(at, kept), I32),
            ]
            code.b.call(blocks[form, height], [panel, *of_x, out, groups, stride])

        write_chunk(code, chunk, count, m, y, (ways.rows, ways.width), multiply, gated=len(forms) > 1)

    handler.write_kernel(module, name, 1 + len(forms), 4, plan, body)


def _write_rounding(code: Code, x: Value, element: ir.Type, rounded: Sequence[Value], count: Value, kept: int) -> None:
    """Writes x's groups as int8, their scales and their sums; NaN and infinity make the scale so."""
    q, scales, sums = rounded
    kind, whole = vector(GROUP), ir.VectorType(I32, GROUP)
    with code.loop(0, count) as group:
        at = code.mul(group, GROUP)
        value = code.load_floats(code.at(x, at, element), GROUP, element)
        size = code.call(f"llvm.fabs.v{GROUP}f32", kind, value)
        most = code.call(f"llvm.vector.reduce.fmaximum.v{GROUP}f32", F32, size)
        code.b.store(code.b.fmul(most, ir.Constant(F32, 1 / 127)), code.at(scales, group, F32))
        some = code.b.fcmp_ordered(">", most, ir.Constant(F32, 0.0))
        inverse = code.b.select(some, code.b.fdiv(ir.Constant(F32, 127.0), most), ir.Constant(F32, 0.0))
        shifted = code.fma(value, code.broadcast(inverse, GROUP), ir.Constant(kind, [_ROUND] * GROUP))
        bits = code.b.trunc(code.b.bitcast(shifted, whole), ir.VectorType(I8, GROUP))
        code.b.store(bits, code.at(q, at, I8), align=1)
        wide = code.b.sext(bits, whole)
        size = GROUP // kept
        for i in range(kept):
            part = ir.Constant(ir.VectorType(I32, size), list(range(i * size, (i + 1) * size)))
            total = code.call(f"llvm.vector.reduce.add.v{size}i32", I32, code.b.shuffle_vector(wide, wide, part))
            code.b.store(total, code.at(sums, code.add(code.mul(group, kept), i), I32))


def _write_block(module: ir.Module, name: str, rows: int, form: PanelForm, ways: Dots, kept: int) -> ir.Function:
    """Writes the function y[r, :] = sum over groups of scale of x * (scale * sum of values * x + offset * sum of x)."""
    with internal(module, name, [POINTER] * 5 + [I64, I64]) as code:
        panel, q, scales, sums, y, groups, stride = code.function.args
        for argument in code.function.args[:5]:
            argument.add_attribute("noalias")
        lanes, width, kind = ways.lanes, ways.width, vector(ways.lanes)
        starts = range(0, width, lanes)
        multiplier = _Multiplier(code, form.bits, ways)
        zero = form.zero + multiplier.zero
        totals = [[code.variable(kind, ir.Constant(kind, [0.0] * lanes)) for _ in starts] for _ in range(rows)]
        half = form.scale == "float16"

        def load_scales(place: Value, which: int, start: int) -> Value:
            at = which * width + start
            if half:
                return code.b.fpext(code.load(code.at(place, at, F16), ir.VectorType(F16, lanes), align=2), kind)
            return code.load(code.at(place, at, F32), kind, align=4)

        def multiply(values: Value, of_x: list[Value], steps: range) -> list[list[Value]]:
            """Sums the products of some steps of a group, for each row and register of columns."""
            counts: list[list[Value]] = [[None for _ in starts] for _ in range(rows)]
            for step in steps:
                loaded = [
                    code.load(code.at(values, (step * width + start) * _STEP, I8), ir.VectorType(I32, lanes), align=4)
                    for start in starts
                ]
                # 4 bits: the lower halves are this step's values, the upper ones those of the step 16 values on.
                for later, weights in enumerate(multiplier.unpacked(loaded)):
                    place = (step + later * _STEPS // 2) * _STEP
                    for r in range(rows):
                        x = code.broadcast(code.load(code.at(of_x[r], place, I8), I32, align=4), lanes)
                        counts[r] = [multiplier.add(c, w, x) for c, w in zip(counts[r], weights, strict=True)]
            return [[multiplier.sums(count) for count in row] for row in counts]

        with code.loop(0, groups) as group:
            here = code.add(form.bytes_of_head(width), code.mul(group, form.bytes_of_group(width)))
            block = code.at(panel, here, I8)
            values = code.at(block, form.bytes_of_scales(width) if form.group else 0, I8)
            if rows > _SMALL:  # with fewer rows the processor itself reads far enough ahead
                for line in range(0, form.bytes_of_group(width), 64):
                    code.prefetch(code.at(block, line + _AHEAD * form.bytes_of_group(width), I8))
            of_row = [code.add(code.mul(groups, r), group) for r in range(rows)]
            of_x = [code.at(q, code.mul(at, GROUP), I8) for at in of_row]
            steps, shares = _STEPS * form.bits // 8, GROUP // form.group if form.group else 1
            for share in range(shares):
                counts = multiply(values, of_x, range(share * steps // shares, (share + 1) * steps // shares))
                for r, at in enumerate(of_row):
                    scale = code.load(code.at(scales, at, F32), F32)
                    parts_of_x = range(share * kept // shares, (share + 1) * kept // shares)
                    sums_of_x = [
                        code.load(code.at(sums, code.add(code.mul(at, kept), i), I32), I32) for i in parts_of_x
                    ]
                    total_of_x = functools.reduce(code.b.add, sums_of_x)
                    scale_of_x = code.broadcast(scale, lanes)
                    for start, count, total in zip(starts, counts[r], totals[r], strict=True):
                        if zero:
                            surplus = code.broadcast(code.b.mul(total_of_x, ir.Constant(I32, zero)), lanes)
                            count = code.b.sub(count, surplus)
                        first = share * form.parts
                        factor = code.b.fmul(load_scales(block, first, start), scale_of_x) if form.group else scale_of_x
                        value = code.fma(code.b.sitofp(count, kind), factor, code.load(total, kind))
                        if form.parts > 1:
                            sum_of_x = code.b.fmul(scale, code.b.sitofp(total_of_x, F32))
                            value = code.fma(
                                load_scales(block, first + 1, start), code.broadcast(sum_of_x, lanes), value
                            )
                        code.b.store(value, total)
        for r in range(rows):
            for start, total in zip(starts, totals[r], strict=True):
                value = code.load(total, kind)
                if not form.group:
                    value = code.b.fmul(value, load_scales(panel, 0, start))
                code.b.store(value, code.at(y, code.add(code.mul(stride, r), start), F32), align=4)
    return code.function


class _Multiplier:
    """Adds products of four bytes to sums, with one machine's instructions. Registers hold i32, four bytes each.

    `zero` is added to the values before they are multiplied.
    """

    def __init__(self, code: Code, bits: int, ways: Dots) -> None:
        self._code, self._bits, self._kind = code, bits, ways.kind
        self._lanes = ways.lanes
        self.zero = 128 if (ways.kind, bits) == ("vnni", 8) else 0

    def unpacked(self, loaded: Sequence[Value]) -> list[list[Value]]:
        """Returns the operands of one step, or of two for 4 bits."""
        b, low = self._code.b, self._all(0x0F0F0F0F)
        if self._bits == 4:
            return [[b.and_(x, low) for x in loaded], [b.and_(b.lshr(x, self._all(4)), low) for x in loaded]]
        if self.zero:  # unsigned for the instruction
            return [[b.xor(x, self._all(-0x7F7F7F80)) for x in loaded]]
        return [list(loaded)]

    def add(self, total: Value, weights: Value, x: Value) -> Value:
        """Adds the products; `total` None is zero."""
        code, kind = self._code, self._kind
        if kind == "avx2":
            return self._add_avx2(total, weights, x)
        before = self._all(0) if total is None else total
        if kind == "vnni":
            return code.call("llvm.x86.avx512.vpdpbusd.512", before.type, before, weights, x)  # unsigned * signed
        if kind == "sdot":
            of = ir.VectorType(I8, 16)
            name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
            return code.call(name, before.type, before, code.b.bitcast(weights, of), code.b.bitcast(x, of))
        for byte in range(_STEP):
            before = code.b.add(before, code.b.mul(self._byte(weights, byte), self._byte(x, byte)))
        return before

    def sums(self, total: Value) -> Value:
        """Returns the sums as i32."""
        if self._kind == "avx2" and self._bits == 4:
            return self._pairs(total)
        return total

    def _add_avx2(self, total: Value, weights: Value, x: Value) -> Value:
        code, bytes_ = self._code, ir.VectorType(I8, 4 * self._lanes)
        weights, x = (code.b.bitcast(value, bytes_) for value in (weights, x))
        if self._bits == 8:  # unsigned * signed: the sign goes to x; 2 * 128 * 127 fits into 16 bits
            x = code.call("llvm.x86.avx2.psign.b", bytes_, x, weights)
            weights = code.call(f"llvm.abs.v{bytes_.count}i8", bytes_, weights, ir.Constant(ir.IntType(1), 0))
        halves = ir.VectorType(I16, 2 * self._lanes)
        pairs = code.call("llvm.x86.avx2.pmadd.ub.sw", halves, weights, x)
        # 16 products of 15 * 127 fit into 16 bits: a group of 4 bits is summed there.
        added = pairs if self._bits == 4 else self._pairs(pairs)
        return added if total is None else code.b.add(total, added)

    def _pairs(self, values: Value) -> Value:
        one = ir.Constant(values.type, [1] * values.type.count)
        return self._code.call("llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, self._lanes), values, one)

    def _byte(self, x: Value, byte: int) -> Value:
        return self._code.b.ashr(self._code.b.shl(x, self._all(24 - 8 * byte)), self._all(24))

    def _all(self, number: int) -> Value:
        return ir.Constant(ir.VectorType(I32, self._lanes), [number] * self._lanes)
