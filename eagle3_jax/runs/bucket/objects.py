"""Objects of a bucket: written under a generation precondition, read by ranges, listed and removed.

Folders are staged on this machine's disk for an upload, and mirrored there for reading.
"""

from __future__ import annotations

import atexit
import base64
import collections
import contextlib
import functools
import hashlib
import importlib
import io
import pathlib
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from typing import Any, Final

from eagle3_jax.runs.bucket import clients
from eagle3_jax.runs.bucket.clients import Path

ABSENT: Final = 0  # the generation of an object that does not exist
_PIECE: Final = 32 << 20  # bytes of one ranged read of a whole object
_AT_ONCE: Final = 4  # such reads on their way
_BUFFER: Final = 8 << 20  # bytes of one ranged read of a file that is open
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_TIMEOUT: Final = 20.0  # seconds for the answer to a first request


class BucketError(OSError):
    """A bucket that does not exist, may not be used, or did not take an object; the message names the address."""


class Conflict(BucketError):
    """An object that another writer replaced in the meantime."""


def check(address: str, *, writable: bool) -> None:
    """Checks that the bucket of an address exists and, with `writable`, takes an object below the address.

    Raises ValueError: "got ..., expected ...", without the field's name.
    """
    bucket, _ = clients.split(address)
    if not _BUCKET.fullmatch(bucket):
        raise ValueError(f"got {address!r}, expected gs://BUCKET/FOLDER")
    try:
        for name in ("gcsfs", "google.cloud.storage", "tensorstore", "etils.epath"):
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        wanted = "the extra `gcs`: pip install 'eagle3-jax[gcs]'"
        raise ValueError(f"got {address!r} without {error.name}, expected {wanted}") from error
    from google.api_core import exceptions
    from google.auth import exceptions as auth

    try:
        client = clients.client()
        if next(iter(client.list_blobs(bucket, max_results=1, timeout=_TIMEOUT, retry=None)), None) is None:
            client.get_bucket(bucket, timeout=_TIMEOUT, retry=None)  # an emulator lists a missing bucket as empty
        if writable:
            probe = clients.path_of(f"{address.rstrip('/')}/.probe-{uuid.uuid4().hex}")
            put(probe, b"", ABSENT, timeout=_TIMEOUT, retry=False)
            remove(probe)
    except (exceptions.GoogleAPICallError, exceptions.RetryError, auth.GoogleAuthError, OSError) as error:
        cause, wanted = error.__cause__ if isinstance(error, BucketError) else error, "that answers"
        if isinstance(cause, exceptions.NotFound):
            wanted = "that exists"
        elif isinstance(cause, exceptions.Forbidden | exceptions.Unauthorized):
            kind = f"{clients.CREDENTIALS}={clients.credentials_kind()}"
            wanted = f"that may be {'written' if writable else 'read'} with {kind}"
        raise ValueError(f"got {address!r}, expected a bucket {wanted} ({clients.reason(error)})") from error


def generation(path: Path) -> int:
    """Returns the generation of an object; ABSENT where there is none."""
    found = _blob(path)
    return ABSENT if found is None else found.generation


def _blob(path: Path) -> Any:
    """Returns the metadata of an object; None where there is none. Raises BucketError."""
    bucket, name = clients.split(path)
    with answered(path):
        return clients.client().bucket(bucket).get_blob(name)


@contextlib.contextmanager
def answered(path: Path) -> Iterator[None]:
    """Turns errors of google-cloud-storage, and TensorStore's own, into BucketError."""
    from google.api_core import exceptions

    try:
        yield
    except (exceptions.GoogleAPICallError, exceptions.RetryError, OSError, ValueError, RuntimeError) as error:
        raise BucketError(f"{path}: {clients.reason(error)}") from error


def size(path: Path) -> int:
    """Returns the bytes of an object. Raises FileNotFoundError."""
    found = _blob(path)
    if found is None or found.size is None:
        raise FileNotFoundError(2, "No such object", str(path))
    return found.size


def put(path: Path, content: bytes | pathlib.Path, expected: int, timeout: float = 60.0, retry: bool = True) -> int:
    """Writes an object, from memory or a local file, in the place of generation `expected`; returns the new generation.

    Each request has `timeout` seconds; `retry` asks again for about two minutes without an answer.

    Raises Conflict: another generation is there; BucketError: not written.
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
        found = _blob(path)
        if found is None or found.md5_hash != _md5(content):
            raise Conflict(f"{path}: another writer was first") from error
        return found.generation
    except (exceptions.GoogleAPICallError, exceptions.RetryError, OSError) as error:
        raise BucketError(f"{path}: not written ({clients.reason(error)})") from error
    assert blob.generation is not None
    return blob.generation


def _md5(content: bytes | pathlib.Path) -> str:
    """Hashes content as Cloud Storage names an object's, in base64."""
    made = functools.partial(hashlib.md5, usedforsecurity=False)
    with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as stream:
        return base64.b64encode(hashlib.file_digest(stream, made).digest()).decode()


