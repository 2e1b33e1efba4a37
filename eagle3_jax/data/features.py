"""Feature shards: a record for each conversation, many records per ArrayRecord file, random access over a folder.

A record is a safetensors buffer. Each shard has a JSON sidecar with the lengths and checksums (CRC-32) of its records,
its size, and the writer's notes. The sidecar is written last: its presence marks the shard as complete.
"""

from __future__ import annotations

import contextlib
import functools
import re
import resource
import threading
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Literal, SupportsIndex

import ml_dtypes  # noqa: F401  (names of dtypes)
import numpy as np
import safetensors
import safetensors.numpy
from jaxtyping import Int32

from eagle3_jax.data import shard_ranges
from eagle3_jax.runs import command, disk

command.require("train")
import array_record.python.array_record_module as array_record  # noqa: E402

Record = dict[str, np.ndarray]

_SUFFIX = ".array_record"
# Share of a process's open files that shards may take, since they stay open.
_OPEN_SHARE = 0.5
_SHARD = re.compile(r"\d{5}-of-(\d{5})\.array_record")
States = Literal["fp8", "bfloat16", "none"]
# Field -> (safetensors' name of its dtype, dimensions).
_TOKENS = {"token_ids": ("I32", 1), "loss_mask": ("U8", 1)}
_STATES = ("aux", "last_hidden")
_SCALES = {f"{name}_scale": ("F32", 2) for name in _STATES}
_FIELDS: dict[States, dict[str, tuple[str, int]]] = {
    "none": _TOKENS,
    "bfloat16": _TOKENS | {name: ("BF16", 2) for name in _STATES} | {"argmax": ("I32", 1)},
    "fp8": _TOKENS | {name: ("F8_E4M3", 2) for name in _STATES} | _SCALES | {"argmax": ("I32", 1)},
}
_NAMES = {"I32": "int32", "U8": "uint8", "F32": "float32", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn"}
_DTYPES = {code: np.dtype(name) for code, name in _NAMES.items()}


def token_bytes(aux_layers: int, hidden_size: int, states: States) -> int:
    """Returns the bytes of one token in a shard."""
    widths = {"aux": aux_layers * hidden_size, "last_hidden": hidden_size, "aux_scale": aux_layers}
    return sum(_DTYPES[code].itemsize * widths.get(name, 1) for name, (code, _) in _FIELDS[states].items())


class FeatureError(ValueError):
    """An invalid record or shard; the message names the file."""


def encode_record(record: Record) -> bytes:
    """Serialises one conversation's features.

    `token_ids` int32 [L]; `loss_mask` uint8 [L], 1 where the token is the target's own; `aux` bfloat16 [L, n_aux * H],
    the aux hidden states in ascending order of boundary; `last_hidden` bfloat16 [L, H], after the target's final norm;
    `argmax` int32 [L], the target's most likely token after position t. The last three are all present or all absent.
    In 8 bits `aux` and `last_hidden` are float8_e4m3fn, times `aux_scale` float32 [L, n_aux] and `last_hidden_scale`
    float32 [L, 1] (see `models.fp8`).

    Raises FeatureError: missing or surplus fields, wrong dtypes, lengths that do not agree, or a scale that is none.
    """
    _check(record)
    return safetensors.numpy.save({name: np.ascontiguousarray(x) for name, x in record.items()})


def decode_record(data: bytes) -> Record:
    """Inverts `encode_record`. Raises FeatureError: not a feature record."""
    try:
        parts = safetensors.deserialize(data)
        record = {name: np.frombuffer(x["data"], _DTYPES[x["dtype"]]).reshape(x["shape"]) for name, x in parts}
    except (safetensors.SafetensorError, KeyError) as error:
        raise FeatureError(f"feature record: {error}") from error
    _check(record)
    return record


def shard_path(folder: str | disk.Path, index: int, shards: int) -> disk.Path:
    """Names shard `index` of `shards`; the total in the name reveals missing shards."""
    return disk.path_of(folder) / f"{index:05d}-of-{shards:05d}{_SUFFIX}"


def write_shard(path: str | disk.Path, records: Iterable[Record], notes: Any = None) -> None:
    """Writes a shard and its sidecar atomically.

    `notes`: any JSON value, for `read_notes`; a dict may be filled while `records` is consumed. Raises FeatureError: an
    invalid record, nothing is left behind; OSError: the disk is full, or the write fails for another reason.
    """
    path = disk.path_of(path)
    lengths, checksums = [], []
    with disk.atomic(path) as temporary:
        # One uncompressed record per group: random access reads only the record, and hidden states barely compress.
        writer = array_record.ArrayRecordWriter(str(temporary), "group_size:1,uncompressed")
        try:
            for record in records:
                data = encode_record(record)
                with _disk_errors(path):
                    writer.write(data)
                lengths.append(len(record["token_ids"]))
                checksums.append(zlib.crc32(data))
        finally:
            with _disk_errors(path):
                writer.close()
        size = temporary.stat().st_size
    about = {"bytes": size, "lengths": lengths, "checksums": checksums, "notes": notes}
    disk.write_sealed(path.with_suffix(".json"), about)


@contextlib.contextmanager
def _disk_errors(path: disk.Path) -> Iterator[None]:
    """Turns array_record's unspecific RuntimeError into OSError."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(f"{path}: not written ({error})") from error


def is_complete(path: str | disk.Path) -> bool:
    """Tells whether `write_shard` finished this shard and its size is unchanged."""
    path = disk.path_of(path)
    return path.with_suffix(".json").exists() and path.exists() and disk.size(path) == _read_sidecar(path)["bytes"]


def read_notes(path: str | disk.Path) -> Any:
    """Returns the notes given to `write_shard`. Raises FeatureError."""
    return _read_sidecar(disk.path_of(path))["notes"]


class FeatureSource:
    """Random access over all shards of a folder; `lengths` are the tokens of each record, int32 [records].

    The constructor reads only the sidecars. A shard is opened at its first read and stays open, and an instance can be
    pickled for worker processes.

    Raises FeatureError: in the constructor, a missing, foreign or truncated shard; at a read, an altered one.
    """

    def __init__(self, folder: str | disk.Path) -> None:
        self.folder = disk.path_of(folder)
        self._paths = _shards(self.folder)
        sidecars = disk.each(_checked_sidecar, self._paths)
        self.lengths: Int32[np.ndarray, " records"] = np.concatenate(
            [np.asarray(sidecar["lengths"], np.int32) for sidecar in sidecars]
        )
        self._checksums = np.concatenate([np.asarray(sidecar["checksums"], np.uint32) for sidecar in sidecars])
        self._ends = np.cumsum([len(sidecar["lengths"]) for sidecar in sidecars])
        self._prepare()

    def _prepare(self) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._open = functools.lru_cache(max(1, int(soft * _OPEN_SHARE)))(_open)
        self._opening = threading.Lock()  # two threads would open a shard twice

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: SupportsIndex) -> Record:
        at = range(len(self))[index.__index__()]  # negative indices and IndexError as in a list
        shard = self.shard(at)
        path = self._paths[shard]
        try:
            with self._opening:
                opened = self._open(path)
            (data,) = opened.read([at - self._start(shard)])
            if zlib.crc32(data) != self._checksums[at]:
                raise FeatureError("another checksum than its sidecar's")
            return decode_record(data)
        except (RuntimeError, IndexError, FeatureError) as error:
            raise FeatureError(f"{path}, record {at}: unreadable ({error}); remove it and extract again") from error

    def shard(self, index: int) -> int:
        """Returns the number of a record's shard."""
        return int(np.searchsorted(self._ends, index, side="right"))

    def name(self, index: int) -> str:
        """Names a record for messages: its conversation, if the notes have `ids`, its shard and its index."""
        shard = self.shard(index)
        path, at = self._paths[shard], index - self._start(shard)
        notes = read_notes(path)
        conversation = f"{notes['ids'][at]}, " if isinstance(notes, dict) and "ids" in notes else ""
        return f"{conversation}{self.folder.name}/{path.name}[{at}]"

    def _start(self, shard: int) -> int:
        return int(self._ends[shard - 1]) if shard else 0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_open", "_opening")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._prepare()


def _open(path: disk.Path) -> Any:
    if local := disk.system_path(path):
        return array_record.ArrayRecordReader(str(local), "readahead_buffer_size:0,max_parallelism:0")
    return shard_ranges.RangedShard(lambda start, stop: disk.read_range(path, start, stop), disk.size(path))


def _read_sidecar(path: disk.Path) -> dict[str, Any]:
    sidecar = path.with_suffix(".json")
    try:
        return disk.read_sealed(sidecar)
    except FileNotFoundError as error:
        raise FeatureError(f"{sidecar}: not found, the shard beside it is incomplete; extract again") from error
    except disk.JsonError as error:
        raise FeatureError(f"{error}; remove it and extract again") from error


def _checked_sidecar(path: disk.Path) -> dict[str, Any]:
    sidecar = _read_sidecar(path)
    if (size := disk.size(path)) != sidecar["bytes"]:
        raise FeatureError(f"{path}: got {size} bytes, expected {sidecar['bytes']}; remove it and extract again")
    return sidecar


def _shards(folder: disk.Path) -> list[disk.Path]:
    paths = sorted(folder.glob(f"*{_SUFFIX}"))
    if not paths:
        raise FeatureError(f"{folder}: no {_SUFFIX} files, expected the output of `python -m eagle3_jax.extract`")
    match = _SHARD.fullmatch(paths[0].name)
    shards = int(match[1]) if match else 0
    found, expected = {path.name for path in paths}, {shard_path(folder, i, shards).name for i in range(shards)}
    if found != expected:
        missing, foreign = (", ".join(sorted(names)) or "none" for names in (expected - found, found - expected))
        counts = f"got {len(found)} shards, expected {shards}"
        raise FeatureError(f"{folder}: {counts}; missing: {missing}; foreign: {foreign}")
    return paths


def _check(record: Record) -> None:
    """Raises FeatureError: fields that no record has together, or scales that no encoder writes."""
    states = record.keys() - _TOKENS.keys()
    fields = _FIELDS["fp8" if states & _SCALES.keys() else "bfloat16" if states & _FIELDS["fp8"].keys() else "none"]
    problems = [f"{name}: missing" for name in fields if name not in record]
    problems += [f"{name}: not a field" for name in record if name not in fields]
    length = len(record["token_ids"]) if "token_ids" in record else None
    for name in fields.keys() & record.keys():
        array, (code, dimensions) = record[name], fields[name]
        if array.dtype != _DTYPES[code] or array.ndim != dimensions or (length is not None and len(array) != length):
            expected = f"{_NAMES[code]} {'[L]' if dimensions == 1 else '[L, width]'} with L = {length}"
            problems.append(f"{name}: got {array.dtype} {list(array.shape)}, expected {expected}")
    for name in () if problems else _SCALES.keys() & record.keys():
        count, width = record[name].shape[1], record[name.removesuffix("_scale")].shape[1]
        if not count or width % count:
            problems.append(f"{name}: got {count} scales a token, expected a divisor of the width {width}")
        bad = np.flatnonzero(~(np.isfinite(record[name]) & (record[name] > 0)).all(1))
        if len(bad):
            problems.append(f"{name}: got {record[name][bad[0]]} at token {bad[0]}, expected finite numbers above 0")
    if problems:
        raise FeatureError("feature record:\n  " + "\n  ".join(problems))
