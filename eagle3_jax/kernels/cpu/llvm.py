"""Kernels for CPUs: LLVM IR written by a few Python functions, compiled for the machine at hand, called by XLA.

A kernel is a handler of XLA's foreign function interface (https://docs.jax.dev/en/latest/ffi.html) that divides its
work into chunks and runs them on XLA's own threads: whoever is free takes the next chunk, so that a call never waits
for a thread that has not begun. Offsets are those of the structures in xla/ffi/api/c_api.h, version 0.3.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import llvmlite.binding as llvm
from llvmlite import ir

Value = Any  # of an IR function; llvmlite tells a type checker nothing of it

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32, POINTER, VOID = ir.FloatType(), ir.PointerType(), ir.VoidType()
ELEMENTS = {"float32": F32, "bfloat16": I16}

# Offsets in XLA_FFI_CallFrame, XLA_FFI_Args and _Rets, XLA_FFI_Buffer, XLA_FFI_Metadata, XLA_FFI_Api.
_FRAME = {"extension": 8, "api": 16, "context": 24, "arguments": 72, "results": 112}
_BUFFER = {"data": 24, "dimensions": 40}
_METADATA = {"pointer": 24, "major": 24, "minor": 28, "traits": 32}
_SCHEDULE = 136


def vector(width: int) -> ir.VectorType:
    return ir.VectorType(F32, width)


def number(value: float, width: int | None = None) -> Value:
    """A float, or a vector of it."""
    return ir.Constant(F32, value) if width is None else ir.Constant(vector(width), [value] * width)


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
    def int(value: int | Value) -> Value:
        return ir.Constant(I64, value) if isinstance(value, int) else value

    def add(self, a: Any, b: Any) -> Value:
        return self.b.add(self.int(a), self.int(b))

    def sub(self, a: Any, b: Any) -> Value:
        return self.b.sub(self.int(a), self.int(b))

    def mul(self, a: Any, b: Any) -> Value:
        return self.b.mul(self.int(a), self.int(b))

    def div(self, a: Any, b: Any) -> Value:
        return self.b.udiv(self.int(a), self.int(b))

    def rem(self, a: Any, b: Any) -> Value:
        return self.b.urem(self.int(a), self.int(b))

    def less(self, a: Any, b: Any) -> Value:
        return self.b.icmp_signed("<", self.int(a), self.int(b))

    def most(self, a: Any, b: Any) -> Value:
        a, b = self.int(a), self.int(b)
        return self.b.select(self.b.icmp_signed(">", a, b), a, b)

    def least(self, a: Any, b: Any) -> Value:
        a, b = self.int(a), self.int(b)
        return self.b.select(self.b.icmp_signed("<", a, b), a, b)

    def variable(self, kind: ir.Type, value: Value | None = None, count: int = 1) -> Value:
        """Room on the stack; LLVM keeps a single value in a register."""
        place: Any = self.entry.alloca(kind, count)
        place.align, place.type = 64, POINTER
        if value is not None:
            self.b.store(value, place)
        return place

    def at(self, base: Value, index: Any, kind: ir.Type) -> Value:
        """Pointer to base[index]."""
        return self.b.gep(base, [self.int(index)], source_etype=kind)

    def load(self, place: Value, kind: ir.Type, align: int | None = None) -> Value:
        return self.b.load(place, typ=kind, align=align)

    def field(self, base: Value, offset: int, kind: ir.Type = POINTER) -> Value:
        """What stands at base + offset bytes."""
        return self.load(self.at(base, offset, I8), kind)

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
        """c + a[0] * b[0] + a[1] * b[1] of vectors of pairs of bfloat16, each an i32; see `has_bfloat16_products`."""
        kind = c.type
        step = ir.InlineAsm(ir.FunctionType(kind, [kind, a.type, b.type]), "vdpbf16ps $3, $2, $0", "=v,0,v,v")
        return self.b.call(step, [c, a, b])

    def load_floats(self, place: Value, width: int, element: ir.Type) -> Value:
        """A vector of floats, or one where width is 1; bfloat16 are the upper halves of them."""
        single, half, whole = (kind if width == 1 else ir.VectorType(kind, width) for kind in (F32, I16, I32))
        if element == F32:
            return self.load(place, single, align=4)
        sixteen = ir.Constant(I32, 16) if width == 1 else ir.Constant(whole, [16] * width)
        bits = self.b.shl(self.b.zext(self.load(place, half, align=2), whole), sixteen)
        return self.b.bitcast(bits, single)

    def store_floats(self, value: Value, place: Value, element: ir.Type) -> None:
        """Stores a vector of floats, as bfloat16 rounded to the nearest even."""
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
        """e^x of a vector for x in [-87, 88], and of these ends beyond, to 2 units in the last place (Cephes' expf).

        Of NaN it is NaN.
        """
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

    def total(self, x: Value) -> Value:
        """Sum of a vector's elements, in halves."""
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
        """for i in range(start, stop, step)"""
        place = self.variable(I64, self.int(start))
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

    @contextlib.contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        with self.b.if_then(condition):
            yield


def define(module: ir.Module, name: str, kinds: Sequence[ir.Type], result: ir.Type = VOID) -> Code:
    """A function of the module, to be written."""
    function = ir.Function(module, ir.FunctionType(result, kinds), name)
    return Code(function)


class Buffer:
    """An operand or a result of the call: its data, and its dimensions."""

    def __init__(self, code: Code, buffer: Value) -> None:
        self._code, self._dimensions = code, code.field(buffer, _BUFFER["dimensions"])
        self.data = code.field(buffer, _BUFFER["data"])

    def size(self, axis: int) -> Value:
        return self._code.load(self._code.at(self._dimensions, axis, I64), I64)


# (code, operands, results) -> what the body needs to know (pointers and i64), and the number of chunks.
Plan = Callable[[Code, Sequence[Buffer], Sequence[Buffer]], tuple[Sequence[Value], Value]]
# (code, what the plan gave, number of the chunk)
Body = Callable[[Code, Sequence[Value], Value], None]

# Fields of a job, i64 or pointer: the next chunk, chunks done, chunks, threads that know of it, what the body needs.
_NEXT, _DONE, _TOTAL, _HOLDERS, _VALUES, _JOB = 0, 8, 16, 24, 32, 40


def write_kernel(module: ir.Module, name: str, operands: int, results: int, plan: Plan, body: Body) -> None:
    """Writes the handler `name`: plans the call, and has XLA's threads run the chunks.

    The job lives on the heap: a thread may come to it when the call is over, and finds no chunk left. Whoever lets go
    of it last frees it.
    """
    kinds: list[ir.Type] = []
    handler = define(module, name, [POINTER], POINTER)
    code, frame = handler, handler.function.args[0]
    with code.when(code.b.icmp_unsigned("!=", code.field(frame, _FRAME["extension"]), POINTER(None))):
        about = code.field(code.field(frame, _FRAME["extension"]), _METADATA["pointer"])
        for field, value in (("major", 0), ("minor", 3), ("traits", 0)):
            code.b.store(ir.Constant(I32, value), code.at(about, _METADATA[field], I8))
        code.b.ret(POINTER(None))
    arguments, answers = code.field(frame, _FRAME["arguments"]), code.field(frame, _FRAME["results"])
    values, total = plan(
        code,
        [Buffer(code, code.field(arguments, 8 * i)) for i in range(operands)],
        [Buffer(code, code.field(answers, 8 * i)) for i in range(results)],
    )
    kinds = [value.type for value in values]
    known = code.variable(I64, count=len(values))
    for i, value in enumerate(values):
        code.b.store(value, code.at(known, i, I64))

    run = define(module, f"{name}.chunk", [POINTER, I64])
    run.function.linkage = "internal"
    body(
        run,
        [run.load(run.at(run.function.args[0], i, I64), kind) for i, kind in enumerate(kinds)],
        run.function.args[1],
    )
    run.b.ret_void()
    run.finish()

    work = define(module, f"{name}.work", [POINTER])
    work.function.linkage = "internal"
    job = work.function.args[0]
    head, do, end = (work.function.append_basic_block(part) for part in ("head", "do", "end"))
    work.b.branch(head)
    work.b.position_at_end(head)
    chunk = work.b.atomic_rmw("add", work.at(job, _NEXT, I8), work.int(1), "acquire")
    work.b.cbranch(work.less(chunk, work.field(job, _TOTAL, I64)), do, end)
    work.b.position_at_end(do)
    work.b.call(run.function, [work.field(job, _VALUES), chunk])
    work.b.atomic_rmw("add", work.at(job, _DONE, I8), work.int(1), "release")
    work.b.branch(head)
    work.b.position_at_end(end)
    work.b.ret_void()
    work.finish()

    let_go = define(module, f"{name}.let_go", [POINTER])
    let_go.function.linkage = "internal"
    job = let_go.function.args[0]
    holders = let_go.b.atomic_rmw("sub", let_go.at(job, _HOLDERS, I8), let_go.int(1), "acq_rel")
    with let_go.when(let_go.b.icmp_signed("==", holders, let_go.int(1))):
        let_go.call("free", VOID, job)
    let_go.b.ret_void()
    let_go.finish()

    helper = define(module, f"{name}.helper", [POINTER])
    helper.function.linkage = "internal"
    helper.b.call(work.function, [helper.function.args[0]])
    helper.b.call(let_go.function, [helper.function.args[0]])
    helper.b.ret_void()
    helper.finish()

    job = code.call("malloc", POINTER, code.int(_JOB))
    for field, value in ((_NEXT, 0), (_DONE, 0), (_HOLDERS, 1)):
        code.b.store(code.int(value), code.at(job, field, I8))
    code.b.store(total, code.at(job, _TOTAL, I8))
    code.b.store(known, code.at(job, _VALUES, I8))
    asked = code.variable(I64, count=5)  # XLA_FFI_ThreadPool_Schedule_Args
    for i, value in enumerate(
        (code.int(40), POINTER(None), code.field(frame, _FRAME["context"]), helper.function, job)
    ):
        code.b.store(value, code.at(asked, i, I64))
    schedule = code.field(code.field(frame, _FRAME["api"]), _SCHEDULE, ir.FunctionType(POINTER, [POINTER]).as_pointer())
    with code.loop(1, code.least(threads(), total)):
        code.b.atomic_rmw("add", code.at(job, _HOLDERS, I8), code.int(1), "acq_rel")
        error = code.b.call(schedule, [asked])
        with code.when(code.b.icmp_unsigned("!=", error, POINTER(None))):
            code.b.call(let_go.function, [job])
    code.b.call(work.function, [job])
    wait, done = (code.function.append_basic_block(part) for part in ("wait", "done"))
    code.b.branch(wait)
    code.b.position_at_end(wait)
    finished = code.b.load_atomic(code.at(job, _DONE, I8), "acquire", 8, typ=I64)
    code.b.cbranch(code.less(finished, total), wait, done)
    code.b.position_at_end(done)
    code.b.call(let_go.function, [job])
    code.b.ret(POINTER(None))
    code.finish()


def compile_module(module: ir.Module, features: str = "") -> Any:
    """Compiles for this machine, without some `features` of it, such as "-avx512f". Returns the engine that owns it."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()  # of `Code.dot_pairs`
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    host = llvm.get_host_cpu_features().flatten()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=",".join(filter(None, [host, "-prefer-256-bit", features])), opt=3
    )
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    return engine


def register(module: ir.Module, name: str, features: str = "") -> None:
    """Compiles the module and makes its handler of that name known to XLA; see `compile_module`."""
    _living.append(engine := compile_module(module, features))
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    jax.ffi.register_ffi_target(name, capsule(engine.get_function_address(name), None, None), platform="cpu")


_living: list[Any] = []  # engines: XLA calls their code as long as the process lives
_once = threading.Lock()


def kernel(name: str, write: Callable[..., None], *arguments: Any, **options: Any) -> str:
    """The kernel of that name, known to XLA: `write(module, name, ...)` writes it when it is asked for first."""
    with _once:
        if name not in _kernels:
            module = ir.Module(name)
            write(module, name, *arguments, **options)
            register(module, name)
            _kernels.add(name)
    return name


_kernels: set[str] = set()


@functools.cache
def threads() -> int:
    """That XLA has; NPROC tells it so."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, int(os.environ.get("NPROC", allowed)))


@functools.cache
def has_features(*names: str) -> bool:
    """Whether this machine's processor has all of these features (LLVM's names)."""
    features = llvm.get_host_cpu_features()
    return all(features.get(name, False) for name in names)


def has_bfloat16_products() -> bool:
    """Whether this machine multiplies pairs of bfloat16 into float32 sums, 16 at a time (AVX512_BF16's VDPBF16PS)."""
    return has_features("avx512bf16")


def has_wide_vectors() -> bool:
    """Whether this machine has 32 registers of 512 bits, as AVX-512 has."""
    return has_features("avx512f")
