"""Files that are whole or not there: atomic writes, exclusive locks, JSON, logs that survive a kill.

A path is a local one or an address in a bucket (`gs://`), where `bucket` does the work. Of the processes of one run
process 0 locks and writes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import glob
import hashlib
import io
import json
import mmap
import os
import pathlib
import shutil
import socket
import sys
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import filelock

from eagle3_jax.runs import processes
from eagle3_jax.runs.bucket import clients, leases, logs, objects
from eagle3_jax.runs.bucket.clients import Path

# The object that marks a folder of a bucket as whole.
_LAST = "manifest.json"
_AT_ONCE = 16  # questions on their way to a bucket

_T = TypeVar("_T")


class JsonError(ValueError):
    """A file without the JSON expected of it; the message names file and line."""


class AddressError(ValueError):
    """A bucket that does not exist or may not be used."""


class LockError(ValueError):
    """A file or folder that another run is writing, or that the run's processes do not share."""


def path_of(address: str | Path) -> Path:
    """Makes a path, of a local file or in a bucket."""
    return clients.path_of(address) if is_remote(address) else pathlib.Path(address)


def is_remote(path: str | Path) -> bool:
    """Tells whether a path lies in a bucket."""
    return clients.is_address(path)


def check_address(field: str, address: str, *, writable: bool = True) -> None:
    """Refuses the address of a bucket that does not exist or, with `writable`, may not be written; asks the bucket.

    Raises AddressError, as `check_name` does.
    """
    if writable or is_remote(address):
        check_name(field, path_of(address))
    if is_remote(address):
        try:
            objects.check(address, writable=writable)
        except ValueError as error:
            raise AddressError(f"{field}: {error}") from error


def check_name(field: str, path: Path) -> None:
    """Refuses, by AddressError, a path that Orbax, TensorStore or `etils` would take for another one or a pattern."""
    place = str(absolute(path))
    special = "*?[\\#" if is_remote(path) else "*?[\\"
    if strange := [character for character in special if character in place]:
        raise AddressError(f"{field}: got {place}, expected a path without {' '.join(strange)}")


def absolute(path: str | Path) -> Path:
    """Returns a path that does not depend on the working directory."""
    return path_of(path) if is_remote(path) else pathlib.Path(path).absolute()


def size(path: Path) -> int:
    """Returns the bytes of a file. Raises FileNotFoundError."""
    return objects.size(path) if is_remote(path) else path.stat().st_size


def open_binary(path: str | Path) -> io.BufferedReader:
    """Opens a file to be read from its beginning, in a bucket by ranges. Raises OSError."""
    return objects.open_binary(path_of(path)) if is_remote(path) else open(path, "rb")


def read_bytes(path: Path) -> bytes:
    """Returns a whole file. Raises OSError."""
    return b"".join(objects.pieces(path)) if is_remote(path) else path.read_bytes()


def read_range(path: Path, start: int, stop: int) -> bytes:
    """Returns a part of a file; several threads may ask at once. Raises OSError."""
    if is_remote(path):
        return objects.read(path, start, stop)
    with path.open("rb") as stream:
        stream.seek(start)
        return stream.read(stop - start)


def each(function: Callable[[Path], _T], paths: Sequence[Path]) -> list[_T]:
    """Returns a function's value of each path; several threads ask a bucket, as each answer takes a while."""
    if not paths or not is_remote(paths[0]):
        return list(map(function, paths))
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(function, paths))


def make_folder(folder: Path) -> None:
    """Makes a local folder and those above it; a bucket has none."""
    if not is_remote(folder):
        folder.mkdir(parents=True, exist_ok=True)


def free_bytes(folder: Path) -> int | None:
    """Returns the free space of a folder's file system; None for a bucket, which has no limit."""
    return None if is_remote(folder) else shutil.disk_usage(folder).free


def local(folder: Path, without: str = "*") -> pathlib.Path:
    """Returns a local folder with the files of this one: itself, or a copy that lives as long as this process.

    Files whose name ends with `without` are not copied.
    """
    return objects.mirror(folder, without) if is_remote(folder) else folder


