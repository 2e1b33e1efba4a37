"""Objects of a bucket: written under a generation precondition, read by ranges, listed and removed; logs of them."""

from __future__ import annotations

import base64
import collections
import contextlib
import functools
import hashlib
import io
import pathlib
import tempfile
import threading
from collections.abc import Iterator
from typing import Any, Final

from eagle3_jax.runs.bucket import clients
from eagle3_jax.runs.store import Path

ABSENT: Final = 0  # the generation of an object that does not exist
_PIECE: Final = 32 << 20  # bytes of one ranged read of a whole object
_AT_ONCE: Final = 4  # such reads on their way
SEGMENT_SECONDS: Final = 5.0  # a segment is sealed at least so often: a kill loses no more
_SEGMENT_BYTES: Final = 4 << 20
_BEGINS: Final = ".begins.jsonl"  # ending of a segment that begins its log anew


class BucketError(OSError):
    """A bucket that does not exist, may not be used, or did not take an object; the message names the address."""


class Conflict(BucketError):
    """An object that another writer replaced in the meantime."""


def generation(path: Path) -> int:
    """Returns the generation of an object; ABSENT where there is none."""
    found = metadata(path)
    return ABSENT if found is None else found.generation


def metadata(path: str | Path) -> Any:
    """Returns the metadata of an object; None where there is none. Raises BucketError."""
    bucket, name = clients.split(path)
    with answered(path):
        return clients.client().bucket(bucket).get_blob(name)


@contextlib.contextmanager
def answered(path: str | Path) -> Iterator[None]:
    """Turns errors of google-cloud-storage, and TensorStore's own, into BucketError."""
    from google.api_core import exceptions

    try:
        yield
    except (exceptions.GoogleAPICallError, exceptions.RetryError, OSError, ValueError, RuntimeError) as error:
        raise BucketError(f"{path}: {clients.reason(error)}") from error


def size(path: str | Path) -> int:
    """Returns the bytes of an object. Raises FileNotFoundError."""
    found = metadata(path)
    if found is None or found.size is None:
        raise FileNotFoundError(2, "No such object", str(path))
    return found.size


def put(path: Path, content: bytes | pathlib.Path, expected: int, timeout: float = 60.0, retry: bool = True) -> int:
    """Writes an object, from memory or a local file, in the place of generation `expected`; returns the new generation.

    A request has `timeout` seconds; `retry` asks again for about two minutes. Raises Conflict, BucketError.
    """
    from google.api_core import exceptions

    bucket, name = clients.split(path)
    blob = clients.client().bucket(bucket).blob(name)
    options: dict[str, Any] = {"if_generation_match": expected, "timeout": timeout}
    options |= {} if retry else {"retry": None}
    try:
        if isinstance(content, bytes):
            blob.upload_from_string(content, "application/octet-stream", **options)
        else:
            blob.upload_from_filename(str(content), **options)
    except exceptions.PreconditionFailed as error:
        # A retried request may meet the object that it wrote itself.
        found = metadata(path)
        if found is None or found.md5_hash != _md5(content):
            raise Conflict(f"{path}: another writer was first") from error
        return found.generation
    except (exceptions.GoogleAPICallError, exceptions.RetryError, OSError) as error:
        raise BucketError(f"{path}: not written ({clients.reason(error)})") from error
    assert blob.generation is not None
    return blob.generation


def _md5(content: bytes | pathlib.Path) -> str:
    made = functools.partial(hashlib.md5, usedforsecurity=False)
    with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as stream:
        return base64.b64encode(hashlib.file_digest(stream, made).digest()).decode()  # as Cloud Storage has it


def look(path: Path) -> tuple[bytes, int] | None:
    """Returns the content and generation of a small object; None where there is none."""
    at = generation(path)  # first: where the content is newer, a write in the place of this generation fails
    bucket, name = clients.split(path)
    found = clients.store(bucket).read(name).result()
    return None if found.state == "missing" else (found.value, at)


def read(path: Path, start: int = 0, stop: int | None = None) -> bytes:
    """Returns some bytes of an object, for several threads at once. Raises FileNotFoundError, BucketError."""
    if stop is not None and stop - start > _PIECE:
        return b"".join(pieces(path, start, stop))
    bucket, name = clients.split(path)
    return _result(path, clients.store(bucket).read(name, byte_range=slice(start, stop)))


