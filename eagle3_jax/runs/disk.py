"""Files that are whole or not there: atomic writes, exclusive locks, JSON, logs that survive a kill.

A path lies in a local folder or in a bucket; the address tells which `Store` answers. Of the processes of one run
process 0 locks and writes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import io
import json
import os
import socket
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from eagle3_jax.runs import processes
from eagle3_jax.runs.bucket.clients import SCHEME
from eagle3_jax.runs.bucket.store import Bucket
from eagle3_jax.runs.store import Path, Store

_P = ParamSpec("_P")
_T = TypeVar("_T")
_LOCAL, _BUCKET = Store(), Bucket()


def store_of(address: Any) -> Store:
    """Returns the store in which an address lies."""
    return _BUCKET if str(address).startswith(SCHEME) else _LOCAL


def _of_address(method: Callable[Concatenate[Store, _P], _T]) -> Callable[_P, _T]:
    """Makes a function of a store's method: the address, its first argument, tells the store."""

    @functools.wraps(method)
    def function(*arguments: _P.args, **named: _P.kwargs) -> _T:
        return getattr(store_of(arguments[0]), method.__name__)(*arguments, **named)

    return function


path_of = _of_address(Store.path_of)
system_path = _of_address(Store.system_path)
size = _of_address(Store.size)
open_binary = _of_address(Store.open_binary)
read_range = _of_address(Store.read_range)
local = _of_address(Store.local)
atomic = _of_address(Store.atomic)
is_whole = _of_address(Store.is_whole)
outbox = _of_address(Store.outbox)
remove = _of_address(Store.remove)
open_log = _of_address(Store.open_log)
rewrite_log = _of_address(Store.rewrite_log)


class JsonError(ValueError):
    """A file without the JSON expected of it; the message names file and line."""


class AddressError(ValueError):
    """A bucket that does not exist or may not be used."""


class LockError(ValueError):
    """A file or folder that another run is writing, or that the run's processes do not share."""


def check_address(field: str, address: str | Path, *, writable: bool = True, asks: bool = True) -> None:
    """Refuses characters that clients cannot use; `asks` whether a bucket is there, `writable`. Raises AddressError."""
    try:
        store_of(address).check(path_of(address), writable, asks)
    except ValueError as error:
        raise AddressError(f"{field}: {error}") from error


def read_bytes(path: str | Path) -> bytes:
    """Returns a whole file. Raises OSError."""
    return b"".join(store_of(path).pieces(path))


def digest(path: str | Path) -> str:
    """Computes a file's sha256, in hex. Raises OSError."""
    found = hashlib.sha256()
    for piece in store_of(path).pieces(path):
        found.update(piece)
    return found.hexdigest()


def each(function: Callable[[Path], _T], paths: Sequence[Path]) -> list[_T]:
    """Returns a function's value of each path; several threads ask a bucket, as each answer takes a while."""
    if not paths:
        return []
    with concurrent.futures.ThreadPoolExecutor(store_of(paths[0]).at_once) as pool:
        return list(pool.map(function, paths))


@contextlib.contextmanager
def lock(path: str | Path) -> Iterator[None]:
    """Holds this run's exclusive right to write `path`, a file or a folder, until the block ends or process 0 dies.

    In a bucket it is a lease, which ends a while after its holder's death; a run that loses it ends.

    Raises LockError: another run holds it, or the run's processes do not share it.
    """
    path, store = path_of(path), store_of(path)
    with contextlib.ExitStack() as held:

        def take() -> str:
            owner = f"process {os.getpid()} on host {socket.gethostname()}"
            try:
                held.enter_context(store.hold(path, owner))
            except BlockingIOError as error:
                raise LockError(f"{path}: in use by {error}, wait for its end") from error
            return owner

        owner = processes.agree(take)
        if store.holder(path) != owner:
            raise LockError(f"{path}: not what process 0 has there, expected a run_dir that all hosts share")
        yield
        processes.barrier()


def read_json(path: str | Path) -> dict[str, Any]:
    """Reads the object in a JSON file. Raises JsonError."""
    return _object(read_bytes(path), str(path))


def kept(path: str | Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """Reads a JSON file of work with this `identity`; None where there is none, or another's."""
    with contextlib.suppress(OSError, ValueError):
        found = read_json(path)
        return found if found.get("identity") == json.loads(json.dumps(identity)) else None
    return None


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


class Log(contextlib.AbstractContextManager["Log"]):
    """A file of lines that grows and survives a kill; a context manager.

    A local line is in the file when `write` returns. In a bucket `path` is a folder of sealed segments; a kill loses
    the lines of the last seconds.
    """

    def __init__(self, path: Path) -> None:
        self._log = store_of(path).append(path)

    def write(self, line: str) -> None:
        """Adds a line, with its line feed. Raises OSError."""
        self._log.write(line)

    def append(self, value: Any) -> None:
        """Adds a line for `read_log`: a checksum and JSON."""
        text = json.dumps(value, ensure_ascii=False)
        self.write(f"{zlib.crc32(text.encode()):08x} {text}\n")

    def close(self) -> None:
        """Ends the log; all lines are stored then. Raises OSError."""
        self._log.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def read_log(path: str | Path) -> list[Any]:
    """Reads the values of `Log.append`; empty where there is no log. Raises JsonError: a whole line was altered."""
    with open_log(path_of(path)) as stream:
        return [value for _, value in log_values(stream, path)]


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
