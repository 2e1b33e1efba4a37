"""Files that are whole or not there: atomic writes, exclusive locks, JSON, logs that survive a kill.

Of the processes of one run process 0 locks and writes.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import pathlib
import shutil
import socket
import uuid
import zlib
from collections.abc import Iterator
from typing import Any, TextIO

import filelock

from eagle3_jax.runs import processes


class JsonError(ValueError):
    """A file that does not hold the JSON it should; the message names file and line."""


class LockError(ValueError):
    """A file or folder that another run is writing, or that the run's processes do not share."""


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
    except OSError as error:
        if error.errno and error.filename is None:  # of a write, which does not say where
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        _remove(temporary)


@contextlib.contextmanager
def lock(path: str | pathlib.Path) -> Iterator[None]:
    """Holds this run's exclusive right to write `path`, a file or a folder, until the block ends or process 0 dies.

    The operating system's own lock (flock) on `.<name>.lock` beside `path`: it vanishes with a killed owner. The file
    stays, as removing a locked file would let two processes in. Across hosts it holds where the file system says so
    (NFS does; a mounted bucket locks for one host only). What `atomic` left behind in killed runs is removed.

    Raises:
        LockError: another run holds it; the message says which process. Or the run's processes do not share it.
    """
    path = pathlib.Path(path)
    file = path.with_name(f".{path.name}.lock")
    with contextlib.ExitStack() as held:
        owner = processes.agree(lambda: held.enter_context(_lock(path, file)))
        if not file.exists() or file.read_text() != owner:
            raise LockError(f"{path}: not what process 0 has there, expected a run_dir that all hosts share")
        yield
        processes.barrier()


@contextlib.contextmanager
def _lock(path: pathlib.Path, file: pathlib.Path) -> Iterator[str]:
    """Yields what the lock's file says of its owner."""
    path.parent.mkdir(parents=True, exist_ok=True)
    held = filelock.FileLock(file, blocking=False, fallback_to_soft=False)
    try:
        held.acquire()
    except filelock.Timeout as error:
        owner = file.read_text().strip() or "another process"
        raise LockError(f"{path}: in use by {owner}, wait for its end") from error
    try:
        owner = f"process {os.getpid()} on host {socket.gethostname()}\n"
        file.write_text(owner)
        for left_behind in [*path.parent.glob(f".{glob.escape(path.name)}.*.partial"), *path.rglob(".*.partial")]:
            _remove(left_behind)
        yield owner
    finally:
        held.release()


def read_json(path: str | pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file. Raises JsonError."""
    return _object(pathlib.Path(path).read_bytes(), str(path))


def write_sealed(path: str | pathlib.Path, values: dict[str, Any]) -> None:
    """Writes a JSON object with a checksum in it, atomically."""
    write_json(path, values | {"checksum": _checksum(values)})


def read_sealed(path: str | pathlib.Path) -> dict[str, Any]:
    """What `write_sealed` wrote. Raises JsonError: not that, to the letter."""
    return unsealed(read_json(path), path)


def unsealed(values: dict[str, Any], path: str | pathlib.Path) -> dict[str, Any]:
    if values.pop("checksum", None) != _checksum(values):
        raise JsonError(f"{path}: altered since it was written")
    return values


def _checksum(values: dict[str, Any]) -> str:
    plain = json.loads(json.dumps(values))  # tuples are lists there, and keys are text
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def read_jsonl(path: str | pathlib.Path) -> Iterator[dict[str, Any]]:
    """The objects in a JSONL file, one a line. Raises JsonError."""
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            yield _object(line, f"{path}, line {number}")


def append(log: TextIO, value: Any) -> None:
    """Adds a line to a log that `read_log` reads: a checksum and JSON."""
    text = json.dumps(value, ensure_ascii=False)
    log.write(f"{zlib.crc32(text.encode()):08x} {text}\n")
    log.flush()


def read_log(path: str | pathlib.Path) -> list[Any]:
    """What `append` wrote; empty where there is no log. A last line that a kill tore is cut off the file.

    Raises:
        JsonError: a whole line was altered.
    """
    path = pathlib.Path(path)
    cut_torn_line(path)
    values = []
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else (), start=1):
        checksum, _, text = line.partition(b" ")
        if checksum != b"%08x" % zlib.crc32(text):
            raise JsonError(f"{path}, line {number}: altered since it was written; remove the file")
        values.append(json.loads(text))
    return values


def cut_torn_line(path: pathlib.Path) -> None:
    """Removes what follows the last newline of a file that is appended to, where there is such a file."""
    raw = path.read_bytes() if path.exists() else b""
    if (whole := raw.rfind(b"\n") + 1) < len(raw):
        os.truncate(path, whole)


def _object(text: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: thousands of brackets
        raise JsonError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise JsonError(f"{where}: got {type(value).__name__}, expected an object")
    return value


def write_json(path: str | pathlib.Path, value: Any) -> None:
    """Writes JSON atomically, with stable key order."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def _remove(path: pathlib.Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
