"""Packing, and batches that can be resumed."""

import dataclasses
import os
import signal
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from slow_source import CountedSource, SlowSource, read_log
from test_features import make_fp8_record, make_record

from eagle3_jax.data import features
from eagle3_jax.data.loader import PackedRows, batches, plan_rows
from eagle3_jax.data.readers import Layout, Read, Readers


@dataclasses.dataclass
class Source:
    """Record i has the token ids 100 i, 100 i + 1, ..."""

    lengths: np.ndarray

    def __getitem__(self, index):
        i = index.__index__()
        token_ids = (100 * i + np.arange(int(self.lengths[i]))).astype(np.int32)
        return {
            "token_ids": token_ids,
            "loss_mask": np.ones(len(token_ids), np.uint8),
            "argmax": token_ids + 1,
            "aux": np.repeat(token_ids[:, None], 6, 1).astype(ml_dtypes.bfloat16),
            "last_hidden": np.repeat(token_ids[:, None], 2, 1).astype(ml_dtypes.bfloat16),
        }

    def name(self, index):
        return f"record {index}"

    def shard(self, index):
        return index // 3


def copies(parts):
    """All batches, whose memory is used again."""
    return [{name: array.copy() for name, array in part.items()} for part in parts]


def source(*lengths):
    return Source(np.asarray(lengths, np.int32))


@examples(50)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    row_length=st.integers(8, 40),
    seed=st.integers(0, 9),
)
def test_every_record_lies_in_one_row_and_rows_do_not_overflow(lengths, row_length, seed):
    cut = np.minimum(lengths, row_length)
    rows = plan_rows(np.asarray(lengths), row_length, seed, epoch=0)
    assert sorted(r for row in rows for r in row) == list(range(len(lengths)))
    totals = [sum(cut[r] for r in row) for row in rows]
    assert max(totals) <= row_length
    # No two rows could have been one but for the order in which they were filled: at most one is half empty.
    assert sum(2 * total <= row_length for total in totals) <= 1


def test_plans_differ_between_epochs_and_seeds_only():
    lengths = np.arange(1, 40)
    plan = plan_rows(lengths, 64, seed=0, epoch=0)
    assert plan == plan_rows(lengths, 64, seed=0, epoch=0)
    assert plan != plan_rows(lengths, 64, seed=0, epoch=1)
    assert plan != plan_rows(lengths, 64, seed=1, epoch=0)


def test_a_row_holds_its_records_one_behind_the_other():
    rows = PackedRows(source(3, 4), 10, multiple=1)
    (plan,) = rows.plan
    row = rows[0]
    sizes = [(3, 4)[r] for r in plan]
    np.testing.assert_array_equal(row["segment_ids"], [1] * sizes[0] + [2] * sizes[1] + [0] * 3)
    np.testing.assert_array_equal(row["positions"], [*range(sizes[0]), *range(sizes[1]), 0, 0, 0])
    expected = [100 * record + i for record, size in zip(plan, sizes, strict=True) for i in range(size)]
    np.testing.assert_array_equal(row["token_ids"][:7], expected)
    np.testing.assert_array_equal(row["argmax"][:7], row["token_ids"][:7] + 1)
    np.testing.assert_array_equal(row["loss_mask"], [1] * 7 + [0] * 3)
    assert row["aux"].shape == (10, 6) and row["aux"].dtype == ml_dtypes.bfloat16
    assert row["last_hidden"].shape == (10, 2)
    assert (rows.tokens, rows.padding) == (7, pytest.approx(0.3))


def test_epochs_may_end_within_a_pass_and_batches_are_filled():
    whole = PackedRows(source(*[10] * 8), 10, multiple=1, epochs=2.0)
    assert len(whole) == 16
    assert [r for row in whole.plan[:8] for r in row] != [r for row in whole.plan[8:] for r in row]
    assert len(PackedRows(source(*[10] * 8), 10, multiple=1, epochs=1.5)) == 12
    assert len(PackedRows(source(*[10] * 8), 10, multiple=1, epochs=5.0, max_rows=7)) == 7
    filled = PackedRows(source(*[10] * 7, 25), 10, multiple=3)  # a longer record is truncated
    assert (len(filled), filled.tokens, filled.padding) == (9, 80, pytest.approx(1 / 9))
    assert not filled[8]["segment_ids"].any()
    with pytest.raises(ValueError, match="features: got no records"):
        PackedRows(source(), 8, multiple=1)


