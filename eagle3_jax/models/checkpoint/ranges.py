"""The files of a checkpoint's tensors, safetensors and GGUF, local or in a bucket; a tensor is read when it is indexed.

A safetensors file has eight bytes with the header's size, the header in JSON, and the tensors one behind the other
(huggingface.co/docs/safetensors). Its own library has no numpy arrays of FP8, and reads no buckets.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from safetensors import SafetensorError

from eagle3_jax.models.checkpoint.gguf_file import GGUF, open_gguf
from eagle3_jax.models.checkpoint.table import DTYPES, Described
from eagle3_jax.runs import disk

_LARGEST_HEADER = 100 << 20  # safetensors' own limit


def open_tensors(path: disk.Path) -> tuple[dict[str, Described], Callable[[str], Any]]:
    """Returns what a file holds, and a function from a tensor's name to the tensor. Raises SafetensorError."""
    if path.suffix == GGUF:
        return open_gguf(path)
    size = disk.size(path)
    length = int.from_bytes(disk.read_range(path, 0, 8), "little") if size >= 8 else size
    if not length <= min(size - 8, _LARGEST_HEADER):
        raise SafetensorError(f"the header is larger than the file: {length} bytes of {size}")
    start, end = 8 + length, 8 + length
    try:
        entries = json.loads(disk.read_range(path, 8, start))
        entries.pop("__metadata__", None)
        for name, entry in entries.items():
            begin, stop = (start + offset for offset in entry["data_offsets"])
            dtype = DTYPES.get(entry["dtype"])  # of others the bits of a number are not known; they are refused by name
            length = stop - begin if dtype is None else np.dtype(dtype).itemsize * math.prod(entry["shape"])
            if stop != begin + length or not start <= begin <= stop:
                raise SafetensorError(f"{name}: its place is not that of its shape")
            end = max(end, stop)
        found = {name: Described(entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SafetensorError(f"not a header ({type(error).__name__}: {error})") from error
    if end != size:
        raise SafetensorError(f"got {size} bytes, expected {end}")

    def tensor(name: str) -> _Tensor:
        return _Tensor(path, start + entries[name]["data_offsets"][0], DTYPES[found[name].dtype], found[name].shape)

    return found, tensor


class _Tensor:
    """A tensor that is read by whole rows when it is indexed; the rows of the last read are kept."""

    def __init__(self, path: disk.Path, begin: int, dtype: Any, shape: tuple[int, ...]) -> None:
        self.shape, row = shape, np.dtype(dtype).itemsize * math.prod(shape[1:])

        @functools.lru_cache(1)  # devices take columns of the same rows
        def rows(start: int, stop: int) -> np.ndarray:
            content = disk.read_range(path, begin + start * row, begin + stop * row)
            return np.frombuffer(content, dtype).reshape(stop - start, *shape[1:])

        self._rows = rows

    def __getitem__(self, index: Any) -> np.ndarray:
        rows, *others = index if isinstance(index, tuple) and index else (index,)
        if not self.shape or not isinstance(rows, slice) or rows.step not in (None, 1):
            return self._rows(0, self.shape[0] if self.shape else 1).reshape(self.shape)[index]
        start, stop, _ = rows.indices(self.shape[0])
        return self._rows(start, max(start, stop))[(slice(None), *others)]
