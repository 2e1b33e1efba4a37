"""Memory of this process that compilers leave behind."""

from __future__ import annotations

import ctypes
import sys


def release_freed() -> None:
    """glibc's malloc_trim: what LLVM freed goes back to the system, of which the allocator keeps gigabytes."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(ctypes.c_size_t(0))
