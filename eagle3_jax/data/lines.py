"""The lines of a JSONL file, as other programs write them."""

from __future__ import annotations

import gzip
import pathlib
import zlib
from collections.abc import Iterable, Iterator

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read(path: str | pathlib.Path) -> Iterator[tuple[int, bytes]]:
    """The file's `numbered` lines; a name that ends with .gz is read unpacked.

    Raises:
        OSError: it cannot be read.
        ValueError: a .gz that ends too soon, or whose bytes are wrong.
    """
    path = pathlib.Path(path)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            yield from numbered(stream)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: {error}, expected a whole gzip file") from error


def numbered(stream: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of all lines that are not blank, without a byte order mark.

    Lines end with a line feed alone: JSON's strings may hold every other character that Unicode breaks lines at.
    """
    for number, line in enumerate(stream, start=1):
        line = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
        if line.strip():
            yield number, line
