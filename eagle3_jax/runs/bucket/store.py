"""Buckets as stores: folders are staged on this machine's disk for an upload, and mirrored there for reading."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import io
import pathlib
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Final

from eagle3_jax.runs.bucket import clients, leases, objects
from eagle3_jax.runs.store import Path, Store

_LAST: Final = "manifest.json"  # the object that marks a folder as whole
_BUFFER: Final = 8 << 20  # bytes of one ranged read of a file that is open
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_TIMEOUT: Final = 20.0  # seconds for the answer to a first request


class Bucket(Store):
    """The store of addresses in Cloud Storage."""

    at_once = 16
    unusable = "*?[\\#"
    path_of = staticmethod(clients.path_of)
    size = staticmethod(objects.size)
    pieces = staticmethod(objects.pieces)
    read_range = staticmethod(objects.read)
    remove = staticmethod(objects.remove)
    hold = staticmethod(leases.hold)
    holder = staticmethod(leases.holder)
    append = staticmethod(objects.SegmentedLog)
    open_log = staticmethod(objects.open_log)
    rewrite_log = staticmethod(objects.rewrite_log)

    def system_path(self, path: str | Path) -> None:
        return None

    def check(self, path: Path, writable: bool, asks: bool) -> None:
        super().check(path, True, asks)
        if not asks:
            return
        bucket, _ = clients.split(path)
        if not _BUCKET.fullmatch(bucket):
            raise ValueError(f"got {str(path)!r}, expected gs://BUCKET/FOLDER")
        try:
            for name in ("gcsfs", "google.cloud.storage", "tensorstore", "etils.epath"):
                importlib.import_module(name)
        except ModuleNotFoundError as error:
            wanted = "the extra `gcs`: pip install 'eagle3-jax[gcs]'"
            raise ValueError(f"got {str(path)!r} without {error.name}, expected {wanted}") from error
        from google.api_core import exceptions
        from google.auth import exceptions as auth

        try:
            client = clients.client()
            if next(iter(client.list_blobs(bucket, max_results=1, timeout=_TIMEOUT, retry=None)), None) is None:
                client.get_bucket(bucket, timeout=_TIMEOUT, retry=None)  # an emulator lists a missing bucket as empty
            if writable:
                probe = path / f".probe-{uuid.uuid4().hex}"
                objects.put(probe, b"", objects.ABSENT, timeout=_TIMEOUT, retry=False)
                objects.remove(probe)
        except (exceptions.GoogleAPICallError, exceptions.RetryError, auth.GoogleAuthError, OSError) as error:
            cause, wanted = error.__cause__ if isinstance(error, objects.BucketError) else error, "that answers"
            if isinstance(cause, exceptions.NotFound):
                wanted = "that exists"
            elif isinstance(cause, exceptions.Forbidden | exceptions.Unauthorized):
                kind = f"{clients.CREDENTIALS}={clients.credentials_kind()}"
                wanted = f"that may be {'written' if writable else 'read'} with {kind}"
            raise ValueError(f"got {str(path)!r}, expected a bucket {wanted} ({clients.reason(error)})") from error

    def open_binary(self, path: str | Path) -> io.BufferedReader:
        from google.cloud.storage.fileio import BlobReader

        class Reader(BlobReader):
            def read(self, size: int | None = -1) -> bytes:
                with objects.answered(path):
                    return super().read(size)

        if (found := objects.metadata(path)) is None:
            raise FileNotFoundError(2, "No such object", str(path))
        stream: Any = Reader(found, _BUFFER)
        return io.BufferedReader(stream, _BUFFER)

    def local(self, folder: Path, without: str = "*") -> pathlib.Path:
        bucket, name = clients.split(folder)
        with objects.answered(folder):
            blobs = list(clients.client().list_blobs(bucket, prefix=f"{name.rstrip('/')}/", delimiter="/"))
        held = sorted((blob.name.rpartition("/")[2], blob.generation) for blob in blobs)
        return _mirror(folder, tuple((name, found) for name, found in held if name and not name.endswith(without)))

    @contextlib.contextmanager
    def atomic(self, path: str | Path) -> Iterator[pathlib.Path]:
        """An object replaces the generation of the beginning. The last object of a folder must be new."""
        before = objects.generation(path := self.path_of(path))
        with tempfile.TemporaryDirectory(prefix="eagle3_jax-") as scratch:
            temporary = pathlib.Path(scratch) / path.name
            yield temporary
            if not temporary.is_dir():
                objects.put(path, temporary, before)
                return
            for file in sorted(temporary.rglob("*"), key=lambda file: (file.name == _LAST, file)):
                if file.is_file():
                    target = path / str(file.relative_to(temporary))
                    known = objects.ABSENT if file.name == _LAST else objects.generation(target)
                    objects.put(target, file, known)  # in the place of what a killed run left

    def is_whole(self, folder: Path) -> bool:
        return (folder / _LAST).exists()

    def outbox(self, folder: Path) -> tuple[pathlib.Path, Callable[[], None]]:
        scratch = _scratch()

        def send() -> None:
            for file in scratch.iterdir():
                with self.atomic(folder / file.name) as temporary:
                    shutil.copy(file, temporary)  # which grows no more

        return scratch, send


@functools.lru_cache(16)
def _mirror(folder: Path, generations: tuple[tuple[str, int], ...]) -> pathlib.Path:
    local = _scratch()
    for name, _ in generations:
        with (local / name).open("wb") as stream:
            stream.writelines(objects.pieces(folder / name))
    return local


def _scratch() -> pathlib.Path:
    local = pathlib.Path(tempfile.mkdtemp(prefix="eagle3_jax-"))
    atexit.register(shutil.rmtree, local, ignore_errors=True)
    return local
