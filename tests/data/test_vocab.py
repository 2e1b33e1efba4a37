"""The draft vocabulary, against its definition."""

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from eagle3_jax.data import vocab

COUNTS = st.lists(st.integers(0, 4), min_size=1, max_size=60).map(lambda c: np.array(c, np.int64))


@examples(100)
@given(counts=COUNTS, data=st.data())
def test_draft_vocabulary_is_the_top_by_count_then_id(counts, data):
    size = data.draw(st.integers(1, len(counts)))
    chosen = vocab.choose_draft_vocabulary(counts, size)
    assert chosen.dtype == np.int32
    assert chosen.tolist() == sorted(sorted(range(len(counts)), key=lambda i: (-counts[i], i))[:size])


@pytest.mark.parametrize("size", [0, 7])
def test_a_size_outside_the_target_vocabulary_is_refused(size):
    with pytest.raises(ValueError, match=r"draft\.vocab_size: got \d, expected 1 to the target's vocabulary, 6"):
        vocab.choose_draft_vocabulary(np.zeros(6, np.int64), size)


@examples(50)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 1)), max_size=30))
def test_only_masked_tokens_are_counted(pairs):
    ids = np.array([token for token, _ in pairs], np.int32)
    mask = np.array([counted for _, counted in pairs], np.uint8)
    counts = vocab.count_tokens(ids, mask, 9)
    np.testing.assert_array_equal(counts, [sum(m for t, m in pairs if t == v) for v in range(9)])


def test_coverage_is_the_share_of_what_was_counted():
    counts = np.array([1, 0, 6, 3])
    assert vocab.coverage(counts, np.array([0, 2], np.int32)) == pytest.approx(0.7)
    assert vocab.coverage(np.zeros(4, np.int64), np.array([0], np.int32)) == 1.0