def pieces(path: str | Path, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
    """Yields the bytes that `read` returns in order; several ranges are on their way. Raises as `read` does."""
    bucket, name = clients.split(path)
    end, asked = size(path) if stop is None else stop, collections.deque()
    for at in range(start, end, _PIECE):
        asked.append(clients.store(bucket).read(name, byte_range=slice(at, min(at + _PIECE, end))))
        if len(asked) > _AT_ONCE:
            yield _result(path, asked.popleft())
    while asked:
        yield _result(path, asked.popleft())


def _result(path: str | Path, asked: Any) -> bytes:
    with answered(path):
        found = asked.result()
    if found.state == "missing":
        raise FileNotFoundError(2, "No such object", str(path))
    return found.value


def remove(path: Path) -> None:
    """Removes an object, or all below a folder; nothing where there is none. Never a whole bucket."""
    bucket, name = clients.split(path)
    if not name.strip("/"):
        raise ValueError(f"got {path}, expected an object or a folder in the bucket")
    store = clients.store(bucket)
    with answered(path):
        store.write(name, None).result()
        store.delete_range(_below(name)).result()


def names_below(folder: Path) -> list[str]:
    """Lists the objects below a folder, relative to it, in order."""
    bucket, name = clients.split(folder)
    below = _below(name)
    with answered(folder):
        keys = clients.store(bucket).list(below, strip_prefix_length=len(below.inclusive_min)).result()
    return sorted(key.decode() for key in keys)


def _below(name: str) -> Any:
    import tensorstore

    prefix = f"{name.rstrip('/')}/" if name else ""
    return tensorstore.KvStore.KeyRange(prefix, prefix[:-1] + "0" if prefix else "")  # "0" follows "/"


class SegmentedLog:
    """A log as a folder of segments of a few seconds: objects that a lease's holder writes once, in the background."""

    def __init__(self, path: Path) -> None:
        self._folder, self._next = path, _next_segment(names_below(path))
        self._lines: list[bytes] = []
        self._bytes = 0  # of the lines
        self._closed = False
        self._error: OSError | None = None
        self._due = threading.Condition()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def write(self, line: str) -> None:
        """Adds a line, with its line feed. Raises BucketError: an earlier segment was not written."""
        if self._error is not None:
            raise self._error
        with self._due:
            self._lines.append(line.encode())
            self._bytes += len(self._lines[-1])
            if self._bytes >= _SEGMENT_BYTES:
                self._due.notify()

    def close(self) -> None:
        """Seals what is left and waits for its writing. Raises BucketError."""
        with self._due:
            self._closed = True
            self._due.notify()
        self._writer.join()
        if self._error is not None:
            raise self._error

    def _write(self) -> None:
        closed = False
        while not closed and self._error is None:
            with self._due:
                self._due.wait_for(lambda: self._closed or self._bytes >= _SEGMENT_BYTES, SEGMENT_SECONDS)
                closed, content, self._lines, self._bytes = self._closed, b"".join(self._lines), [], 0
            if content:
                try:
                    put(self._folder / f"{self._next:06d}.jsonl", content, ABSENT)
                    self._next += 1
                except OSError as error:
                    self._error = error


@contextlib.contextmanager
def open_log(path: Path) -> Iterator[io.BufferedIOBase]:
    """Opens the segments of a log as one file, from the last one on that begins it."""
    names = names_below(path)
    begins = [at for at, name in enumerate(names) if name.endswith(_BEGINS)]
    with tempfile.TemporaryFile() as stream:
        for name in names[begins[-1] if begins else 0 :]:
            stream.write(read(path / name))
        stream.seek(0)
        yield stream


def rewrite_log(path: Path, content: bytes) -> None:
    """Replaces a log by writing one segment, which makes those before it void."""
    names = names_below(path)
    put(path / f"{_next_segment(names):06d}{_BEGINS}", content, ABSENT)
    for name in names:
        remove(path / name)


def _next_segment(names: list[str]) -> int:
    return max((int(name.partition(".")[0]) for name in names), default=0) + 1
