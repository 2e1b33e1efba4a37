"""Logs of a bucket: folders of segments, each written once."""

from __future__ import annotations

import contextlib
import io
import tempfile
import threading
from collections.abc import Iterator
from typing import Final

from eagle3_jax.runs.bucket import objects
from eagle3_jax.runs.store import Path

SEGMENT_SECONDS: Final = 5.0  # a segment is sealed at least so often: a kill loses no more
_SEGMENT_BYTES: Final = 4 << 20
_BEGINS: Final = ".begins.jsonl"  # ending of a segment that begins its log anew


class SegmentedLog:
    """A log as a folder of sealed segments: objects that are written once, in the background, and never changed.

    A segment holds the lines of a few seconds. Only the holder of the folder's lease may write.
    """

    def __init__(self, path: Path) -> None:
        self._folder, self._next = path, _next_segment(objects.names_below(path))
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
                    objects.put(self._folder / f"{self._next:06d}.jsonl", content, objects.ABSENT)
                    self._next += 1
                except OSError as error:
                    self._error = error


@contextlib.contextmanager
def open_log(path: Path) -> Iterator[io.BufferedIOBase]:
    """Opens the segments of a log as one file, from the last one on that begins it."""
    names = objects.names_below(path)
    begins = [at for at, name in enumerate(names) if name.endswith(_BEGINS)]
    with tempfile.TemporaryFile() as stream:
        for name in names[begins[-1] if begins else 0 :]:
            stream.write(objects.read(path / name))
        stream.seek(0)
        yield stream


def rewrite_log(path: Path, content: bytes) -> None:
    """Replaces a log by writing one segment, which makes those before it void."""
    names = objects.names_below(path)
    objects.put(path / f"{_next_segment(names):06d}{_BEGINS}", content, objects.ABSENT)
    for name in names:
        objects.remove(path / name)


def _next_segment(names: list[str]) -> int:
    return max((int(name.partition(".")[0]) for name in names), default=0) + 1
