"""Handlers of CPU kernels: XLA's structures as its header has them; chunks done once, before the call ends."""

import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llvmlite import ir

from eagle3_jax.kernels.cpu import compiler, handler
from eagle3_jax.kernels.cpu.ir import F32, I32, I64, constant

LONG = 30_000_000  # turns of the slow chunk
PATIENCE = 300_000_000  # turns that one of the last two chunks waits for the other to begin


def write_chain(module, name, patience=0):
    """(value [1], before [n]) -> before + twice the value, and flags [2]. The last two chunks wait for each other to
    begin, on another thread; then one of them is slow: the last where the value is odd.
    """

    def plan(code, operands, results):
        value, before = operands
        begun = results[1].data
        for flag in range(2):
            code.b.store(ir.Constant(I32, 0), code.at(begun, flag, I32))
        return [value.data, before.data, results[0].data, begun, before.size(0)], before.size(0)

    def body(code, values, chunk):
        value, before, out, begun, total = values
        number = code.load(value, F32)
        found = code.variable(F32, code.b.fadd(number, number))
        waited = code.variable(I64, code.integer(0))
        from_last = code.sub(code.sub(total, 1), chunk)
        with code.when(code.less(from_last, 2)):
            code.b.atomic_rmw("xchg", code.at(begun, from_last, I32), ir.Constant(I32, 1), "release")
            head, again, end = (code.function.append_basic_block(part) for part in ("wait", "again", "begun"))
            code.b.branch(head)
            code.b.position_at_end(head)
            other = code.at(begun, code.sub(1, from_last), I32)
            turns, there = code.load(waited, I64), code.b.load_atomic(other, "acquire", 4, typ=I32)
            alone = code.b.icmp_signed("==", there, ir.Constant(I32, 0))
            code.b.cbranch(code.b.and_(alone, code.less(turns, patience)), again, end)
            code.b.position_at_end(again)
            code.b.store(code.add(turns, 1), waited)
            code.b.branch(head)
            code.b.position_at_end(end)
        slow = code.rem(code.add(code.b.fptosi(number, I64), 1), 2)
        with code.when(code.b.icmp_signed("==", from_last, slow)), code.loop(0, LONG):
            code.b.store(code.fma(code.load(found, F32), constant(0.5), number), found)
        result = code.b.fadd(code.load(code.at(before, chunk, F32), F32), code.load(found, F32))
        code.b.store(result, code.at(out, chunk, F32))

    handler.write_kernel(module, name, 2, 2, plan, body)


@pytest.mark.slow
@pytest.mark.parametrize(("threads", "chunks"), list(itertools.product([1, 2, 5], [1, 2, 7])))
def test_a_call_is_done_when_it_ends(monkeypatch, threads, chunks):
    """Also where a helper still works on the slow chunk, or comes when nothing is left."""
    monkeypatch.setattr(compiler, "threads", lambda: threads)
    name = f"test_chain_{threads}_{chunks}"
    module = ir.Module(name)
    write_chain(module, name, PATIENCE if min(threads, chunks) > 1 else 0)
    compiler.register(module, name)
    results = jax.ShapeDtypeStruct((chunks,), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
    call = jax.jit(jax.ffi.ffi_call(name, results))
    before = jnp.arange(chunks, dtype=jnp.float32)
    for value in range(1, 9):  # either thread may take the slow chunk, and a busy machine may have no second one
        np.testing.assert_array_equal(call(jnp.full(1, float(value)), before)[0], before + 2.0 * value)


def test_a_kernel_is_compiled_once():
    calls = []

    def write(module, name):
        calls.append(name)
        write_chain(module, name)

    assert {compiler.kernel("test_once", write) for _ in range(3)} == {"test_once"}
    assert calls == ["test_once"]


POINTER_SIZE = 8
FIELD = re.compile(r"_XLA_FFI_API_STRUCT_FIELD\((?P<call>\w+)\)|(?P<type>[\w ]+(?:\*+ ?| ))(?P<name>\w+)")


def structures(header):
    """By structure: the offset of each field, and of fields of structures inside of it; and each structure's size."""
    text = re.sub(r"//[^\n]*", "", header)
    sizes = {"int": 4, "int32_t": 4, "uint32_t": 4, "int64_t": 8, "size_t": 8}
    sizes |= dict.fromkeys(re.findall(r"typedef enum \{[^}]*\} (\w+);", text), sizes["int"])
    sizes |= {name: sizes[kind] for kind, name in re.findall(r"typedef (\w+) (\w+);", text) if kind in sizes}
    alignments, offsets = dict(sizes), {}
    for structure, body in re.findall(r"struct (\w+) \{([^{}]*)\}", text):
        if "(*" in body:  # pointers to functions: none that handlers read
            continue
        end, widest, fields = 0, 1, {}
        for line in filter(None, map(str.strip, body.split(";"))):
            found = FIELD.fullmatch(line)
            assert found, line
            kind = "*" if found["call"] else found["type"].strip()
            size, alignment = (POINTER_SIZE if "*" in kind else of[kind] for of in (sizes, alignments))
            start = -(-end // alignment) * alignment
            inner = {} if "*" in kind else offsets.get(kind, {})
            name = found["call"] or found["name"]
            fields |= {name: start} | {f"{name}.{field}": start + offset for field, offset in inner.items()}
            end, widest = start + size, max(widest, alignment)
        offsets[structure], sizes[structure], alignments[structure] = fields, -(-end // widest) * widest, widest
    return offsets, sizes


def test_offsets_are_those_of_the_installed_header():
    offsets, sizes = structures(pathlib.Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text())
    for name, fields in handler.OFFSETS.items():
        assert fields == {field: offsets[name][field] for field in fields}, name
    assert sizes["XLA_FFI_ThreadPool_Schedule_Args"] == handler.SCHEDULE_ARGS_SIZE


def test_the_installed_version_is_known():
    assert handler.api_version() in handler.KNOWN_VERSIONS
    assert handler.REPORTED_VERSION in handler.KNOWN_VERSIONS


def test_a_header_without_a_version_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    assert handler.api_version() is None
    folder = tmp_path / "xla/ffi/api"
    folder.mkdir(parents=True)
    (folder / "c_api.h").write_text("#define XLA_FFI_API_MAJOR 0\n")
    handler._version_of.cache_clear()
    assert handler.api_version() is None
    handler._version_of.cache_clear()
