"""Describes the machine: its hardware, published figures of chips, versions, and memory."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import itertools
import os
import pathlib
import platform
import sys
import threading
from typing import Any

# `device_kind` -> 1e12 dense bfloat16 operations a second of one JAX device. Sources: Google's page of each TPU version
# (a TPU v7x chip is two devices), NVIDIA's data sheets.
TERAFLOPS = {
    "TPU v5 lite": 197,
    "TPU v5": 459,
    "TPU v6 lite": 918,
    "TPU7x": 1155,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H200": 989,
}

# `device_kind` -> 1e9 bytes a second around a ring of chips, both directions together. Source: "How to Scale Your
# Model" (Google DeepMind, 2025), part 2, which has no TPU v7x: its links are taken to be v5p's.
RING_GIGABYTES = {"TPU v5 lite": 90, "TPU v5": 180, "TPU v6 lite": 180, "TPU7x": 180}

_PACKAGES = ("eagle3_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "transformers", "numpy")
_chosen: str | None = None  # the folder that `keep_programs` set
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

    cpu = _cpuinfo("model name").partition(":")[2].strip() or platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    device = jax.devices()[0]
    accelerator = None if device.platform == "cpu" else device.device_kind
    return {"cpu": cpu, "cores": cores, "accelerator": accelerator, "devices": jax.device_count()}


def _cpuinfo(*fields: str) -> str:
    """Returns the first line of Linux' description of the processor that begins with one of the fields, or nothing."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith(fields)), "")


def timed_on(model: int) -> dict[str, Any]:
    """Describes what a timing depends on: the devices of an engine (`mesh.model`), the machine, versions."""
    return {"mesh": {"model": model}, "hardware": hardware(), "versions": versions()}


def has_tpu() -> bool:
    """Tells whether this machine has TPU chips; asks the file system, since asking JAX would start the backend."""
    places = pathlib.Path("/dev").glob("accel*"), pathlib.Path("/dev/vfio").glob("[0-9]*")
    return next(itertools.chain(*places), None) is not None


def keep_programs(folder: str | pathlib.Path | None, *, small: bool = True) -> None:
    """Keeps what this process compiles from now on in a folder, by JAX's persistent compilation cache; None: nowhere.

    A folder that the user chose by JAX's own setting stays. `small` also keeps what compiles faster than JAX's
    `jax_persistent_cache_min_compile_time_secs`.
    """
    global _chosen
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    settings: Any = jax.config
    if settings.jax_compilation_cache_dir not in (None, _chosen):
        return
    if folder is None:
        settings.update("jax_enable_compilation_cache", False)
        return
    # Machine code of another processor may not run, and machines may share a folder: each kind has one in it.
    features = _cpuinfo("flags", "Features") or platform.processor()
    kind = hashlib.sha256(f"{platform.machine()} {features}".encode()).hexdigest()[:8]
    _chosen = str(pathlib.Path(folder) / kind)
    settings.update("jax_compilation_cache_dir", _chosen)
    compilation_cache.reset_cache()  # or programs still go where the first one went
    if small:
        settings.update("jax_persistent_cache_min_compile_time_secs", 0.0)


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
