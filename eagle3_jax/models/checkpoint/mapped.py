"""A target as an engine on one CPU holds it, kept in a file: made once from the checkpoint, then mapped.

The file has the panels of all matrices, those of the LM head, embeddings and LM head by rows, for heads and learners,
and the norms. Its name is a digest of all that decides its bytes. Beside it lies a header in JSON, which is written
last: without one, or with one that tells of other bytes, the file is made again. Pages of the file are read when they
are used, and all processes share them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import filelock
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle3_jax.kernels.dispatch import default_implementation
from eagle3_jax.kernels.linear.api import pack, pack_rows, panels_of_processor
from eagle3_jax.kernels.linear.layouts import PanelForm, Panels, Quantised, QuantisedPanels
from eagle3_jax.mesh import parameter_path
from eagle3_jax.models.quantisation import MATRICES
from eagle3_jax.models.target import TargetModel
from eagle3_jax.runs import disk, machine, processes
from eagle3_jax.runs.progress import Progress, shown, told

_MOST_BYTES = 20 << 30  # of all files; the newest one may be larger
_ALIGNED = 64  # XLA reads an array where it lies if its address is a multiple
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Quantised, Panels, QuantisedPanels)}
_PACKED_ROWS = "packed_rows"  # see `TargetModel`


def may_map(files: Sequence[disk.Path]) -> bool:
    """Tells whether targets of these weight files are mapped here: local ones, for CPU kernels, unless turned off."""
    local = bool(files) and all(disk.system_path(path) is not None for path in files)
    asked = os.environ.get("EAGLE3_JAX_PANELS") != "0"
    return local and asked and processes.count() == 1 and default_implementation() == "cpu"


def digests(files: Sequence[disk.Path], cache: pathlib.Path, progress: Progress = False) -> dict[str, str]:
    """Returns the sha256 of a folder's files by name; they are noted in `cache`, and read where they have changed.

    A file that was written since has another time of change (ctime), which no program can set.
    """
    known, place = dict[str, Any](), str(disk.system_path(files[0]))
    notes = cache / f"{hashlib.sha256(place.encode()).hexdigest()}.digests"
    with contextlib.suppress(OSError, disk.JsonError):
        known = disk.read_sealed(notes)
    status = ((path.name, path.stat()) for path in files)
    stamps = {name: [x.st_size, x.st_ino, x.st_mtime_ns, x.st_ctime_ns] for name, x in status}
    if known.get("stamps") != stamps:
        found = {path.name: disk.digest(path) for path in shown(files, "check", "file", progress)}
        known |= {"stamps": stamps, "digests": found}
        with contextlib.suppress(OSError):
            disk.write_sealed(notes, known)
    return known["digests"]


def mapped_model(
    cache: pathlib.Path, made_of: list[Any], abstract: TargetModel, load: Callable[..., Any]
) -> TargetModel:
    """Maps a target from the folder `cache`, and first makes its file if there is none; one of several processes does.

    `made_of` decides the file's bytes beside this machine and the package's code; `abstract` has no arrays; `load` is
    `load_model` of the checkpoint. Raises OSError: the file can be neither read nor written.
    """
    key = json.dumps([made_of, panels_of_processor(), code()], sort_keys=True, default=repr)
    file = cache / f"{hashlib.sha256(key.encode()).hexdigest()}.panels"
    if not (leaves := _mapped(file)):
        cache.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            with told(f"waiting for another process that makes panels in {cache}"):
                held.enter_context(filelock.FileLock(cache / ".lock", fallback_to_soft=False))
            if not (leaves := _mapped(file)):
                if _header(file).exists():
                    processes.say(f"{file}: altered since it was made; it is made again")
                leaves = _made(file, load)
    model = jax.tree_util.tree_map_with_path(lambda path, _: leaves[parameter_path(path)], abstract)
    if _PACKED_ROWS in leaves:
        setattr(model, _PACKED_ROWS, nnx.Param(leaves[_PACKED_ROWS]))
    return model


@functools.cache
def code() -> str:
    """Hashes the code that reads a checkpoint and makes panels, as another version of the package may do otherwise."""
    found = hashlib.sha256()
    for folder in ("kernels/linear", "models"):
        for path in sorted((pathlib.Path(__file__).parents[2] / folder).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


def _made(file: pathlib.Path, load: Callable[..., Any]) -> dict[str, Any]:
    """Writes what `load_model` keeps, with its matrices packed, and maps the file."""
    for left_behind in file.parent.glob("*.panels*"):  # by killed processes
        if left_behind.suffix == ".partial" or not _header(left_behind).exists():
            left_behind.unlink()
    entries: dict[str, Any] = {}
    with disk.atomic(file) as temporary, temporary.open("wb") as stream:

        def keep(name: str, pieces: Iterator[Any], rows: int | None) -> None:
            packed = map(pack, pieces) if MATRICES.search(name) else pieces
            if entry := _write(stream, packed, rows):
                entries[name] = entry
            stream.flush()
            machine.release_freed()

        load(keep=keep)
        rows = _leaves(entries, temporary)["lm_head" if "lm_head" in entries else "embed"]
        keep(_PACKED_ROWS, pack_rows(rows), None)
        os.fsync(stream.fileno())  # or a power failure may leave a whole file without its bytes
    digest = digests([file], file.parent)[file.name]
    disk.write_sealed(_header(file), {"entries": entries, "digest": digest})
    _prune(file)
    return _leaves(entries, file)


def _write(stream: Any, pieces: Iterator[Any], rows: int | None) -> list[Any] | None:
    """Writes a parameter behind the others; its pieces follow each other along the first axis of its arrays.

    `rows` are those of all pieces together, where these have several arrays. Returns its entry in the header: its kind,
    static fields, and arrays (dtype, shape, first byte); None without a piece.
    """
    entry: list[Any] | None = None
    end = stream.tell()
    for piece in pieces:
        parts = [np.asarray(x) for x in jax.tree.leaves(piece)]
        if entry is None:
            fields = dataclasses.fields(piece) if type(piece).__name__ in _KINDS else ()
            static = {field.name: getattr(piece, field.name) for field in fields if field.metadata.get("static")}
            static |= {"dtype": static["dtype"].name} if static else {}
            entry = [type(piece).__name__, static, []]
            for x in parts:
                begin = -(-end // _ALIGNED) * _ALIGNED
                entry[2].append([x.dtype.name, [0, *x.shape[1:]], begin])
                end = begin + x.nbytes * (rows or len(x)) // len(x)
        for x, (_, shape, begin) in zip(parts, entry[2], strict=True):
            stream.seek(begin + shape[0] * x.nbytes // len(x))
            stream.write(np.ascontiguousarray(x).reshape(-1).view(np.uint8))
            shape[0] += len(x)
    return entry


def _prune(newest: pathlib.Path) -> None:
    """Removes the files that were mapped longest ago, where all of them take too much of the disk."""
    files = list(newest.parent.glob("*.panels"))
    excess = sum(path.stat().st_size for path in files) - _MOST_BYTES
    for path in sorted(files, key=lambda path: _header(path).stat().st_mtime):
        if excess > 0 and path != newest:
            excess -= path.stat().st_size
            path.unlink()
            _header(path).unlink()


def _header(file: pathlib.Path) -> pathlib.Path:
    return file.with_suffix(".json")


def _mapped(file: pathlib.Path) -> dict[str, Any]:
    """Maps the parameters of a file by name; none if it is not there, or other than its header tells."""
    try:
        header = disk.read_sealed(_header(file))
        if digests([file], file.parent)[file.name] != header["digest"]:
            return {}
    except (FileNotFoundError, disk.JsonError):
        return {}
    with contextlib.suppress(OSError):
        os.utime(_header(file))  # see `_prune`
    return _leaves(header["entries"], file)


def _leaves(entries: dict[str, Any], file: pathlib.Path) -> dict[str, Any]:
    """Maps the parameters of which the header has these entries."""
    content = np.asarray(np.memmap(file, np.uint8, "r"))
    found = {}
    for name, (kind, static, places) in entries.items():
        arrays = []
        for dtype, shape, begin in places:
            part = content[begin : begin + math.prod(shape) * jnp.dtype(dtype).itemsize]
            arrays.append(jax.device_put(part.view(jnp.dtype(dtype)).reshape(shape)))  # which copies nothing
        if kind not in _KINDS:
            (found[name],) = arrays
            continue
        given: dict[str, Any] = {"dtype": jnp.dtype(static["dtype"])}
        if "form" in static:
            given["form"] = PanelForm(*static["form"])
        names = (field.name for field in dataclasses.fields(_KINDS[kind]) if field.name not in static)
        found[name] = _KINDS[kind](**dict(itertools.zip_longest(names, arrays)), **static | given)
    return found
