"""Keeps the machine code of CPU kernels in the folder of JAX's compilation cache, so that later starts load it."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import jax

from eagle3_jax.runs import disk

_DIGEST = hashlib.sha256().digest_size


class KeptCode:
    """The machine code of one module.

    Args:
        of: all that the code depends on: the module's text, LLVM's version, the processor.
    """

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
