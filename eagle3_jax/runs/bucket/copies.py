"""Local copies of a bucket's files and folders: staged for an upload, mirrored for reading."""

from __future__ import annotations

import atexit
import contextlib
import functools
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from eagle3_jax.runs.bucket import clients, objects
from eagle3_jax.runs.bucket.clients import Path


@contextlib.contextmanager
def staged(path: Path, last: str) -> Iterator[pathlib.Path]:
    """Yields a local path for a file or a folder, and uploads it on success.

    An object replaces the generation of the beginning. File `last` of a folder is uploaded last and must be new: it
    marks the folder as complete.

    Raises:
        Conflict: another writer was first.
        BucketError: not written.
    """
    before = objects.generation(path)
    with tempfile.TemporaryDirectory(prefix="eagle3_jax-") as scratch:
        temporary = pathlib.Path(scratch) / path.name
        yield temporary
        if temporary.is_dir():
            files = sorted(file for file in temporary.rglob("*") if file.is_file())
            for file in sorted(files, key=lambda file: file.name == last):
                target = path / str(file.relative_to(temporary))
                there = objects.ABSENT if file.name == last else objects.generation(target)  # a killed run's gives way
                objects.put(target, file, there)
        else:
            objects.put(path, temporary, before)


@functools.lru_cache(16)
def _mirror(folder: str, generations: tuple[tuple[str, int], ...]) -> pathlib.Path:
    local = pathlib.Path(tempfile.mkdtemp(prefix="eagle3_jax-"))
    atexit.register(shutil.rmtree, local, ignore_errors=True)
    for name, _ in generations:
        target = local / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as stream:
            stream.writelines(objects.pieces(clients.path_of(folder) / name))
    return local


def mirror(folder: Path, without: str) -> pathlib.Path:
    """Copies the objects directly below a folder to a local one, which this process removes at its end.

    Args:
        without: the ending of objects that are not copied.
    """
    bucket, name = clients.split(folder)
    with objects.answered(folder):
        blobs = list(clients.client().list_blobs(bucket, prefix=f"{name.rstrip('/')}/", delimiter="/"))
    held = sorted((blob.name.rpartition("/")[2], blob.generation) for blob in blobs)
    return _mirror(str(folder), tuple((name, found) for name, found in held if name and not name.endswith(without)))
