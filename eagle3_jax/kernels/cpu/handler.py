"""CPU kernels as handlers of XLA's foreign function interface (https://docs.jax.dev/en/latest/ffi.html).

A kernel divides its work into chunks and runs them on XLA's own threads. Each free thread takes the next chunk, so a
call never waits for a thread that has not begun.

The code reads XLA's C structures at fixed offsets (jaxlib's xla/ffi/api/c_api.h). A test compares the offsets with the
installed header, and `enabled` turns the kernels off for an untested version of the interface.
"""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import re
from collections.abc import Callable, Sequence

import jax
from llvmlite import ir

from eagle3_jax.kernels.cpu import compiler
from eagle3_jax.kernels.cpu.ir import I8, I32, I64, POINTER, VOID, Code, Value, define, internal

_log = logging.getLogger(__name__)

# Versions (major, minor) of the interface with these offsets, and the version that handlers report.
KNOWN_VERSIONS = ((0, 3), (0, 4), (0, 5))
REPORTED_VERSION = KNOWN_VERSIONS[0]
# Offset in bytes of each field; a dotted name is a field of a nested structure.
OFFSETS = {
    "XLA_FFI_CallFrame": {"extension_start": 8, "api": 16, "ctx": 24, "args.args": 72, "rets.rets": 112},
    "XLA_FFI_Buffer": {"data": 24, "dims": 40},
    "XLA_FFI_Metadata_Extension": {"metadata": 24},
    "XLA_FFI_Metadata": {"api_version.major_version": 24, "api_version.minor_version": 28, "traits": 32},
    "XLA_FFI_Api": {"XLA_FFI_ThreadPool_Schedule": 136},
    "XLA_FFI_ThreadPool_Schedule_Args": {"struct_size": 0, "extension_start": 8, "ctx": 16, "task": 24, "data": 32},
}
SCHEDULE_ARGS_SIZE = 40


def enabled() -> bool:
    """Tells whether CPU kernels run here: the interface has a known version, and EAGLE3_CPU_KERNELS is not 0."""
    return os.environ.get("EAGLE3_CPU_KERNELS") != "0" and _known(api_version())


