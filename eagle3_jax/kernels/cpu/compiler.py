"""Compiles CPU kernels for this machine and registers them with XLA.

The machine code is kept in the folder of JAX's compilation cache, so that later starts load it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import threading
from collections.abc import Callable
from typing import Any

import jax
import llvmlite.binding as llvm
from llvmlite import ir

from eagle3_jax.runs import disk

_DIGEST = hashlib.sha256().digest_size


class KeptCode:
    """The machine code of one module; `of` is all that it depends on: the text, LLVM's version, the processor."""

    def __init__(self, *of: str) -> None:
        config: Any = jax.config
        folder = config.jax_compilation_cache_dir
        place = folder and disk.system_path(folder)
        digest = hashlib.sha256("\0".join(of).encode()).hexdigest()
        self._file = place / f"cpu_kernel-{digest}" if place else None

    def read(self) -> bytes | None:
        """Returns the code; None where there is none, or a damaged one."""
        with contextlib.suppress(OSError):
            kept = self._file.read_bytes() if self._file else b""
            if hashlib.sha256(kept[_DIGEST:]).digest() == kept[:_DIGEST]:
                return kept[_DIGEST:]
        return None

    def write(self, code: bytes) -> None:
        """Keeps the code; nothing where there is no folder that can be written."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            with disk.atomic(self._file) as temporary:
                temporary.write_bytes(hashlib.sha256(code).digest() + code)


def compile_module(module: ir.Module, features: str = "") -> Any:
    """Compiles a module for this machine, or takes its kept code. Returns the engine that owns the code.

    `features` are those of the processor that the code must not use, such as "-avx512f".
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()  # for the inline assembly of `Code.dot_pairs`
    text, processor = str(module), llvm.get_host_cpu_name()
    features = ",".join(filter(None, [llvm.get_host_cpu_features().flatten(), "-prefer-256-bit", features]))
    kept = KeptCode(text, str(llvm.llvm_version_info), processor, features)
    machine = llvm.Target.from_default_triple().create_target_machine(cpu=processor, features=features, opt=3)
    parsed, code = llvm.parse_assembly(text), kept.read()
    if code is None:
        parsed.verify()
        passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
        passes.getModulePassManager().run(parsed, passes)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.set_object_cache(lambda _, compiled: kept.write(compiled), lambda _: code)
    engine.finalize_object()
    return engine


def register(module: ir.Module, name: str, features: str = "") -> None:
    """Compiles the module and registers its handler `name` with XLA; see `compile_module`."""
    _living.append(engine := compile_module(module, features))
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    jax.ffi.register_ffi_target(name, capsule(engine.get_function_address(name), None, None), platform="cpu")


_living: list[Any] = []  # engines, kept because XLA calls their code until the process ends
_once = threading.Lock()


def kernel(name: str, write: Callable[..., None], *arguments: Any, **options: Any) -> str:
    """Registers the kernel `name` at its first use; `write(module, name, ...)` writes its IR. Returns `name`."""
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
    """Returns the size of XLA's thread pool, which follows NPROC."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, int(os.environ.get("NPROC", allowed)))


@functools.cache
def has_features(*names: str) -> bool:
    """Tells whether this machine's processor has all of these features (LLVM's names)."""
    features = llvm.get_host_cpu_features()
    return all(features.get(name, False) for name in names)


def has_bfloat16_products() -> bool:
    """Tells whether one instruction multiplies 16 pairs of bfloat16 into float32 sums (AVX512_BF16's VDPBF16PS)."""
    return has_features("avx512bf16")


def has_tiles() -> bool:
    """Tells whether this machine multiplies tiles of bfloat16 (Intel's AMX)."""
    return has_features("amx-bf16")


def has_wide_vectors() -> bool:
    """Tells whether this machine has 32 vector registers of 512 bits (AVX-512)."""
    return has_features("avx512f")
