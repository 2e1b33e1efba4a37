"""Replayed rounds against plain Python, document by document."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.training.replay import replay_rounds
from eagle3_jax.training.ttt import training_time_test

STEPS = 3


def reference(drafts, labels, mask):
    """Rounds and accepted counts of one document: drafts [steps, t], labels [t], mask [t]."""
    rounds, accepted = 0, [0] * STEPS
    for start in range(1, len(mask)):
        if not mask[start] or mask[start - 1]:
            continue
        end = start  # of the answer
        while end < len(mask) and mask[end]:
            end += 1
        root = start  # the first token comes from the prefill
        while root + 1 < end:
            rounds += 1
            taken = 0
            for i in range(STEPS):
                if root + 1 + i >= end or drafts[i, root - 1] != labels[root + i]:
                    break
                accepted[i] += 1
                taken += 1
            root += taken + 1
    return rounds, accepted


@pytest.fixture(scope="module")
def often_right(head, teacher, make_batch):
    """Packed documents whose teacher says what is drafted, for some steps from some places on; and those drafts."""
    batch = make_batch([[30, 14], [47], [9, 8, 20, 3], []], 48, seed=7)
    states = jax.jit(training_time_test, static_argnums=3)(head, teacher.embed, batch, STEPS)
    drafts = np.asarray(jnp.argmax(states @ head.lm_head[...].T, axis=-1))
    token_ids = np.flatnonzero(np.asarray(teacher.draft_ids) >= 0)
    rng, argmax = np.random.default_rng(0), np.array(batch.argmax)
    for row in range(len(argmax)):
        start = 0
        while start + STEPS < argmax.shape[1]:  # the next 1 to STEPS tokens are as drafted from here
            right = rng.integers(1, STEPS + 1)
            for i in range(right):
                argmax[row, start + 1 + i] = token_ids[drafts[i, row, start]]
            start += rng.integers(right, right + 2)
    return dataclasses.replace(batch, argmax=jnp.asarray(argmax)), states, drafts


@pytest.mark.slow
@pytest.mark.parametrize("block", [8, 48, 512])
def test_rounds_of_packed_answers(head, teacher, often_right, block):
    batch, states, drafts = often_right
    labels, segments, mask = (
        np.asarray(x) for x in (teacher.draft_ids[batch.argmax], batch.segment_ids, batch.loss_mask)
    )
    rounds, accepted = 0, np.zeros(STEPS, int)
    for row in range(len(mask)):
        for segment in range(1, segments[row].max() + 1):
            own = segments[row] == segment
            counts = reference(drafts[:, row, own], labels[row, own], mask[row, own])
            rounds, accepted = rounds + counts[0], accepted + counts[1]
    assert rounds > 20 and accepted[-1] >= 3
    got = jax.jit(replay_rounds, static_argnums=4)(head.lm_head[...], states, teacher, batch, block)
    assert (int(got["rounds"]), got["accepted"].tolist()) == (rounds, accepted.tolist())
