"""The report of a dispatch, as the host reads it: which tokens were drafts."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eagle3_jax.decoding.device.report import ROUNDS, RoundTree, of_decode, of_prefill, pack, progress

# A root, a draft, a place without use, and the draft's child; the first draft was accepted.
TREE = [[7, 8, -1, 9], [-1, 0, -1, 1], [1, 1, 0, 0]]


def packed(columns: np.dtype, **given: Any) -> np.ndarray:
    """The row of one request; columns that are not given are 0."""
    row = np.zeros(1, columns)
    for name, value in given.items():
        row[name] = value
    return np.asarray(pack(columns, **{name: jnp.asarray(row[name]) for name in columns.names or ()}))[0]


def test_logprobs_travel_by_their_bits_and_are_left_out_where_nobody_asks():
    values = {"tokens": [[[1, 2]] + [[0, 0]] * 3], "best": [[[-0.1, -2.5]] + [[0, 0]] * 3]}
    values |= {"chosen": [-0.7, 0, 0, 0], "processed": [-0.3, 0, 0, 0]}
    row = packed(of_decode(0, 1, 2), num_output=1, output=[9, 0, 0, 0], **values)
    ((chosen, processed, best),) = progress(row, (0, 1), 2).logprobs
    assert (chosen, processed) == (np.float32(-0.7), np.float32(-0.3))
    assert best == [(1, np.float32(-0.1)), (2, -2.5)]
    assert progress(row, (0, 1), None).logprobs == [] and progress(row, (0, 1), None).token_ids == [9]
    values = {"chosen": [-1.5], "processed": [-0.5], "tokens": [5], "best": [-1.5]}
    row = packed(of_prefill(1), root=5, done=True, **values)
    found = progress(row, None, 1)
    assert (found.token_ids, found.done, found.failed) == ([5], True, False)
    assert found.logprobs == [(-1.5, -0.5, [(5, -1.5)])]


@given(st.lists(st.integers(0, 3), max_size=ROUNDS), st.integers(0, 3))
def test_every_round_gives_its_drafts_and_then_a_token_of_its_own(accepted, cut):
    """Args: accepted: drafts of each round. cut: tokens that the limit takes from the last one."""
    steps = 3
    rounds = [[*range(1, drafts + 1), 0] for drafts in accepted]
    if rounds:
        rounds[-1] = rounds[-1][: max(1, len(rounds[-1]) - cut)]
    depths = [depth for of_round in rounds for depth in of_round]
    ends = np.cumsum([len(of_round) for of_round in rounds]).tolist()
    behind = ROUNDS - len(rounds)  # rounds that were not run, or that ran when this request had ended
    for ends_behind in ([0] * behind, [len(depths)] * behind):
        counted = [sum(drafts >= depth for drafts in accepted) for depth in range(1, steps + 1)]
        row = packed(
            of_decode(steps, 4, None),
            num_output=len(depths),
            rounds=len(rounds),
            accepted=counted,
            ends=[*ends, *ends_behind],
            tree=TREE,
        )
        found = progress(row, (steps, 4), None)
        assert found.depths == depths and found.accepted == counted
        assert len(found.token_ids) == len(depths)
        assert (found.tree is None) == (not rounds)
        if found.tree is not None:
            assert RoundTree.of(found.tree) == RoundTree([7, 8, 9], [-1, 0, 1], [True, True, False])
