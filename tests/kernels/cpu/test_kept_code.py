"""Machine code that is kept: it is run again, and taken for nothing else."""

from __future__ import annotations

import ctypes
from typing import Any

import jax
import pytest
from llvmlite import ir

from eagle3_jax.kernels.cpu import compiler
from eagle3_jax.kernels.cpu.compiler import KeptCode


@pytest.fixture
def folder(tmp_path):
    """JAX's compilation cache, moved for one test."""
    config: Any = jax.config
    before = config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "programs"))
    yield tmp_path / "programs"
    jax.config.update("jax_compilation_cache_dir", before)


def returning(number: int) -> ir.Module:
    module = ir.Module("test")
    i32 = ir.IntType(32)
    function = ir.Function(module, ir.FunctionType(i32, []), "test")
    ir.IRBuilder(function.append_basic_block()).ret(ir.Constant(i32, number))
    return module


def result(number: int, features: str = "") -> int:
    engine = compiler.compile_module(returning(number), features)
    return ctypes.CFUNCTYPE(ctypes.c_int)(engine.get_function_address("test"))()


def optimised(monkeypatch) -> list[bool]:
    """Gets an entry for each module that is optimised from now on."""
    calls: list[bool] = []
    make = compiler.llvm.create_pass_builder
    monkeypatch.setattr(compiler.llvm, "create_pass_builder", lambda *given: calls.append(True) or make(*given))
    return calls


def test_kept_code_is_run_again_where_nothing_differs(folder, monkeypatch):
    calls = optimised(monkeypatch)
    assert (result(3), result(3), len(calls)) == (3, 3, 1)
    assert (result(4), len(calls)) == (4, 2)
    assert (result(3, "-sse4.2"), len(calls)) == (3, 3)
    assert len([*folder.iterdir()]) == 3


@pytest.mark.parametrize("damage", [lambda code: code[:-9], lambda code: code[:-1] + b"?", lambda code: b""])
def test_damaged_code_is_compiled_anew(folder, monkeypatch, damage):
    result(3)
    (file,) = folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    calls = optimised(monkeypatch)
    assert (result(3), result(3), len(calls)) == (3, 3, 1)


@pytest.mark.parametrize("address", [None, "gs://a-bucket/programs", "/dev/null/programs"])
def test_without_a_folder_that_can_be_written_nothing_is_kept(folder, address):
    jax.config.update("jax_compilation_cache_dir", address)
    code = KeptCode("module", "processor")
    code.write(b"code")
    assert code.read() is None
