"""Acceptance length and rate against counts made by hand."""

from eagle3_jax.acceptance import AcceptanceCounts


def test_counts_add_up_by_depth_and_give_tau_and_alpha():
    answers = [AcceptanceCounts(4, [2, 1, 0]), AcceptanceCounts(), AcceptanceCounts(2, [1])]
    counts = AcceptanceCounts.total(answers)
    assert counts == AcceptanceCounts(6, [3, 1, 0])
    assert counts.tau == 1 + 4 / 6
    assert counts.alpha == [3 / 6, 1 / 3, 0.0]


def test_no_round_is_one_token_and_no_rate():
    assert AcceptanceCounts.total([]).tau == 1.0
    assert AcceptanceCounts(0, [0, 0]).alpha == [None, None]
    assert AcceptanceCounts(3, [0, 0]).alpha == [0.0, None]
