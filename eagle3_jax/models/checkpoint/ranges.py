"""Tensors of a safetensors file in a bucket, read by ranges: what `safetensors.safe_open` does for a local file.

The format: eight bytes with the header's size, the header in JSON, the tensors one behind the other
(huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from eagle3_jax.models.checkpoint.gguf_file import GGUF, open_gguf
from eagle3_jax.models.checkpoint.table import DTYPES
from eagle3_jax.runs import disk

_LARGEST_HEADER = 100 << 20  # safetensors' own limit


def open_tensors(path: disk.Path) -> Any:
    """Opens a safetensors or GGUF file for `keys` and `get_slice`. Raises SafetensorError."""
    if path.suffix == GGUF:
        return open_gguf(path)
    return _Tensors(path) if disk.is_remote(path) else safe_open(path, framework="numpy")


class _Tensors:
    """A file in a bucket; only its header is read at the beginning."""

    def __init__(self, path: disk.Path) -> None:
        size = disk.size(path)
        length = int.from_bytes(disk.read_range(path, 0, 8), "little") if size >= 8 else size
        if not length <= min(size - 8, _LARGEST_HEADER):
            raise SafetensorError(f"the header is larger than the file: {length} bytes of {size}")
        try:
            self._entries = json.loads(disk.read_range(path, 8, 8 + length))
            self._entries.pop("__metadata__", None)
            self._path, self._start = path, 8 + length
            for name, entry in self._entries.items():
                begin, end = entry["data_offsets"]
                bytes_each = np.dtype(DTYPES[entry["dtype"]]).itemsize
                if end - begin != bytes_each * math.prod(entry["shape"]) or not 0 <= begin <= end <= size - 8 - length:
                    raise SafetensorError(f"{name}: its place is not in the file")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SafetensorError(f"not a header ({type(error).__name__}: {error})") from error

    def keys(self) -> Iterator[str]:
        return iter(self._entries)

    def get_slice(self, name: str) -> _Slice:
        if name not in self._entries:
            raise SafetensorError(f"no tensor {name}")
        entry = self._entries[name]
        return _Slice(self._path, self._start + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"]))

    def __enter__(self) -> _Tensors:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class _Slice:
    """A tensor that is read when it is indexed, by whole rows; the rows of the last read are kept."""

    def __init__(self, path: disk.Path, start: int, dtype: str, shape: tuple[int, ...]) -> None:
        self._path, self._start, self._dtype, self._shape = path, start, dtype, shape
        self._rows: tuple[int, int] | None = None
        self._held = np.zeros(0)

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return self._dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        index = index if isinstance(index, tuple) else (index,)
        if not self._shape or not index or not isinstance(index[0], slice):
            return self._read(0, self._shape[0] if self._shape else 1).reshape(self._shape)[index]
        start, stop, step = index[0].indices(self._shape[0])
        if step != 1:
            return self._read(0, self._shape[0])[index]
        return self._read(start, max(start, stop))[(slice(None), *index[1:])]

    def _read(self, start: int, stop: int) -> np.ndarray:
        """Reads the rows `start` to `stop`."""
        if self._rows != (start, stop):
            dtype = np.dtype(DTYPES[self._dtype])
            row = dtype.itemsize * math.prod(self._shape[1:])
            content = disk.read_range(self._path, self._start + start * row, self._start + stop * row)
            self._rows = (start, stop)
            self._held = np.frombuffer(content, dtype).reshape(stop - start, *self._shape[1:])
        return self._held