def is_whole(folder: Path) -> bool:
    """Tells whether `atomic` wrote this folder; one in a bucket must hold a manifest."""
    return (folder / _LAST).exists() if is_remote(folder) else folder.exists()


def digest(path: str | Path) -> str:
    """Computes a file's sha256, in hex."""
    if is_remote(path):
        found = hashlib.sha256()
        for piece in objects.pieces(path_of(path)):
            found.update(piece)
        return found.hexdigest()
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def atomic(path: str | Path) -> Iterator[pathlib.Path]:
    """Yields a temporary local path, for a file or a folder; beside `path`, or of a bucket on this machine's disk.

    On success it takes the place of `path` (of a file or an empty folder, or of nothing); on failure it is removed.
    In a bucket a file is one object with a generation precondition; a folder is whole where its manifest is.
    """
    if is_remote(path):
        with objects.staged(path_of(path), last=_LAST) as temporary:
            yield temporary
        return
    path = pathlib.Path(path)
    # Hosts and containers share folders, and their process ids repeat.
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}.partial")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        if error.errno and error.filename is None:  # a write's error does not name the file
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        _remove(temporary)


@contextlib.contextmanager
def lock(path: str | Path) -> Iterator[None]:
    """Holds this run's exclusive right to write `path`, a file or a folder, until the block ends or process 0 dies.

    The lock is the operating system's own (flock), on `.<name>.lock` beside `path`: it vanishes with a killed owner.
    The file stays, since removing a locked file would let two processes in. Across hosts it holds where the file system
    shares locks (NFS does; a mounted bucket locks for one host only). What killed runs of `atomic` left is removed. In
    a bucket that object is a lease, which ends a while after its holder's death; a run that loses it ends.

    Raises LockError: another run holds it, or the run's processes do not share it.
    """
    path = path_of(path)
    file = path.with_name(f".{path.name}.lock")
    remote = is_remote(path)
    with contextlib.ExitStack() as held:

        def take() -> str:
            owner = f"process {os.getpid()} on host {socket.gethostname()}"
            try:
                held.enter_context(leases.lease(file, owner, _end) if remote else _lock(path, file, owner))
            except leases.Held as error:
                raise LockError(f"{path}: in use by {error}, wait for its end") from error
            return owner

        owner = processes.agree(take)
        there = leases.holder(file) if remote else file.read_text().strip() if file.exists() else None
        if there != owner:
            raise LockError(f"{path}: not what process 0 has there, expected a run_dir that all hosts share")
        yield
        processes.barrier()


@contextlib.contextmanager
def _lock(path: pathlib.Path, file: pathlib.Path, owner: str) -> Iterator[None]:
    """Holds a lock whose file names the owner. Raises Held."""
    path.parent.mkdir(parents=True, exist_ok=True)
    held = filelock.FileLock(file, blocking=False, fallback_to_soft=False)
    try:
        held.acquire()
    except filelock.Timeout as error:
        raise leases.Held(file.read_text().strip() or "another process") from error
    try:
        file.write_text(f"{owner}\n")
        for left_behind in [*path.parent.glob(f".{glob.escape(path.name)}.*.partial"), *path.rglob(".*.partial")]:
            _remove(left_behind)
        yield
    finally:
        held.release()


def _end(sentence: str) -> None:
    """Ends this process at once: another run may be writing now."""
    print(sentence, file=sys.stderr, flush=True)
    os._exit(1)


def read_json(path: str | Path) -> dict[str, Any]:
    """Reads the object in a JSON file. Raises JsonError."""
    return _object(read_bytes(path_of(path)), str(path))


def write_sealed(path: str | Path, values: dict[str, Any]) -> None:
    """Writes a JSON object with a checksum in it, atomically."""
    write_json(path, values | {"checksum": _checksum(values)})


def read_sealed(path: str | Path) -> dict[str, Any]:
    """Reads the object that `write_sealed` wrote. Raises JsonError: the file was altered."""
    return unsealed(read_json(path), path)


def unsealed(values: dict[str, Any], path: str | Path) -> dict[str, Any]:
    if values.pop("checksum", None) != _checksum(values):
        raise JsonError(f"{path}: altered since it was written")
    return values


