"""Objects of a bucket: written under a generation precondition, read by ranges, listed and removed."""

from __future__ import annotations

import base64
import collections
import contextlib
import functools
import hashlib
import io
import pathlib
from collections.abc import Iterator
from typing import Any, Final

from eagle3_jax.runs.bucket import clients
from eagle3_jax.runs.store import Path

ABSENT: Final = 0  # the generation of an object that does not exist
_PIECE: Final = 32 << 20  # bytes of one ranged read of a whole object
_AT_ONCE: Final = 4  # such reads on their way


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
        found = metadata(path)
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
    prefix = f"{name.rstrip('/')}/" if name else ""
    with answered(folder):
        keys = clients.store(bucket).list(_below(name), strip_prefix_length=len(prefix.encode())).result()
    return sorted(key.decode() for key in keys)


def _below(name: str) -> Any:
    import tensorstore

    prefix = f"{name.rstrip('/')}/" if name else ""
    return tensorstore.KvStore.KeyRange(prefix, prefix[:-1] + "0" if prefix else "")  # "0" follows "/"
