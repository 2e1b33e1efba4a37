"""Batches of packed rows, all of one shape, from feature records.

Rows are planned at the start from the lengths of the records, so that records are read ahead in the known order. A
step's batch depends on its number alone, also in a resumed run and on other processes.
"""

from __future__ import annotations

import bisect
import collections
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import SupportsIndex

import numpy as np

from eagle3_jax.data.readers import LAID_OUT, Layout, Read, Readers, RecordSource, fill

Row = dict[str, np.ndarray]

# Batches read ahead, and their most bytes.
_AHEAD = 16
_AHEAD_BYTES = 4 * 2**30
# Least bytes to read for which worker processes are started.
_WORTH_PROCESSES = 2**28
# A batch's arrays stay unchanged until this many later batches have been asked for.
HELD = 2


def plan_rows(lengths: np.ndarray, row_length: int, seed: int, epoch: int) -> list[list[int]]:
    """Packs every record into rows of at most `row_length` tokens: best fit over a seeded shuffle.

    A longer record is truncated and fills a row. Returns the records of each row, rows in shuffled order; a pure
    function of the arguments.
    """
    rng = np.random.default_rng((seed, epoch))
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), ascending: the first that fits is the tightest
    for record in rng.permutation(len(lengths)):
        length = min(int(lengths[record]), row_length)
        at = bisect.bisect_left(room, (length, -1))
        if at == len(room):
            rows.append([])
            left, row = row_length, len(rows) - 1
        else:
            left, row = room.pop(at)
        rows[row].append(int(record))
        if left > length:
            bisect.insort(room, (left - length, row))
    return [rows[i] for i in rng.permutation(len(rows))]


class PackedRows:
    """The rows of all epochs as a random-access source, each padded to `row_length`.

    A row has `token_ids`, `argmax`, `loss_mask`, `segment_ids` (1, 2, ... per record, 0 padding) and `positions` (in
    the record), int32 [T]; `aux` [T, n_aux * H] and `last_hidden` [T, H], with their scales where the records have
    some (see `features.encode_record`). Without states, `argmax` and the others are absent.

    `tokens` are those in all rows without padding, `padding` is its share. `epochs` may be fractional. Empty rows fill
    the number of rows, at most `max_rows`, up to a `multiple`, the batch size. `states` reads the target's states too.
    """

    def __init__(
        self,
        source: RecordSource,
        row_length: int,
        *,
        multiple: int,
        seed: int = 0,
        epochs: float = 1.0,
        max_rows: int | None = None,
        states: bool = True,
    ) -> None:
        if not len(source.lengths):
            raise ValueError("features: got no records, expected at least one")
        self.source, self.row_length = source, row_length
        self.plan: list[list[int]] = []
        for epoch in range(math.ceil(epochs)):
            if max_rows is not None and len(self.plan) >= max_rows:
                break  # packing takes a while
            rows = plan_rows(source.lengths, row_length, seed, epoch)
            self.plan += rows[: math.ceil(len(rows) * min(1.0, epochs - epoch))]
        self.plan = self.plan[:max_rows]
        self.plan += [[] for _ in range(-len(self.plan) % multiple)]
        self.tokens = sum(min(int(source.lengths[r]), row_length) for row in self.plan for r in row)
        self.padding = 1 - self.tokens / (len(self.plan) * row_length)
        first = source[0]
        names = ("token_ids", "loss_mask", *(sorted(first.keys() - {"token_ids", "loss_mask"}) if states else ()))
        # Integers as training takes them, states as they are stored.
        self._fields = {
            name: (first[name].shape[1:], "int32" if first[name].dtype.kind in "iu" else first[name].dtype.name)
            for name in names
        }

    def __len__(self) -> int:
        return len(self.plan)

    def layout(self, rows: int) -> Layout:
        """Returns the arrays' shapes for this many rows."""
        t = self.row_length
        own = {name: ((rows, t), "int32") for name in sorted(LAID_OUT)}
        return Layout({name: ((rows, t, *shape), dtype) for name, (shape, dtype) in self._fields.items()} | own)

    def empty(self, rows: int) -> Row:
        """Makes rows of padding."""
        layout = self.layout(rows)
        return layout.views(bytearray(layout.nbytes), 0)

    def lay_out(self, arrays: Row, numbers: Sequence[int]) -> list[Read]:
        """Writes segments, positions and padding of rows; returns the reads that complete them. Row -1 is empty."""
        reads = []
        for place, number in enumerate(numbers):
            start = 0
            for segment, record in enumerate(self.plan[number] if number >= 0 else (), start=1):
                end = min(start + int(self.source.lengths[record]), self.row_length)
                arrays["segment_ids"][place, start:end] = segment
                arrays["positions"][place, start:end] = np.arange(end - start)
                reads.append(Read(record, place, start, end))
                start = end
            for array in arrays.values():
                array[place, start:] = 0
        return reads

    def __getitem__(self, index: SupportsIndex) -> Row:
        arrays = self.empty(1)
        for read in self.lay_out(arrays, [index.__index__()]):
            fill(self.source, arrays, read)
        return {name: array[0] for name, array in arrays.items()}


def batches(
    rows: PackedRows, batch_size: int, own: Callable[[int], Sequence[int]], start: int = 0, workers: int | None = None
) -> Iterator[Row]:
    """Yields this process's part of each batch from `start` on, read ahead; a pure function of the arguments.

    `own` returns the rows of a batch, by its number, that this process reads, equally many in each batch; -1 is an
    empty one (see `feed.Feed`). `workers` are processes that read, 0 for threads of this one; None chooses by the
    machine and the bytes to read. A batch has the fields of a row, stacked [len(own(number)), T, ...]. The arrays are
    used again when HELD more batches have been asked for.
    """
    total = len(rows) // batch_size
    if start >= total:
        return
    layout = rows.layout(len(own(start)))
    ahead = min(_AHEAD, total - start, max(2, _AHEAD_BYTES // layout.nbytes))
    if workers is None:
        many = layout.nbytes * (total - start) >= _WORTH_PROCESSES
        workers = min((os.cpu_count() or 1) // 4, 8) if many else 0
    readers = Readers(rows.source, layout, ahead + HELD, workers)
    try:
        running: collections.deque[tuple[int, list]] = collections.deque()
        free = collections.deque(range(ahead))
        held = collections.deque(range(ahead, ahead + HELD))
        for number in range(start, total + ahead):
            if number < total:
                buffer = free.popleft()
                numbers = [number * batch_size + row if row >= 0 else -1 for row in own(number)]
                running.append((buffer, readers.read(buffer, rows.lay_out(readers.views[buffer], numbers))))
            if number >= start + ahead - 1 and running:
                buffer, futures = running.popleft()
                for future in futures:
                    future.result()
                held.append(buffer)
                free.append(held.popleft())
                yield readers.views[buffer]
    finally:
        readers.close()
