"""Where files lie: what the package asks of a store, and how folders of this machine answer."""

from __future__ import annotations

import contextlib
import glob
import io
import mmap
import os
import pathlib
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import filelock

# A path of any store: `etils.epath` has pathlib's methods, apart from `absolute`, `resolve`, `stat` and `rglob`.
if TYPE_CHECKING:
    Path = pathlib.Path
else:
    Path = pathlib.PurePath

_PIECE = 1 << 20  # bytes of one read of a whole file


class Store:
    """The store of this machine's folders, also of mounted ones; `bucket.store.Bucket` overrides every method."""

    at_once = 1  # questions that are asked at once
    unusable = "*?[\\"  # characters that Orbax, TensorStore or `etils` would take for a pattern or another path

    def path_of(self, address: str | Path) -> Path:
        """Makes a path."""
        return pathlib.Path(address)

    def system_path(self, path: str | Path) -> pathlib.Path | None:
        """Returns the absolute path for libraries that open files by name; None where they cannot."""
        return pathlib.Path(path).absolute()

    def check(self, path: Path, writable: bool, asks: bool) -> None:
        """Refuses a path that cannot be used, see `disk.check_address`. Raises ValueError, without the field's name."""
        place = str(self.system_path(path) or path)
        if writable and (strange := [character for character in self.unusable if character in place]):
            raise ValueError(f"got {place}, expected a path without {' '.join(strange)}")

    def size(self, path: Path) -> int:
        """Returns the bytes of a file. Raises FileNotFoundError."""
        return path.stat().st_size

    def open_binary(self, path: str | Path) -> io.BufferedReader:
        """Opens a file to be read from its beginning, in a bucket by ranges."""
        return open(path, "rb")

    def pieces(self, path: str | Path) -> Iterator[bytes]:
        """Yields a whole file, in order."""
        with open(path, "rb") as stream:
            while piece := stream.read(_PIECE):
                yield piece

    def read_range(self, path: Path, start: int, stop: int) -> bytes:
        """Returns a part of a file; several threads may ask at once."""
        with path.open("rb") as stream:
            stream.seek(start)
            return stream.read(stop - start)

    def local(self, folder: Path, without: str = "*") -> pathlib.Path:
        """Returns a local folder with the files of this one: itself, or this process's copy but for names `without`."""
        return folder

    @contextlib.contextmanager
    def atomic(self, path: str | Path) -> Iterator[pathlib.Path]:
        """Yields a temporary local path, for a file or a folder; beside `path`, or of a bucket on this machine's disk.

        On success it takes the place of `path` (of a file or an empty folder, or of nothing); on failure it is removed.
        Folders above `path` are made. In a bucket a file is one object with a generation precondition; a folder is
        whole where its manifest is.
        """
        (path := pathlib.Path(path)).parent.mkdir(parents=True, exist_ok=True)
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
            self.remove(temporary)

    def is_whole(self, folder: Path) -> bool:
        """Tells whether `atomic` wrote this folder; one in a bucket must hold a manifest."""
        return folder.exists()

    def outbox(self, folder: Path) -> tuple[pathlib.Path, Callable[[], None]]:
        """Returns a local folder for a library whose files grow, and a function that stores them in `folder`."""
        return folder, lambda: None

    def remove(self, path: Path) -> None:
        """Removes a file, a log, or a folder with all below it, where there is one."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def hold(self, path: Path, owner: str) -> Iterator[None]:
        """Holds the exclusive right to write `path` until the block ends or this process dies.

        The lock is the operating system's own (flock), on `.<name>.lock` beside `path`: it vanishes with a killed
        owner. The file stays, since removing a locked file would let two processes in. Across hosts it holds where the
        file system shares locks (NFS does; a mounted bucket locks for one host only). What killed runs of `atomic` left
        is removed.

        Raises BlockingIOError: another process holds it; the message is its owner.
        """
        file = lock_file(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        held = filelock.FileLock(file, blocking=False, fallback_to_soft=False)
        try:
            held.acquire()
        except filelock.Timeout as error:
            raise BlockingIOError(self.holder(path) or "another process") from error
        try:
            file.write_text(f"{owner}\n")
            for left_behind in [*path.parent.glob(f".{glob.escape(path.name)}.*.partial"), *path.rglob(".*.partial")]:
                self.remove(left_behind)
            yield
        finally:
            held.release()

    def holder(self, path: Path) -> str:
        """Returns the owner who holds `path`."""
        file = lock_file(path)
        return file.read_text().strip() if file.exists() else ""

    def append(self, path: Path) -> Any:
        """Opens a log for `disk.Log`, which writes lines to it and closes it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a", buffering=1, encoding="utf-8")

    @contextlib.contextmanager
    def open_log(self, path: Path) -> Iterator[io.BufferedIOBase]:
        """Opens a log to be read in any order; empty where there is none. A last line that a kill tore is cut off."""
        _cut_torn_line(path)
        with path.open("rb") if path.exists() else io.BytesIO() as stream:
            yield stream

    def rewrite_log(self, path: Path, content: bytes) -> None:
        """Replaces the lines of a log, atomically."""
        with self.atomic(path) as temporary:
            temporary.write_bytes(content)


def lock_file(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _cut_torn_line(path: pathlib.Path) -> None:
    size = path.stat().st_size if path.exists() else 0
    if not size:  # which cannot be mapped
        return
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as raw:
        whole = raw.rfind(b"\n") + 1
    if whole < size:
        os.truncate(path, whole)
