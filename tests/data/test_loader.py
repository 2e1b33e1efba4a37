"""Packing, and batches that can be resumed."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from eagle3_jax.data.loader import PackedRows, batches, plan_rows


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


def test_long_records_are_truncated():
    rows = PackedRows(source(25), 10, multiple=1)
    np.testing.assert_array_equal(rows[0]["token_ids"], np.arange(10))
    assert (len(rows), rows.tokens, rows.padding) == (1, 10, 0)


def test_epochs_may_end_within_a_pass_and_batches_are_filled():
    whole = PackedRows(source(*[10] * 8), 10, multiple=1, epochs=2.0)
    assert len(whole) == 16
    assert [r for row in whole.plan[:8] for r in row] != [r for row in whole.plan[8:] for r in row]
    assert len(PackedRows(source(*[10] * 8), 10, multiple=1, epochs=1.5)) == 12
    assert len(PackedRows(source(*[10] * 8), 10, multiple=1, epochs=5.0, max_rows=7)) == 7
    filled = PackedRows(source(*[10] * 8), 10, multiple=3)
    assert len(filled) == 9
    assert not filled[8]["segment_ids"].any()


def test_batches_depend_on_their_number_alone():
    rows = PackedRows(source(*range(3, 30)), 32, multiple=2)
    whole = list(batches(rows, 2, own=[0, 1]))
    assert len(whole) == len(rows) // 2
    assert list(batches(rows, 2, own=[0, 1], start=len(whole))) == []
    for one, other in zip(whole[2:], batches(rows, 2, own=[0, 1], start=2), strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize("own", [[0, 1], [2], [1, 3], [0, 1, 2, 3]])
def test_a_process_reads_its_own_rows_of_every_batch(own):
    rows = PackedRows(source(*range(3, 30)), 32, multiple=4)
    whole = list(batches(rows, 4, own=[0, 1, 2, 3]))
    for number, (part, batch) in enumerate(zip(batches(rows, 4, own), whole, strict=True)):
        for name in batch:
            np.testing.assert_array_equal(part[name], batch[name][own])
            np.testing.assert_array_equal(batch[name][2], rows[4 * number + 2][name])


def test_no_records_are_refused():
    with pytest.raises(ValueError, match="features: got no records"):
        PackedRows(source(), 8, multiple=1)
