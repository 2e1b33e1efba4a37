"""What the host reads of a dispatch: which tokens of its rounds were drafts."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eagle3_jax.decoding.device.programs import ROUNDS
from eagle3_jax.decoding.device.report import RoundTree, progress

# A root, a draft, a place without use, and the draft's child; the first draft was accepted.
TREE = [7, 8, -1, 9, -1, 0, -1, 1, 1, 1, 0, 0]


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
        output = np.zeros(ROUNDS * (steps + 1), np.int32)
        head = [False, False, len(depths), len(rounds), len(rounds), 0]
        row = np.concatenate([np.array([*head, *counted, *ends, *ends_behind, *TREE], np.int32), output])
        found = progress(row, steps, 4, None)
        assert found.depths == depths and found.accepted == counted
        assert len(found.token_ids) == len(depths)
        assert (found.tree is None) == (not rounds)
        if found.tree is not None:
            assert RoundTree.of(found.tree) == RoundTree([7, 8, 9], [-1, 0, 1], [True, True, False])
