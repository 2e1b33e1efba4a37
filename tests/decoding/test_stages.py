"""Stages of a round as programs of their own: together they are the round, and the bytes that it reads are counted."""

import jax
import numpy as np
import pytest

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding import programs, stages, tiers
from eagle3_jax.decoding.programs import Models, Sizes
from eagle3_jax.decoding.tiers import Tier
from eagle3_jax.models.draft_model import DraftModel
from eagle3_jax.models.head import Draft

TREE = Tier(DraftTree(num_steps=2, topk=2, num_draft_tokens=5), head=True)
EVERY = (tiers.VANILLA, TREE)
SIZES = Sizes.plan(2, 64, 16, EVERY)


def busy(models: Models):
    state = jax.jit(lambda m: programs.empty_state(m, SIZES, EVERY, None))(models)
    return programs.rehearse(state, np.int32(8), pages_per_sequence=SIZES.pages_per_sequence)


@pytest.mark.slow
@pytest.mark.parametrize("tier", EVERY, ids=["vanilla", "tree"])
def test_one_after_the_other_they_are_a_round(toy, tier):
    models = Models.of(toy.target, toy.good)
    whole, _ = programs.decode(
        models, busy(models), np.zeros(2, bool), None, np.int32(1), np.int32(2), tier=tier, greedy=True
    )
    state, nodes = stages.draft(models, busy(models), tier=tier)
    state, judged = stages.verify(models, state, nodes, tier=tier)
    state = stages.extend(models, state, judged, tier=tier)
    assert int(state.num_output[0]) >= 1 and int(state.drafted[0]) == (tier.tree is not None)
    for name in ("output", "lengths", "root", "rounds", "drafted", "accepted", "done"):
        np.testing.assert_array_equal(getattr(state, name), getattr(whole, name), name)
    for name in ("cache", "draft_cache"):  # what was drafted included
        for ours, theirs in zip(*(jax.tree.leaves(getattr(x, name)) for x in (state, whole)), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=name)
    state, seconds = stages.times(models, state, tier)
    assert list(seconds) == ["draft", "verify", "extend"] and min(seconds.values()) > 0
    assert int(state.rounds[0]) == 11  # each was one


def test_bytes_of_a_round(toy):
    models, config = Models.of(toy.target, toy.good), toy.target.config
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(toy.target)) - toy.target.embed[...].nbytes
    keys = config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert stages.bytes_read(models, tiers.VANILLA, 3, 100) == weights + 2 * keys * 300
    head = sum(leaf.nbytes for leaf in jax.tree.leaves(toy.good.head))
    assert stages.bytes_read(models, TREE, 3, 100) == weights + 2 * keys * 300 + 2 * head
    itself = Models.of(toy.target, Draft(DraftModel(toy.target), toy.good.token_ids))
    assert stages.bytes_read(itself, TREE, 3, 100) == 3 * (weights + 2 * keys * 300)