def look(path: Path) -> tuple[bytes, int] | None:
    """Returns the content and generation of a small object; None where there is none."""
    at = generation(path)  # first: where the content is newer, a write in the place of this generation fails
    bucket, name = clients.split(path)
    found = clients.store(bucket).read(name).result()
    return None if found.state == "missing" else (found.value, at)


def read(path: Path, start: int = 0, stop: int | None = None) -> bytes:
    """Returns the bytes `start` to `stop` of an object, the whole by default; several threads may ask at once.

    Raises FileNotFoundError, BucketError.
    """
    if stop is not None and stop - start > _PIECE:
        return b"".join(pieces(path, start, stop))
    bucket, name = clients.split(path)
    return _result(path, clients.store(bucket).read(name, byte_range=slice(start, stop)))


def pieces(path: Path, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
    """Yields the bytes that `read` returns in order; several ranges are on their way. Raises as `read` does."""
    bucket, name = clients.split(path)
    end, asked = size(path) if stop is None else stop, collections.deque()
    for at in range(start, end, _PIECE):
        asked.append(clients.store(bucket).read(name, byte_range=slice(at, min(at + _PIECE, end))))
        if len(asked) > _AT_ONCE:
            yield _result(path, asked.popleft())
    while asked:
        yield _result(path, asked.popleft())


def _result(path: Path, asked: Any) -> bytes:
    with answered(path):
        found = asked.result()
    if found.state == "missing":
        raise FileNotFoundError(2, "No such object", str(path))
    return found.value


def open_binary(path: Path) -> io.BufferedReader:
    """Opens an object to be read by ranges. Raises FileNotFoundError, and BucketError when it is read."""
    from google.cloud.storage.fileio import BlobReader

    class Reader(BlobReader):
        def read(self, size: int | None = -1) -> bytes:
            with answered(path):
                return super().read(size)

    if (found := _blob(path)) is None:
        raise FileNotFoundError(2, "No such object", str(path))
    stream: Any = Reader(found, _BUFFER)
    return io.BufferedReader(stream, _BUFFER)


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
    prefix = f"{name.rstrip('/')}/" if name else ""
    with answered(folder):
        keys = clients.store(bucket).list(_below(name), strip_prefix_length=len(prefix.encode())).result()
    return sorted(key.decode() for key in keys)


def _below(name: str) -> Any:
    import tensorstore

    prefix = f"{name.rstrip('/')}/" if name else ""
    return tensorstore.KvStore.KeyRange(prefix, prefix[:-1] + "0" if prefix else "")  # "0" follows "/"


@contextlib.contextmanager
def staged(path: Path, last: str) -> Iterator[pathlib.Path]:
    """Yields a local path for a file or a folder, and uploads it on success; raises as `put` does.

    An object replaces the generation of the beginning. File `last` of a folder is uploaded last and must be new: it
    marks the folder as complete.
    """
    before = generation(path)
    with tempfile.TemporaryDirectory(prefix="eagle3_jax-") as scratch:
        temporary = pathlib.Path(scratch) / path.name
        yield temporary
        if not temporary.is_dir():
            put(path, temporary, before)
            return
        for file in sorted(temporary.rglob("*"), key=lambda file: (file.name == last, file)):
            if file.is_file():
                target = path / str(file.relative_to(temporary))
                put(target, file, ABSENT if file.name == last else generation(target))  # a killed run's gives way


def mirror(folder: Path, without: str) -> pathlib.Path:
    """Copies the objects directly below a folder to a local one, which this process removes at its end.

    Objects whose name ends with `without` are not copied.
    """
    bucket, name = clients.split(folder)
    with answered(folder):
        blobs = list(clients.client().list_blobs(bucket, prefix=f"{name.rstrip('/')}/", delimiter="/"))
    held = sorted((blob.name.rpartition("/")[2], blob.generation) for blob in blobs)
    return _mirror(str(folder), tuple((name, found) for name, found in held if name and not name.endswith(without)))


@functools.lru_cache(16)
def _mirror(folder: str, generations: tuple[tuple[str, int], ...]) -> pathlib.Path:
    local = pathlib.Path(tempfile.mkdtemp(prefix="eagle3_jax-"))
    atexit.register(shutil.rmtree, local, ignore_errors=True)
    for name, _ in generations:
        with (local / name).open("wb") as stream:
            stream.writelines(pieces(clients.path_of(folder) / name))
    return local