def api_version() -> tuple[int, int] | None:
    """Reads the version (major, minor) of the interface from jaxlib's header; None without a header."""
    return _version_of(pathlib.Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h"))


@functools.cache
def _version_of(header: pathlib.Path) -> tuple[int, int] | None:
    if not header.exists():
        return None
    found = dict(re.findall(r"^#define XLA_FFI_API_(MAJOR|MINOR) (\d+)$", header.read_text(), re.MULTILINE))
    return (int(found["MAJOR"]), int(found["MINOR"])) if len(found) == 2 else None


@functools.cache
def _known(version: tuple[int, int] | None) -> bool:
    """Tells whether the version is known; logs an unknown one once."""
    if version not in KNOWN_VERSIONS:
        shown, known = (", ".join(f"{v[0]}.{v[1]}" for v in vs if v) or "none" for vs in ((version,), KNOWN_VERSIONS))
        _log.warning(
            "CPU kernels are off, XLA's operations run instead: XLA's foreign function interface: got version %s, "
            "expected one of %s",
            shown,
            known,
        )
    return version in KNOWN_VERSIONS


class Buffer:
    """An operand or result of the call: its data and dimensions."""

    def __init__(self, code: Code, buffer: Value) -> None:
        fields = OFFSETS["XLA_FFI_Buffer"]
        self._code, self._dimensions = code, code.field(buffer, fields["dims"])
        self.data = code.field(buffer, fields["data"])

    def size(self, axis: int) -> Value:
        return self._code.load(self._code.at(self._dimensions, axis, I64), I64)


# (code, operands, results) -> the values that the body reads (pointers and i64), and the number of chunks.
Plan = Callable[[Code, Sequence[Buffer], Sequence[Buffer]], tuple[Sequence[Value], Value]]
# (code, the plan's values, index of the chunk)
Body = Callable[[Code, Sequence[Value], Value], None]

# Offsets of a job's fields, i64 or pointer: next chunk, chunks done, number of chunks, reference count, plan's values.
_NEXT, _DONE, _TOTAL, _HOLDERS, _VALUES, _JOB_SIZE = 0, 8, 16, 24, 32, 40


def write_kernel(module: ir.Module, name: str, operands: int, results: int, plan: Plan, body: Body) -> None:
    """Writes the handler `name`, which plans the call and runs the chunks on XLA's threads.

    The job lives on the heap: a thread may reach it after the call has ended, and then finds no chunk left. The last
    holder frees the job.
    """
    call_frame, metadata = OFFSETS["XLA_FFI_CallFrame"], OFFSETS["XLA_FFI_Metadata"]
    handler = define(module, name, [POINTER], POINTER)
    code, frame = handler, handler.function.args[0]
    extension = code.field(frame, call_frame["extension_start"])
    with code.when(code.b.icmp_unsigned("!=", extension, POINTER(None))):  # XLA asks for the handler's metadata
        about = code.field(extension, OFFSETS["XLA_FFI_Metadata_Extension"]["metadata"])
        major, minor = REPORTED_VERSION
        for field, value in (("api_version.major_version", major), ("api_version.minor_version", minor), ("traits", 0)):
            code.b.store(ir.Constant(I32, value), code.at(about, metadata[field], I8))
        code.b.ret(POINTER(None))
    arguments, answers = code.field(frame, call_frame["args.args"]), code.field(frame, call_frame["rets.rets"])
    values, total = plan(
        code,
        [Buffer(code, code.field(arguments, 8 * i)) for i in range(operands)],
        [Buffer(code, code.field(answers, 8 * i)) for i in range(results)],
    )
    kinds = [value.type for value in values]
    known = code.variable(I64, count=len(values))
    for i, value in enumerate(values):
        code.b.store(value, code.at(known, i, I64))

    with internal(module, f"{name}.chunk", [POINTER, I64]) as run:
        given, number = run.function.args
        body(run, [run.load(run.at(given, i, I64), kind) for i, kind in enumerate(kinds)], number)
    with internal(module, f"{name}.work", [POINTER]) as work:
        job = work.function.args[0]
        head, do, end = (work.function.append_basic_block(part) for part in ("head", "do", "end"))
        work.b.branch(head)
        work.b.position_at_end(head)
        chunk = work.b.atomic_rmw("add", work.at(job, _NEXT, I8), work.integer(1), "acquire")
        work.b.cbranch(work.less(chunk, work.field(job, _TOTAL, I64)), do, end)
        work.b.position_at_end(do)
        work.b.call(run.function, [work.field(job, _VALUES), chunk])
        work.b.atomic_rmw("add", work.at(job, _DONE, I8), work.integer(1), "release")
        work.b.branch(head)
        work.b.position_at_end(end)
    with internal(module, f"{name}.release", [POINTER]) as release:
        job = release.function.args[0]
        holders = release.b.atomic_rmw("sub", release.at(job, _HOLDERS, I8), release.integer(1), "acq_rel")
        with release.when(release.b.icmp_signed("==", holders, release.integer(1))):
            release.call("free", VOID, job)
    with internal(module, f"{name}.helper", [POINTER]) as helper:
        for part in (work, release):
            helper.b.call(part.function, [helper.function.args[0]])

    job = code.call("malloc", POINTER, code.integer(_JOB_SIZE))
    for field, value in ((_NEXT, 0), (_DONE, 0), (_HOLDERS, 1)):
        code.b.store(code.integer(value), code.at(job, field, I8))
    code.b.store(total, code.at(job, _TOTAL, I8))
    code.b.store(known, code.at(job, _VALUES, I8))
    api, task = OFFSETS["XLA_FFI_Api"], OFFSETS["XLA_FFI_ThreadPool_Schedule_Args"]
    asked = code.variable(I64, count=SCHEDULE_ARGS_SIZE // 8)
    for field, value in (
        ("struct_size", code.integer(SCHEDULE_ARGS_SIZE)),
        ("extension_start", POINTER(None)),
        ("ctx", code.field(frame, call_frame["ctx"])),
        ("task", helper.function),
        ("data", job),
    ):
        code.b.store(value, code.at(asked, task[field], I8))
    function = ir.FunctionType(POINTER, [POINTER]).as_pointer()
    schedule = code.field(code.field(frame, call_frame["api"]), api["XLA_FFI_ThreadPool_Schedule"], function)
    with code.loop(1, code.least(compiler.threads(), total)):
        code.b.atomic_rmw("add", code.at(job, _HOLDERS, I8), code.integer(1), "acq_rel")
        error = code.b.call(schedule, [asked])
        with code.when(code.b.icmp_unsigned("!=", error, POINTER(None))):
            code.b.call(release.function, [job])
    code.b.call(work.function, [job])
    wait, done = (code.function.append_basic_block(part) for part in ("wait", "done"))
    code.b.branch(wait)
    code.b.position_at_end(wait)
    finished = code.b.load_atomic(code.at(job, _DONE, I8), "acquire", 8, typ=I64)
    code.b.cbranch(code.less(finished, total), wait, done)
    code.b.position_at_end(done)
    code.b.call(release.function, [job])
    code.b.ret(POINTER(None))
    code.finish()
