"""Reading of JSONL files of other programs, as numbered lines."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator

from eagle3_jax.runs import disk

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read(path: str | disk.Path) -> Iterator[tuple[int, bytes]]:
    """Yields the file's `numbered` lines; a .gz file is decompressed.

    Raises:
        OSError: the file cannot be read.
        ValueError: a truncated or damaged .gz file.
    """
    try:
        with disk.open_binary(path) as stream:
            yield from numbered(gzip.open(stream) if str(path).endswith(".gz") else stream)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: {error}, expected a whole gzip file") from error


def numbered(stream: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yields (number from 1, line) of all lines that are not blank, without a byte order mark.

    Only a line feed ends a line: JSON strings may hold all other line breaks of Unicode.
    """
    for number, line in enumerate(stream, start=1):
        line = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
        if line.strip():
            yield number, line