def _checksum(values: dict[str, Any]) -> str:
    plain = json.loads(json.dumps(values))  # tuples are lists there, and keys are text
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def read_jsonl(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSONL file, one a line. Raises JsonError."""
    with open_binary(path) as stream:
        for number, line in enumerate(stream, start=1):
            yield _object(line, f"{path}, line {number}")


class Log:
    """A file of lines that grows and survives a kill; a context manager.

    A local line is in the file when `write` returns. In a bucket `path` is a folder of sealed segments; a kill loses
    the lines of the last seconds.
    """

    def __init__(self, path: Path) -> None:
        self._log = logs.SegmentedLog(path) if is_remote(path) else path.open("a", buffering=1, encoding="utf-8")

    def write(self, line: str) -> None:
        """Adds a line, with its line feed. Raises OSError."""
        self._log.write(line)

    def append(self, value: Any) -> None:
        """Adds a line for `read_log`: a checksum and JSON."""
        text = json.dumps(value, ensure_ascii=False)
        self.write(f"{zlib.crc32(text.encode()):08x} {text}\n")

    def __enter__(self) -> Log:
        return self

    def close(self) -> None:
        """Ends the log; all lines are stored then. Raises OSError."""
        self._log.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def log_lines(path: Path) -> list[bytes]:
    """Reads the whole lines of a log; empty where there is none. Cuts as `open_log` does."""
    with open_log(path) as stream:
        return stream.read().splitlines()


def read_log(path: str | Path) -> list[Any]:
    """Reads the values of `Log.append`; empty where there is no log. Raises JsonError: a whole line was altered."""
    with open_log(path_of(path)) as stream:
        return [value for _, value in log_values(stream, path)]


@contextlib.contextmanager
def open_log(path: Path) -> Iterator[io.BufferedIOBase]:
    """Opens a log to be read in any order, one in a bucket from this machine's disk; empty where there is none.

    A last line that a kill tore is cut off the file.
    """
    if is_remote(path):
        with tempfile.TemporaryFile() as stream:
            for segment in logs.read_segments(path):
                stream.write(segment)
            stream.seek(0)
            yield stream
        return
    cut_torn_line(path)
    with path.open("rb") if path.exists() else io.BytesIO() as stream:
        yield stream


def log_values(stream: io.BufferedIOBase, path: str | Path) -> Iterator[tuple[int, Any]]:
    """Yields what `Log.append` wrote, and the byte at which its line begins. Raises JsonError, which names `path`."""
    place = 0
    for number, line in enumerate(stream, start=1):
        yield place, log_value(line, f"{path}, line {number}")
        place += len(line)


def log_value(line: bytes, where: str) -> Any:
    """What `Log.append` wrote into a line. Raises JsonError: it was altered."""
    checksum, _, text = line.rstrip(b"\n").partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        raise JsonError(f"{where}: altered since it was written; remove the file")
    return json.loads(text)


def rewrite_log(path: Path, lines: Sequence[bytes]) -> None:
    """Replaces the lines of a log, atomically."""
    content = b"".join(line + b"\n" for line in lines)
    if is_remote(path):
        logs.rewrite_log(path, content)
    else:
        with atomic(path) as temporary:
            temporary.write_bytes(content)


def remove_log(path: Path) -> None:
    """Removes a log."""
    objects.remove(path) if is_remote(path) else path.unlink()


def remove_folder(folder: Path) -> None:
    """Removes a folder with all below it, where there is one."""
    objects.remove(folder) if is_remote(folder) else _remove(folder)


def cut_torn_line(path: pathlib.Path) -> None:
    """Removes the text behind the last newline of a file that is appended to, if the file exists."""
    size = path.stat().st_size if path.exists() else 0
    if not size:  # which cannot be mapped
        return
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as raw:
        whole = raw.rfind(b"\n") + 1
    if whole < size:
        os.truncate(path, whole)


def _object(text: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: thousands of brackets
        raise JsonError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise JsonError(f"{where}: got {type(value).__name__}, expected an object")
    return value


def write_json(path: str | Path, value: Any) -> None:
    """Writes JSON atomically, with stable key order."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def _remove(path: pathlib.Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
