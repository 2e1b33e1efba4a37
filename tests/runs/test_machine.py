"""Freed memory goes back to the system."""

import ctypes
import pathlib

import pytest

from eagle3_jax.runs import machine


def resident_mib() -> float:
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def test_memory_that_was_freed_between_what_is_in_use_goes_back():
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("needs glibc")
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    machine.release_freed()  # holes that other tests left would be filled
    size, before = 1 << 14, resident_mib()
    blocks = [libc.malloc(size) for _ in range(1 << 14)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for number, block in enumerate(blocks):
        if number % 64 < 63:
            libc.free(block)
    assert resident_mib() - before > 200, "without help it stays"
    machine.release_freed()
    assert resident_mib() - before < 60
    for block in blocks[63::64]:
        libc.free(block)
