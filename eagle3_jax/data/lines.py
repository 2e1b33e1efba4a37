"""Reads other programs' JSONL files as numbered lines, a whole file or a part of it; writes JSONL files."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Final

from eagle3_jax.runs import disk

# Bytes. Of a longer line the beginning alone is read, so that none fills the memory.
LONGEST: Final = 16 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PIECE = 1 << 20


@dataclasses.dataclass(frozen=True)
class Part:
    """Whole lines of a file: from byte `start` to `stop`, and the number of the `first`."""

    start: int
    stop: int
    first: int
    checksum: int  # CRC-32 of the bytes, so that a file that changes in the meantime is noticed


def parts(path: str | disk.Path, size: int) -> Iterator[Part]:
    """Divides a file into parts of at least `size` bytes; the last may be smaller. Raises OSError."""
    start, first, number, at, checksum = 0, 1, 1, 0, 0
    with disk.open_binary(path) as stream:
        while piece := stream.read(min(size, _PIECE)):
            end = piece.find(b"\n", max(0, start + size - at - 1)) + 1
            head = piece[:end]
            if end:
                yield Part(start, at + end, first, zlib.crc32(head, checksum))
                number += head.count(b"\n")
                start, first, checksum = at + end, number, 0
            checksum = zlib.crc32(piece[end:], checksum)
            number += piece.count(b"\n", end)
            at += len(piece)
    if at > start:
        yield Part(start, at, first, checksum)


def read(path: str | disk.Path, part: Part | None = None) -> Iterator[tuple[int, bytes]]:
    """Yields the `numbered` lines of a file or of a part of it; a .gz file is decompressed.

    Raises OSError: it cannot be read. ValueError: a damaged .gz file, or a file that changed since it was divided.
    """
    try:
        with disk.open_binary(path) as stream:
            if part is None:
                yield from numbered((gzip.open(stream) if str(path).endswith(".gz") else stream).readline)
                return
            stream.seek(part.start)
            left, checksum = part.stop - part.start, 0

            def readline(size: int) -> bytes:
                nonlocal left, checksum
                piece = stream.readline(min(size, left))
                left, checksum = left - len(piece), zlib.crc32(piece, checksum)
                return piece

            yield from numbered(readline, part.first)
            if left or checksum != part.checksum:
                raise ValueError(f"{path}: changed while it was read")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: {error}, expected a whole gzip file") from error


def numbered(readline: Callable[[int], bytes], first: int = 1) -> Iterator[tuple[int, bytes]]:
    """Yields (number from `first`, line) of all lines that are not blank, without a byte order mark.

    Only a line feed ends a line: JSON strings may hold all other line breaks of Unicode. A line that is longer than
    LONGEST is cut behind LONGEST + 1 bytes.
    """
    number = first
    while line := readline(LONGEST + 1):
        if len(line) > LONGEST:
            more = line
            while more and not more.endswith(b"\n"):
                more = readline(_PIECE)
        line = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
        if line.strip():
            yield number, line
        number += 1


@contextlib.contextmanager
def written(path: disk.Path) -> Iterator[Callable[[Any], object]]:
    """Writes a JSONL file atomically: yields what adds a value as a line. Raises OSError."""
    with disk.atomic(path) as temporary, temporary.open("w", encoding="utf-8") as stream:
        yield lambda value: stream.write(json.dumps(value, ensure_ascii=False) + "\n")
