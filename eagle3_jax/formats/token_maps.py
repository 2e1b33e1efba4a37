"""Token maps of FR-Spec (https://arxiv.org/abs/2502.14856): the frequent tokens, which alone are drafted.

SGLang takes them as `--speculative-token-map`, a list of ids that torch saved. That is a pickle in an archive: it is
taken apart here without running it, and anything but a list of numbers is refused.
"""

from __future__ import annotations

import json
import pathlib
import pickletools
import zipfile
from typing import Any

import numpy as np
import safetensors.numpy
from jaxtyping import Int64
from safetensors import SafetensorError

NAME = "token_map"
# What a pickled list of integers is made of, beside the integers.
_LIST = ("PROTO", "FRAME", "EMPTY_LIST", "MARK", "APPEND", "APPENDS", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP")
_INTEGERS = ("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1")


def read(path: str | pathlib.Path, vocab_size: int) -> Int64[np.ndarray, " ids"]:
    """The ids, ascending, each once.

    Args:
        path: .json (a list), .safetensors (a tensor "token_map", or the only one), or .pt (a list that torch saved).

    Raises:
        ValueError: another kind of file, or ids that are none of a vocabulary of `vocab_size`.
    """
    path = pathlib.Path(path)
    readers = {".json": _json, ".safetensors": _safetensors, ".pt": _torch}
    if path.suffix not in readers:
        raise ValueError(f"token_map: got {path.name}, expected one of {', '.join(readers)}")
    ids = np.asarray(readers[path.suffix](path))
    if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"token_map: {path}: got {ids.dtype} {list(ids.shape)}, expected a list of integers")
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise ValueError(f"token_map: {path}: got {int(outside[0])}, expected ids from 0 to {vocab_size - 1}")
    found, counts = np.unique(ids.astype(np.int64), return_counts=True)
    if len(found) < len(ids):
        raise ValueError(f"token_map: {path}: got {int(found[counts > 1][0])} twice, expected each id once")
    return found


def _json(path: pathlib.Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"token_map: {path}: not JSON ({error})") from error


def _safetensors(path: pathlib.Path) -> Any:
    try:
        tensors = safetensors.numpy.load_file(path)
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"token_map: {path}: not safetensors ({error})") from error
    if NAME not in tensors and len(tensors) != 1:
        raise ValueError(f"token_map: {path}: got tensors {sorted(tensors)}, expected {NAME!r}")
    return tensors.get(NAME, next(iter(tensors.values())))


def _torch(path: pathlib.Path) -> list[int]:
    try:
        with zipfile.ZipFile(path) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
            operations = list(pickletools.genops(archive.read(member)))
    except (zipfile.BadZipFile, ValueError) as error:
        raise ValueError(f"token_map: {path}: not what torch saves ({error})") from error
    other = next((op.name for op, *_ in operations if op.name not in (*_LIST, *_INTEGERS)), None)
    if other is not None:
        raise ValueError(f"token_map: {path}: got a pickle with {other}, expected a list of integers and nothing else")
    return [int(str(value)) for op, value, _ in operations if op.name in _INTEGERS]
