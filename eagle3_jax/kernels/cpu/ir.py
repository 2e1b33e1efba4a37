"""Python functions that write LLVM IR for CPU kernels.

`Code` writes the body of one function: arithmetic on i64 and float vectors, loads and stores of float32 and bfloat16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llvmlite import ir

Value = Any  # an IR value; llvmlite has no type annotations

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32, POINTER, VOID = ir.HalfType(), ir.FloatType(), ir.PointerType(), ir.VoidType()
ELEMENTS = {"float32": F32, "bfloat16": I16}


def vector(width: int) -> ir.VectorType:
    return ir.VectorType(F32, width)


def constant(value: float, width: int | None = None) -> Value:
    """Returns a float constant, or a vector of it."""
    return ir.Constant(F32, value) if width is None else ir.Constant(vector(width), [value] * width)


def _of_integers(name: str) -> Any:
    return lambda code, a, b: getattr(code.b, name)(code.integer(a), code.integer(b))


class Code:
    """Writes the body of one function."""

    def __init__(self, function: ir.Function) -> None:
        self.function = function
        self.entry = ir.IRBuilder(function.append_basic_block("entry"))
        start = function.append_basic_block("start")
        self.b: Any = ir.IRBuilder(start)
        self._start = start

    def finish(self) -> None:
        self.entry.branch(self._start)

    @staticmethod
    def integer(value: int | Value) -> Value:
        return ir.Constant(I64, value) if isinstance(value, int) else value

    add, sub, mul, div, rem = map(_of_integers, ("add", "sub", "mul", "udiv", "urem"))

    def less(self, a: Any, b: Any) -> Value:
        return self.b.icmp_signed("<", self.integer(a), self.integer(b))

    def most(self, a: Any, b: Any) -> Value:
        a, b = self.integer(a), self.integer(b)
        return self.b.select(self.b.icmp_signed(">", a, b), a, b)

    def least(self, a: Any, b: Any) -> Value:
        a, b = self.integer(a), self.integer(b)
        return self.b.select(self.b.icmp_signed("<", a, b), a, b)

    def clipped(self, index: Value, size: Value) -> Value:
        return self.most(0, self.least(index, self.sub(size, 1)))

    def variable(self, kind: ir.Type, value: Value | None = None, count: int = 1) -> Value:
        """Allocates stack memory; LLVM keeps a single value in a register."""
        place: Any = self.entry.alloca(kind, count)
        place.align, place.type = 64, POINTER
        if value is not None:
            self.b.store(value, place)
        return place

    def at(self, base: Value, index: Any, kind: ir.Type) -> Value:
        """Returns a pointer to base[index]."""
        return self.b.gep(base, [self.integer(index)], source_etype=kind)

    def load(self, place: Value, kind: ir.Type, align: int | None = None) -> Value:
        return self.b.load(place, typ=kind, align=align)

    def field(self, base: Value, offset: int, kind: ir.Type = POINTER) -> Value:
        """Loads the value at base + offset bytes."""
        return self.load(self.at(base, offset, I8), kind)

    def index(self, numbers: Value, at: Value) -> Value:
        """Loads numbers[at], an int32."""
        return self.b.sext(self.load(self.at(numbers, at, I32), I32), I64)

    def flag(self, flags: Value, at: Value) -> Value:
        """Loads flags[at], a bool."""
        return self.b.icmp_unsigned("!=", self.load(self.at(flags, at, I8), I8), ir.Constant(I8, 0))

    def copy(self, to: Value, source: Value, size: int) -> None:
        """Copies so many bytes."""
        self.call("llvm.memcpy.p0.p0.i64", VOID, to, source, self.integer(size), ir.Constant(I1, 0))

    def broadcast(self, value: Value, width: int) -> Value:
        kind = ir.VectorType(value.type, width)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
        return self.b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(I32, width), None))

    def call(self, name: str, kind: ir.Type, *arguments: Value) -> Value:
        """Calls an intrinsic or an external function."""
        module = self.function.module
        found = module.globals.get(name)
        if found is None:
            found = ir.Function(module, ir.FunctionType(kind, [a.type for a in arguments]), name)
        return self.b.call(found, arguments)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        kind = a.type
        suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
        return self.call(f"llvm.fma.{suffix}", kind, a, b, c)

    def dot_pairs(self, a: Value, b: Value, c: Value) -> Value:
        """Returns c + a[0] * b[0] + a[1] * b[1] for vectors of bfloat16 pairs, each an i32.

        Needs `compiler.has_bfloat16_products`.
        """
        kind = c.type
        step = ir.InlineAsm(ir.FunctionType(kind, [kind, a.type, b.type]), "vdpbf16ps $3, $2, $0", "=v,0,v,v")
        return self.b.call(step, [c, a, b])

    def load_floats(self, place: Value, width: int, element: ir.Type) -> Value:
        """Loads a vector of floats, or one float where width is 1; bfloat16 is the upper half of a float32."""
        single, half, whole = (kind if width == 1 else ir.VectorType(kind, width) for kind in (F32, I16, I32))
        if element == F32:
            return self.load(place, single, align=4)
        sixteen = ir.Constant(I32, 16) if width == 1 else ir.Constant(whole, [16] * width)
        bits = self.b.shl(self.b.zext(self.load(place, half, align=2), whole), sixteen)
        return self.b.bitcast(bits, single)

    def store_floats(self, value: Value, place: Value, element: ir.Type) -> None:
        """Stores a vector of floats; bfloat16 is rounded to the nearest, ties to even."""
        if element == F32:
            self.b.store(value, place, align=4)
            return
        width = value.type.count
        whole, half = (ir.VectorType(kind, width) for kind in (I32, I16))
        bits = self.b.bitcast(value, whole)

        def all_(number: int) -> Value:
            return ir.Constant(whole, [number] * width)

        odd = self.b.and_(self.b.lshr(bits, all_(16)), all_(1))
        rounded = self.b.lshr(self.b.add(self.b.add(bits, all_(0x7FFF)), odd), all_(16))
        self.b.store(self.b.trunc(rounded, half), place, align=2)

    def exp(self, x: Value) -> Value:
        """Returns e^x to 2 units in the last place (Cephes' expf), x clipped to [-87, 88]; NaN stays NaN."""
        given, width = x, x.type.count
        kind, whole = x.type, ir.VectorType(I32, width)

        def all_(number: float) -> Value:
            return ir.Constant(kind, [number] * width)

        x = self.call(f"llvm.maxnum.v{width}f32", kind, x, all_(-87.0))
        x = self.call(f"llvm.minnum.v{width}f32", kind, x, all_(88.0))
        n = self.call(f"llvm.rint.v{width}f32", kind, self.b.fmul(x, all_(1.44269504088896341)))
        r = self.fma(n, all_(-0.693359375), x)
        r = self.fma(n, all_(2.12194440e-4), r)
        value = all_(1.9875691500e-4)
        for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            value = self.fma(value, r, all_(factor))
        value = self.b.fadd(self.fma(value, self.b.fmul(r, r), r), all_(1.0))
        exponent = self.b.shl(self.b.fptosi(n, whole), ir.Constant(whole, [23] * width))
        value = self.b.bitcast(self.b.add(self.b.bitcast(value, whole), exponent), kind)
        return self.b.select(self.b.fcmp_unordered("uno", given, given), given, value)

    def prefetch(self, place: Value) -> None:
        """Asks for a cache line."""
        self.call("llvm.prefetch.p0", VOID, place, *(ir.Constant(I32, x) for x in (0, 3, 1)))

    def pair_sums(self, a: Value, b: Value) -> Value:
        """Sums neighbours: those of `a` fill the lower half, those of `b` the upper one."""
        index = ir.VectorType(I32, a.type.count)
        evens, odds = (ir.Constant(index, list(range(start, 2 * a.type.count, 2))) for start in (0, 1))
        return self.b.fadd(self.b.shuffle_vector(a, b, evens), self.b.shuffle_vector(a, b, odds))

    def total(self, x: Value) -> Value:
        """Sums a vector's elements, by halves."""
        return self._halves(x, self.b.fadd)

    def greatest(self, x: Value) -> Value:
        return self._halves(x, lambda a, b: self.call(f"llvm.maxnum.v{a.type.count}f32", a.type, a, b))

    def _halves(self, x: Value, join: Callable[[Value, Value], Value]) -> Value:
        while x.type.count > 1:
            half = x.type.count // 2
            undefined = ir.Constant(x.type, ir.Undefined)
            low, high = (
                self.b.shuffle_vector(
                    x, undefined, ir.Constant(ir.VectorType(I32, half), list(range(start, start + half)))
                )
                for start in (0, half)
            )
            x = join(low, high)
        return self.b.extract_element(x, ir.Constant(I32, 0))

    @contextlib.contextmanager
    def loop(self, start: Any, stop: Any, step: int = 1) -> Iterator[Value]:
        """Writes `for i in range(start, stop, step)`."""
        place = self.variable(I64, self.integer(start))
        head, body, end = (self.function.append_basic_block(name) for name in ("head", "body", "end"))
        self.b.branch(head)
        self.b.position_at_end(head)
        i = self.load(place, I64)
        self.b.cbranch(self.less(i, stop), body, end)
        self.b.position_at_end(body)
        yield i
        self.b.store(self.add(i, step), place)
        self.b.branch(head)
        self.b.position_at_end(end)

    def when(self, condition: Value) -> contextlib.AbstractContextManager[Any]:
        return self.b.if_then(condition)


def define(module: ir.Module, name: str, kinds: Sequence[ir.Type], result: ir.Type = VOID) -> Code:
    """Adds a function to the module; the caller writes its body."""
    return Code(ir.Function(module, ir.FunctionType(result, kinds), name))


@contextlib.contextmanager
def internal(module: ir.Module, name: str, kinds: Sequence[ir.Type]) -> Iterator[Code]:
    """Adds a function that the module alone calls, without a result; the block writes its body."""
    code = define(module, name, kinds)
    code.function.linkage = "internal"
    yield code
    code.b.ret_void()
    code.finish()
