"""What tests compile is kept on this machine, outside the checkout: the next run, of any checkout, finds it.

Programs for CPUs are in JAX's own cache. Programs for TPUs cannot be loaded without a TPU: their text and memory, which
tests ask for, are kept by the hash of what was lowered. The folder is `$EAGLE3_TEST_CACHE`, or `eagle3_jax_tests` in
the user's cache folder. Entries are written whole, so a run that is killed leaves nothing wrong behind.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import os
import pathlib
import platform
import tempfile
import types
from typing import Any

FOLDER = "EAGLE3_TEST_CACHE"
_MOST_BYTES = 6 * 2**30


def folder() -> pathlib.Path:
    """Of all that tests keep on this machine."""
    home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    return pathlib.Path(os.environ.get(FOLDER) or home / "eagle3_jax_tests")


def write_atomically(path: pathlib.Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)


def write_entries_atomically(lru_cache: Any) -> None:
    """Makes JAX's cache write whole files only, and mark those that it reads as used.

    Args:
        lru_cache: the module `jax._src.lru_cache`.
    """

    def path_of(cache: Any, key: str) -> pathlib.Path:
        return pathlib.Path(cache.path) / f"{key}{lru_cache._CACHE_SUFFIX}"

    def get(cache: Any, key: str) -> bytes | None:
        try:
            data = path_of(cache, key).read_bytes()
            os.utime(path_of(cache, key))
        except FileNotFoundError:
            return None
        return data

    lru_cache.LRUCache.get = get
    lru_cache.LRUCache.put = lambda cache, key, value: write_atomically(path_of(cache, key), value)


def use(flags: str) -> None:
    """Lets this process keep what it compiles, and find what others kept.

    Args:
        flags: XLA's, all of them; JAX's own key misses those that are taken out of the environment.
    """
    import jax
    from jax._src import compilation_cache, lru_cache

    write_entries_atomically(lru_cache)
    jax.config.update("jax_compilation_cache_dir", str(_of_this_machine(flags)))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # The code of a kernel for TPUs holds where its Python stands: it would be another one in another checkout.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    is_cache_used = compilation_cache.is_cache_used
    compilation_cache.is_cache_used = lambda backend: backend.platform == "cpu" and is_cache_used(backend)
    lowered_type: Any = jax.stages.Lowered
    compile_ = lowered_type.compile

    @functools.wraps(compile_)
    def compile_or_find(lowered: Any, *options: Any, **named: Any) -> Any:
        backend = lowered._lowering.compile_args["backend"]
        if backend is None or backend.platform != "tpu" or options or named:
            return compile_(lowered, *options, **named)
        return KeptProgram(lowered, functools.partial(compile_, lowered))

    lowered_type.compile = compile_or_find


def _of_this_machine(flags: str) -> pathlib.Path:
    """Machine code is of one kind of processor."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    place = folder() / hashlib.sha256(f"{platform.machine()} {features} {flags}".encode()).hexdigest()[:12]
    place.mkdir(parents=True, exist_ok=True)
    return place


class KeptProgram:
    """A program for a TPU, compiled when nobody did that before; what is not kept of it is compiled for."""

    def __init__(self, lowered: Any, compile_: Any) -> None:
        self._compile = functools.cache(functools.partial(_compiled, compile_))
        backend = lowered._lowering.compile_args["backend"]
        devices = [str(device) for device in backend.devices()]
        flags = [os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
        key = json.dumps([backend.platform_version, devices, flags, lowered.as_text()])
        path = folder() / "tpu" / f"{hashlib.sha256(key.encode()).hexdigest()}.json.gz"
        if path.exists():
            self._kept: Any = json.loads(gzip.decompress(path.read_bytes()))
            os.utime(path)
            if self._kept["text"] is not None:
                return
        compiled, text = self._compile()
        memory = compiled.memory_analysis()
        numbers = {name: getattr(memory, name) for name in dir(memory) if name.endswith("_in_bytes")}
        self._kept = {"text": text, "memory": numbers}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, gzip.compress(json.dumps(self._kept).encode()))

    def as_text(self) -> str:
        return self._kept["text"]

    def memory_analysis(self) -> Any:
        return types.SimpleNamespace(**self._kept["memory"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compile()[0], name)


def _compiled(compile_: Any) -> tuple[Any, str]:
    """Compiles a program, with the compiler's own text: JAX cannot read all operations that a newer libtpu writes."""
    with tempfile.TemporaryDirectory() as written:
        compiled = compile_(compiler_options={"xla_dump_to": written, "xla_dump_hlo_as_text": True})
        (text,) = pathlib.Path(written).glob("*.after_codegen.txt")
        return compiled, text.read_text()


def prune() -> None:
    """Deletes what was used longest ago, where all of it takes too much of the disk."""
    entries = [path for glob in ("*/*-cache", "*/cpu_kernel-*", "tpu/*.json.gz") for path in folder().glob(glob)]
    files = [(status.st_mtime, status.st_size, path) for path in entries if (status := path.stat())]
    excess = sum(size for _, size, _ in files) - _MOST_BYTES
    for _, size, path in sorted(files):
        if excess <= 0:
            return
        path.unlink(missing_ok=True)
        excess -= size
