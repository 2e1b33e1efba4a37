"""Batches of packed rows, all of one shape, from feature records.

Rows are planned at the start from the lengths of the records, so that they can be read in any order. A step's batch
depends on its number alone, also in a resumed run and on other processes.
"""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Sequence
from typing import Protocol, SupportsIndex, runtime_checkable

import ml_dtypes
import numpy as np

from eagle3_jax.runs import command

command.require("train")
import grain  # noqa: E402

Row = dict[str, np.ndarray]


@runtime_checkable
class RecordSource(Protocol):
    """Random access to feature records (see `features.FeatureSource`)."""

    lengths: np.ndarray

    def __getitem__(self, index: SupportsIndex) -> dict[str, np.ndarray]: ...

    def name(self, index: int) -> str: ...


def plan_rows(lengths: np.ndarray, row_length: int, seed: int, epoch: int) -> list[list[int]]:
    """Packs every record into rows of at most `row_length` tokens: best fit over a seeded shuffle.

    Args:
        lengths: tokens of each record; a record longer than `row_length` is truncated and fills a row.

    Returns:
        The records of each row, rows in shuffled order; a pure function of the arguments.
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
    the record), int32 [T]; `aux` [T, n_aux * H] and `last_hidden` [T, H], bfloat16. Without states, `argmax` and the
    last two are absent.

    Attributes:
        tokens: tokens in all rows, without padding.
        padding: share of padding in all rows.
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
        """
        Args:
            multiple: the batch size; empty rows fill the number of rows up to a multiple of it.
            epochs: number of passes, which may be fractional.
            max_rows: largest number of rows.
            states: reads the target's states too.
        """
        if not len(source.lengths):
            raise ValueError("features: got no records, expected at least one")
        self.source, self.row_length = source, row_length
        self.plan: list[list[int]] = []
        for epoch in range(math.ceil(epochs)):
            rows = plan_rows(source.lengths, row_length, seed, epoch)
            self.plan += rows[: math.ceil(len(rows) * min(1.0, epochs - epoch))]
        self.plan = self.plan[:max_rows]
        self.plan += [[] for _ in range(-len(self.plan) % multiple)]
        self.tokens = sum(min(int(source.lengths[r]), row_length) for row in self.plan for r in row)
        self.padding = 1 - self.tokens / (len(self.plan) * row_length)
        first = source[0]
        self._widths = {name: first[name].shape[1] for name in ("aux", "last_hidden")} if states else {}
        self._read = ("token_ids", "loss_mask", *(("argmax", *self._widths) if states else ()))

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: SupportsIndex) -> Row:
        t = self.row_length
        row: Row = {name: np.zeros((t, width), ml_dtypes.bfloat16) for name, width in self._widths.items()}
        for name in (*self._read, "segment_ids", "positions"):
            row.setdefault(name, np.zeros(t, np.int32))
        start = 0
        for segment, number in enumerate(self.plan[index.__index__()], start=1):
            record = self.source[number]
            end = min(start + len(record["token_ids"]), t)
            for name in self._read:
                row[name][start:end] = record[name][: end - start]
            row["segment_ids"][start:end] = segment
            row["positions"][start:end] = np.arange(end - start)
            start = end
        return row

    def __repr__(self) -> str:
        return f"PackedRows({self.source!r}, row_length={self.row_length}, rows={len(self)})"


def batches(rows: PackedRows, batch_size: int, own: Sequence[int], start: int = 0) -> grain.IterDataset[Row]:
    """Yields this process's part of each batch, prefetched by a few threads; a pure function of the arguments.

    Args:
        batch_size: rows of a batch, over all processes.
        own: the rows of a batch that this process reads, in this order (see `mesh.own_rows`).
        start: the first batch.

    Returns:
        Batches from `start` to the last: the fields of a row, stacked [len(own), T, ...].
    """
    numbers = [batch * batch_size + row for batch in range(start, len(rows) // batch_size) for row in own]
    stacked = grain.MapDataset.source(numbers).map(rows.__getitem__).batch(len(own), drop_remainder=True)
    threads = min(os.cpu_count() or 1, 8)  # each fills its own batch in host memory
    return stacked.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(threads, 2)))
