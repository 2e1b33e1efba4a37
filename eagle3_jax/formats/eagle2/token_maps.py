"""Token maps of FR-Spec (https://arxiv.org/abs/2502.14856): the frequent tokens, to which drafts are limited.

SGLang takes them as `--speculative-token-map`, ids that torch saved, in a file or on a hub. A torch file is an archive
of a pickle and of the tensor's numbers. The pickle is parsed here without being run; anything but a list or a vector of
integers is refused.
"""

from __future__ import annotations

import json
import pathlib
import pickletools
import zipfile
from typing import Any

import numpy as np
import safetensors.numpy
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from jaxtyping import Int64
from safetensors import SafetensorError

NAME = "token_map"
# Opcodes without values: versions, lengths, and memoised objects that are not used again.
_SILENT = ("PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT")
_INTEGERS = ("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1")
_LIST = ("EMPTY_LIST", "MARK", "APPEND", "APPENDS", "STOP", *_INTEGERS)
# Opcodes of a pickled one-dimensional tensor: its constructor (storage: type, name, device, length), then offset, size,
# stride, no gradient, no hooks. None stands for any integer.
_TENSOR = (
    *("GLOBAL", "MARK", "MARK", "BINUNICODE", "GLOBAL", "BINUNICODE", "BINUNICODE", None, "TUPLE", "BINPERSID"),
    *(None, None, "TUPLE1", None, "TUPLE1", "NEWFALSE", "GLOBAL", "EMPTY_TUPLE", "REDUCE", "TUPLE", "REDUCE", "STOP"),
)
_STORAGES = {"torch LongStorage": "i8", "torch IntStorage": "i4"}


def read(path: str | pathlib.Path, vocab_size: int) -> Int64[np.ndarray, " ids"]:
    """Reads the ids of a token map, ascending and distinct.

    The file (see `locate`) is .json (a list), .safetensors (a tensor "token_map", or the only one), or .pt (a list or a
    tensor that torch saved). Raises ValueError: none of these, or ids outside a vocabulary of `vocab_size`.
    """
    path = locate(path)
    try:
        found = _READERS[path.suffix](path)
    except (ValueError, KeyError, SafetensorError, zipfile.BadZipFile) as error:
        raise ValueError(f"token_map: {path}: no token map ({error})") from error
    if isinstance(found, list) and (others := [x for x in found if type(x) is not int]):  # numpy reads true as 1
        raise ValueError(f"token_map: {path}: got {others[0]!r}, expected a list of integers")
    ids = np.asarray(found)
    if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"token_map: {path}: got {ids.dtype} {list(ids.shape)}, expected a list of integers")
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise ValueError(f"token_map: {path}: got {int(outside[0])}, expected ids from 0 to {vocab_size - 1}")
    return np.unique(ids.astype(np.int64))  # the script of FR-Spec writes Llama 3's BOS twice


def locate(path: str | pathlib.Path) -> pathlib.Path:
    """Returns a local file, or fetches "organisation/repository/file[@revision]" from a hub. Raises ValueError."""
    name, _, revision = str(path).partition("@")
    here = pathlib.Path(path).exists()
    if pathlib.Path(path if here else name).suffix not in _READERS:
        raise ValueError(f"token_map: got {path}, expected one of {', '.join(_READERS)}")
    if here:
        return pathlib.Path(path)
    parts, reason = name.split("/", 2), ""
    if len(parts) == 3 and all(parts):
        try:
            return pathlib.Path(hf_hub_download("/".join(parts[:2]), parts[2], revision=revision or None))
        except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError) as error:
            reason = f" ({type(error).__name__})"
    expected = "a file, or organisation/repository/file[@revision] on a hub that answers"
    raise ValueError(f"token_map: got {path}, expected {expected}{reason}")


def _json(path: pathlib.Path) -> Any:
    return json.loads(path.read_text())


def _safetensors(path: pathlib.Path) -> Any:
    tensors = safetensors.numpy.load_file(path)
    if NAME not in tensors and len(tensors) != 1:
        raise ValueError(f"got tensors {sorted(tensors)}, expected {NAME!r}")
    return tensors.get(NAME, next(iter(tensors.values())))


def _torch(path: pathlib.Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        pickled = [(op.name, value) for op, value, _ in pickletools.genops(archive.read(member))]
        pickled = [(name, value) for name, value in pickled if name not in _SILENT]
        if tuple(None if name in _INTEGERS else name for name, _ in pickled) == _TENSOR:
            return _tensor(archive, member.removesuffix("data.pkl"), [x for _, x in pickled if x is not None])
    names = [name for name, _ in pickled]
    other = next((name for name in names if name not in _LIST), None)
    if other is not None or names.count("EMPTY_LIST") != 1:
        held = other or f"{names.count('EMPTY_LIST')} lists"
        raise ValueError(f"got a pickle with {held}, expected a list or a vector of integers and nothing else")
    return [value for name, value in pickled if name in _INTEGERS]


def _tensor(archive: zipfile.ZipFile, root: str, values: list[Any]) -> np.ndarray:
    """Reads a tensor's numbers from the bytes of its storage; `values` are the operands of `_TENSOR`'s opcodes."""
    build, kind, storage, key, _, length, offset, size, stride, hooks = values
    if (build, kind, stride, hooks) != ("torch._utils _rebuild_tensor_v2", "storage", 1, "collections OrderedDict"):
        raise ValueError(f"a pickle that calls {build}, {hooks} with stride {stride}")
    if storage not in _STORAGES:
        raise ValueError(f"a tensor in {storage}, expected {' or '.join(_STORAGES)}")
    names = archive.namelist()
    order = archive.read(f"{root}byteorder") if f"{root}byteorder" in names else b"little"
    held = np.frombuffer(archive.read(f"{root}data/{key}"), (">" if order == b"big" else "<") + _STORAGES[storage])
    if len(held) != length or not 0 <= offset <= offset + size <= length:
        raise ValueError(f"{size} of {length} numbers from {offset} on, in a storage of {len(held)}")
    return held[offset : offset + size]


_READERS = {".json": _json, ".safetensors": _safetensors, ".pt": _torch}
