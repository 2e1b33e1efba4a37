"""The machine: its hardware, the versions on it, its TPU chips, its memory."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import pathlib
import platform
import sys
import threading
from typing import Any

from eagle3_jax.runs.bucket import addresses

_PACKAGES = ("eagle3_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "transformers", "numpy")
_LOW_PRIORITY = 10  # a "nice" value: about a tenth of a processor that others want too


def versions() -> dict[str, str]:
    """Lists the versions of Python and of the packages that decide a result."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def hardware() -> dict[str, Any]:
    """Describes this machine: CPU, cores, accelerator, devices."""
    import jax  # programs that only read and write files do without it

    cpu = platform.processor() or platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    device = jax.devices()[0]
    accelerator = None if device.platform == "cpu" else device.device_kind
    return {"cpu": cpu, "cores": cores, "accelerator": accelerator, "devices": jax.device_count()}


def timed_on(model: int) -> dict[str, Any]:
    """Describes what a timing depends on: the devices of an engine (`mesh.model`), the machine, versions."""
    return {"mesh": {"model": model}, "hardware": hardware(), "versions": versions()}


def has_tpu() -> bool:
    """Tells whether this machine has TPU chips; asks the file system, since asking JAX would start the backend."""
    return any(
        True for folder, name in (("/dev", "accel*"), ("/dev/vfio", "[0-9]*")) for _ in pathlib.Path(folder).glob(name)
    )


def keep_programs(folder: str | pathlib.Path) -> None:
    """Keeps what this process compiles from now on in a folder: JAX's persistent compilation cache."""
    import jax

    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def keep_programs_of(run_dir: str, own: pathlib.Path) -> None:
    """Keeps this process's programs for later starts, unless the user chose a folder.

    On a TPU host a run in a bucket has them beside it, since a reclaimed host takes its disk along.

    Args:
        own: the folder of this machine.
    """
    import jax

    settings: Any = jax.config
    if settings.jax_compilation_cache_dir:
        return
    if has_tpu() and addresses.is_address(run_dir):  # programs of CPUs are of one kind of CPU
        # Programs that take less than a second, which is JAX's limit, take as long to fetch.
        settings.update("jax_compilation_cache_dir", str(addresses.path_of(run_dir) / "programs"))
    else:
        keep_programs(own / "programs")


def release_freed() -> None:
    """Returns memory that LLVM freed to the system (glibc's malloc_trim); the allocator would keep gigabytes."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(ctypes.c_size_t(0))


def lower_priority() -> None:
    """Lets this thread, and LLVM's threads that compile for it, run after all others (on Linux alone)."""
    if sys.platform != "linux":
        return
    for task in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended
            compiles = (task / "comm").read_text().startswith("llvm-worker")
            if compiles or int(task.name) == threading.get_native_id():
                os.setpriority(os.PRIO_PROCESS, int(task.name), _LOW_PRIORITY)