def test_batches_depend_on_their_number_alone_and_a_process_reads_its_own_rows():
    rows = PackedRows(source(*range(3, 30)), 32, multiple=4)
    total = len(rows) // 4
    assert not copies(batches(rows, 4, lambda _: range(4), start=total))
    for own, start in (([0, 1, 2, 3], 0), ([1, 3], 0), ([0, 1], 2)):
        parts = batches(rows, 4, own=lambda _, own=own: own, start=start)
        for number, part in zip(range(start, total), parts, strict=True):
            for name in part:
                np.testing.assert_array_equal(part[name], [rows[4 * number + row][name] for row in own])


@pytest.fixture
def folder(tmp_path):
    """800 records in 20 shards."""
    for shard in range(20):
        records = (make_record(4 + i % 7, seed=100 * shard + i) for i in range(40))
        features.write_shard(features.shard_path(tmp_path, shard, 20), records)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.long), 2])
def test_shards_are_opened_once_and_batches_are_the_planned_rows(folder, tmp_path, workers):
    source = CountedSource(folder, tmp_path)
    rows = PackedRows(source, 32, multiple=4, seed=3, epochs=2.0)
    plain = PackedRows(features.FeatureSource(folder), 32, multiple=4, seed=3, epochs=2.0)
    (tmp_path / f"{os.getpid()}.log").unlink()  # the first record's widths
    for number, part in enumerate(batches(rows, 4, lambda _: range(4), workers=workers)):
        for name, array in part.items():
            np.testing.assert_array_equal(array, np.stack([plain[4 * number + i][name] for i in range(4)]))
    records, opens = read_log(tmp_path)
    assert sorted(records) == sorted(2 * list(range(800)))
    assert opens / len(records) <= 0.05


def test_a_batch_stays_while_two_more_are_asked_for():
    rows = PackedRows(source(*[4] * 40), 4, multiple=2)
    parts, expected = [], copies(batches(rows, 2, lambda _: [0, 1]))
    for number, part in enumerate(batches(rows, 2, lambda _: [0, 1])):
        parts.append(part)
        for back in range(min(3, number + 1)):
            np.testing.assert_array_equal(parts[-1 - back]["token_ids"], expected[number - back]["token_ids"])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.long), 2])
def test_a_slow_store_keeps_up_with_the_step(workers):
    """50 milliseconds a read, and a quarter more bytes a second than the steps take."""
    step, steps, size = 0.2, 20, 8
    lengths = np.full(2 * size * steps, 16, np.int32)  # two records a row
    taken = 2 * size * 16 * SlowSource.token_bytes / step
    for _ in range(3):  # a machine that does other work
        slow = SlowSource(lengths, 0.05, 1.25 * taken / max(1, workers))
        rows = PackedRows(slow, 32, multiple=size)
        waited, parts = 0.0, batches(rows, size, lambda _: range(size), workers=workers)
        for number in range(steps):
            asked = time.monotonic()
            next(parts)
            if number:  # the first waits for the start of the workers
                waited += time.monotonic() - asked
            time.sleep(step)
        if waited <= 0.02 * steps * step:
            return
    pytest.fail(f"waited {waited:.3f} of {steps * step} seconds")


@pytest.mark.slow
def test_what_a_worker_cannot_read_is_reported_here(folder):
    path = features.shard_path(folder, 3, 20)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    rows = PackedRows(features.FeatureSource(folder), 32, multiple=4)
    with pytest.raises(features.FeatureError, match=r"00003-of-00020.array_record, record \d+: unreadable"):
        copies(batches(rows, 4, lambda _: range(4), workers=2))


def test_records_of_two_forms_are_refused_by_name(tmp_path):
    features.write_shard(features.shard_path(tmp_path, 0, 1), [make_record(5), make_fp8_record(5)])
    rows = PackedRows(features.FeatureSource(tmp_path), 10, multiple=1)
    with pytest.raises(ValueError, match=r"00000-of-00001.array_record\[1\]: .*: got .*, expected .* as in the first"):
        copies(batches(rows, 1, lambda _: [0]))


def test_a_worker_that_dies_ends_the_reading(folder):
    layout = Layout({"token_ids": ((1, 32), "int32")})
    readers = Readers(features.FeatureSource(folder), layout, 1, 1)
    (future,) = readers.read(0, [Read(0, 0, 0, 4)])
    future.result()
    worker: Any = readers._processes[0]
    os.kill(worker._process.pid, signal.SIGKILL)
    for _ in range(2):  # the one that is asked then, and any later one
        (future,) = readers.read(0, [Read(0, 0, 0, 4)])
        with pytest.raises(OSError, match="a reading process ended with status -9"):
            future.result(30)
    readers.close()
