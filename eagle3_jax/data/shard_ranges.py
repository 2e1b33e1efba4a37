"""Reads single records of an ArrayRecord file in a bucket, by ranges.

array_record's own reader of Cloud Storage takes no emulator and no credentials by name. This one reads what
`features.write_shard` writes: a record is one chunk, uncompressed. The format is Riegeli's (github.com/google/riegeli,
doc/riegeli_records_file_format.md): chunks, interrupted by a block header of 24 bytes wherever the file's position is a
multiple of 64 KiB. The chunk in the last block, ArrayRecord's postscript, names the position of the footer, a chunk
with the position of each chunk (github.com/google/array_record, layout.proto).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence

_BLOCK, _BLOCK_HEADER = 1 << 16, 24
_CHUNK_HEADER = struct.Struct("<QQQQQ")  # header's hash, data's size and hash, type and number of records, decoded size
_SIMPLE, _UNCOMPRESSED = ord("r"), 0


class RangedShard:
    """A file of `size` bytes whose records are read one by one; `read` returns its bytes from one position to another.

    Raises RuntimeError: not such a file; at `read`, not such a record.
    """

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        self._read = read
        if size < 2 * _BLOCK or size % _BLOCK:
            raise RuntimeError(f"{size} bytes are no ArrayRecord file")
        last = size - _BLOCK
        footer = _fields(_records(self._chunk(last, size))[0]).get(1, 0)
        if not 0 < footer < last:
            raise RuntimeError("the postscript names no footer")
        _, *chunks = _records(self._chunk(footer, last))
        self._starts = [_fields(chunk).get(1, 0) for chunk in chunks] + [footer]

    def read(self, indices: Sequence[int]) -> list[bytes]:
        """Returns records, by their indices; each is one read. Raises IndexError."""
        if not all(0 <= index < len(self._starts) - 1 for index in indices):
            raise IndexError(f"got {indices}, expected 0 to {len(self._starts) - 2}")
        return [_records(self._chunk(*self._starts[index : index + 2]))[0] for index in indices]

    def _chunk(self, start: int, stop: int) -> bytes:
        """Reads the data of the chunk at `start`; at or behind `stop` the next one begins."""
        raw = b"".join(_without_block_headers(self._read(start, stop), start))
        if len(raw) < _CHUNK_HEADER.size:
            raise RuntimeError("truncated")
        _, size, _, kind, _ = _CHUNK_HEADER.unpack_from(raw)
        data = raw[_CHUNK_HEADER.size :][:size]
        if kind & 0xFF != _SIMPLE or len(data) < max(size, 2) or data[0] != _UNCOMPRESSED:
            raise RuntimeError("damaged, or not written as features are")
        return data


def _without_block_headers(raw: bytes, start: int) -> Iterator[memoryview]:
    """Yields the parts of `raw`, which stands at position `start` of the file, between block headers."""
    view, at = memoryview(raw), 0
    while at < len(raw):
        inside = (start + at) % _BLOCK
        if inside < _BLOCK_HEADER:
            at += _BLOCK_HEADER - inside
        else:
            stop = at + _BLOCK - inside
            yield view[at:stop]
            at = stop


def _records(data: bytes) -> list[bytes]:
    """Returns the records of a simple chunk: compression, size of the sizes, sizes, records."""
    length, at = _varint(data, 1)
    sizes, end = [], at + length
    while at < end:
        size, at = _varint(data, at)
        sizes.append(size)
    records = []
    for size in sizes:
        records.append(data[at : at + size])
        at += size
    if at != len(data) or not records:
        raise RuntimeError("damaged, its sizes do not add up")
    return records


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns a protobuf integer, and the position behind it."""
    value = shift = 0
    while at < len(data):
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
        shift += 7
    raise RuntimeError("truncated")


def _fields(message: bytes) -> dict[int, int]:
    """Returns the integers of a protobuf message before its first field of another kind."""
    found, at = {}, 0
    while at < len(message):
        tag, at = _varint(message, at)
        if tag & 7:
            break
        value, at = _varint(message, at)
        found.setdefault(tag >> 3, value)
    return found
