"""Programs are kept where a later start finds them; freed memory goes back to the system."""

import ctypes
import os
import pathlib
import subprocess
import sys

import emulator
import jax
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


@pytest.mark.parametrize("chosen", [None, "a/folder"])
def test_a_verb_s_programs_are_kept_on_its_machine_or_where_its_user_says(chosen, tmp_path):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [jax.config.values[name] for name in names]
    try:
        jax.config.update(names[0], chosen)
        machine.keep_programs_of("gs://bucket/run", tmp_path)
        assert jax.config.values[names[0]] == (chosen or str(tmp_path / "programs")), "no TPU here"
    finally:
        for name, value in zip(names, before, strict=True):
            jax.config.update(name, value)


_PROGRAM = """
import pathlib, sys
import jax
from eagle3_jax.runs import machine
machine.has_tpu = lambda: True
found = []
jax.monitoring.register_event_listener(lambda name, **_: found.append(name.rpartition("/")[2]))
machine.keep_programs_of(sys.argv[1], pathlib.Path("nowhere"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # a small program for a large one
jax.jit(lambda x: x + 1)(1.0)
print("cache_hits" in found)
"""


@pytest.mark.slow
def test_on_tpu_hosts_programs_of_a_run_in_a_bucket_outlive_the_host():
    run = f"{emulator.new_bucket()}/run"
    own = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    for expected in ("False\n", "True\n"):
        command = [sys.executable, "-W", "error", "-c", _PROGRAM, run]
        ended = subprocess.run(command, env=own, capture_output=True, text=True, timeout=200)
        assert (ended.stdout, ended.returncode) == (expected, 0), ended.stderr
