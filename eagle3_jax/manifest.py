"""Output folders that know what they hold: `manifest.json`, exclusive locks, atomic files, resumption.

A verb works inside `claim` and ends with `finish`. `claim` locks the folder, removes what a killed run left half
written, and answers whether the folder already holds the finished result of exactly this work. It refuses a folder that
another process is working on, or that holds the result of other work.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import socket
import uuid
from collections.abc import Iterator
from typing import Any

import filelock

NAME = "manifest.json"
_PACKAGES = ("eagle3_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "transformers", "numpy")

_TIMINGS = ("seconds", "tokens_per_second")


class ManifestError(ValueError):
    """A folder whose manifest is missing, unfinished, or made from something else."""


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a result."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def digest(path: str | pathlib.Path) -> str:
    """sha256 of a file, in hex."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def atomic(path: str | pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary path beside `path`, for a file or a folder.

    On success it takes the place of `path` (of a file or an empty folder, or of nothing); on failure it is removed.
    """
    path = pathlib.Path(path)
    # Processes of several hosts and containers share folders: there, process ids repeat.
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}.partial")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        _remove(temporary)


@contextlib.contextmanager
def lock(path: str | pathlib.Path) -> Iterator[None]:
    """Holds the exclusive right to write `path`, a file or a folder, until the block ends or the process dies.

    The operating system's own lock (flock) on `.<name>.lock` beside `path`: it vanishes with a killed owner. The file
    stays, as removing a locked file would let two processes in. Across hosts it holds where the file system says so
    (NFS does; a mounted bucket locks for one host only). What `atomic` left behind in killed runs is removed.

    Raises:
        ManifestError: another process holds it; the message says which.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.with_name(f".{path.name}.lock")
    held = filelock.FileLock(file, blocking=False, fallback_to_soft=False)
    try:
        held.acquire()
    except filelock.Timeout as error:
        owner = file.read_text().strip() or "another process"
        raise ManifestError(f"{path}: in use by {owner}, wait for its end") from error
    try:
        file.write_text(f"process {os.getpid()} on host {socket.gethostname()}\n")
        for left_behind in [*path.parent.glob(f".{glob.escape(path.name)}.*.partial"), *path.rglob(".*.partial")]:
            _remove(left_behind)
        yield
    finally:
        held.release()


def write_json(path: str | pathlib.Path, value: Any) -> None:
    """Writes JSON atomically, with stable key order."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def claim(folder: str | pathlib.Path, identity: dict[str, Any]) -> Iterator[bool]:
    """Locks `folder` for the work that `identity` describes.

    Args:
        identity: see `begin`.

    Yields:
        True when the folder already holds the finished result, so that there is nothing to do.

    Raises:
        ManifestError: another process is working on the folder, or it holds other work.
    """
    with lock(folder):
        yield begin(folder, identity)


def _remove(path: pathlib.Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def begin(folder: str | pathlib.Path, identity: dict[str, Any]) -> bool:
    """Writes the manifest of unfinished work into `folder`, or compares the one that is there. See `claim`.

    Args:
        identity: all that decides the result: verb, config sections, input digests, target identity. JSON-ready.

    Returns:
        True when the folder already holds the finished result, so that there is nothing to do.

    Raises:
        ManifestError: the folder holds other work; the message names each differing field.
    """
    folder = pathlib.Path(folder)
    path = folder / NAME
    identity = json.loads(json.dumps(identity))
    if path.exists():
        found = _load(path)
        differing = list(_differences(found["identity"], identity))
        if differing:
            lines = "\n".join(f"  {field}: found {old!r}, expected {new!r}" for field, old, new in differing)
            raise ManifestError(
                f"{folder} was made from something else:\n{lines}\nremove it, or choose another run_dir"
            )
        return bool(found.get("finished"))
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, {"finished": False, "identity": identity, "versions": versions()})
    return False


def finish(folder: str | pathlib.Path, **results: Any) -> None:
    """Marks the folder as complete and records `results` (counts, rates, file digests)."""
    path = pathlib.Path(folder) / NAME
    write_json(path, _load(path) | {"finished": True, "results": results, "versions": versions()})


def read(folder: str | pathlib.Path, made_by: str) -> dict[str, Any]:
    """The manifest of a finished folder: {"identity": ..., "results": ..., "versions": ...}.

    Raises:
        ManifestError: no manifest, or the verb that makes it has not finished.
    """
    path = pathlib.Path(folder) / NAME
    if not path.exists():
        raise ManifestError(f"{path}: not found, expected the output of `python -m eagle3_jax.{made_by}`")
    manifest = _load(path)
    if not manifest.get("finished"):
        raise ManifestError(f"{folder}: unfinished, run `python -m eagle3_jax.{made_by}` to its end first")
    return manifest


def fingerprint(manifest: dict[str, Any]) -> str:
    """Identifies a finished folder as the input of the next verb: a digest over its identity and results.

    What a clock said is left out, so that the same work done again has the same fingerprint.
    """
    essence = json.dumps(_untimed([manifest["identity"], manifest["results"]]), sort_keys=True)
    return hashlib.sha256(essence.encode()).hexdigest()


def _untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _untimed(item) for key, item in value.items() if key not in _TIMINGS}
    return [_untimed(item) for item in value] if isinstance(value, list) else value


def _load(path: pathlib.Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise ManifestError(f"{path}: not valid JSON ({error}), expected a manifest") from error
    if not isinstance(manifest, dict) or "identity" not in manifest:
        raise ManifestError(f"{path}: got no identity, expected a manifest")
    return manifest


def _differences(found: Any, expected: Any, field: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted(found.keys() | expected.keys()):
            yield from _differences(found.get(key), expected.get(key), f"{field}.{key}" if field else key)
    elif found != expected:
        yield field, found, expected
