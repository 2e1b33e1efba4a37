"""Stages of a round as programs of their own: together they are the round, and the bytes that it reads are counted."""

import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding.choice import tiers
from eagle3_jax.decoding.device import programs
from eagle3_jax.decoding.device.calls import Models
from eagle3_jax.decoding.device.memory import empty_state
from eagle3_jax.decoding.device.shapes import Sizes
from eagle3_jax.decoding.measure import profile
from eagle3_jax.decoding.tier import RoundPlan, Tier
from eagle3_jax.formats import mtp
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.drafts.model import DraftModel
from eagle3_jax.models.families import family_of, read_shape

TARGETS = pathlib.Path(__file__).parents[3] / "configs/targets"
TREE = Tier(DraftTree(num_steps=2, topk=2, num_draft_tokens=5), head=True)
EVERY = (tiers.VANILLA, TREE)
SIZES = Sizes.plan(2, 64, 16, EVERY)


def busy(models: Models):
    state = jax.jit(lambda m: empty_state(m, SIZES, EVERY, None))(models)
    return programs.rehearse(state, np.int32(8))


@pytest.mark.long
@pytest.mark.parametrize("tier", EVERY, ids=["vanilla", "tree"])
def test_one_after_the_other_they_are_a_round(toy, tier):
    models = Models.of(toy.target, toy.good)
    whole, _ = programs.decode(
        models, busy(models), np.zeros(2, bool), None, np.int32(1), np.int32(2), RoundPlan(tier, np.True_)
    )
    state, found = busy(models), None
    for stage in profile.STAGES:
        state, found = profile.run_stage(models, state, found, stage=stage, tier=tier)
    assert int(state.num_output[0]) >= 1 and int(state.drafted[0]) == (tier.tree is not None)
    for name in ("output", "lengths", "root", "rounds", "drafted", "accepted", "done"):
        np.testing.assert_array_equal(getattr(state, name), getattr(whole, name), name)
    for name in ("cache", "draft_cache"):  # what was drafted included
        for ours, theirs in zip(*(jax.tree.leaves(getattr(x, name)) for x in (state, whole)), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=name)
    state, seconds = profile.times(models, state, tier)
    assert list(seconds) == ["draft", "verify", "extend"] and min(seconds.values()) > 0
    assert int(state.rounds[0]) == 11  # each was one


def test_bytes_of_a_round(toy):
    models, config = Models.of(toy.target, toy.good), toy.target.config
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(toy.target)) - toy.target.embed[...].nbytes
    keys = config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert profile.bytes_read(models, tiers.VANILLA, 3, 100) == weights + 2 * keys * 300
    head = sum(leaf.nbytes for leaf in jax.tree.leaves(toy.good.head))
    fuse = toy.good.head.fc[...].nbytes  # once a round
    assert profile.bytes_read(models, TREE, 3, 100) == weights + 2 * keys * 300 + 2 * head - fuse
    assert profile.bytes_read(models, tiers.VANILLA, 3, 100, jnp.bfloat16) == weights + keys * 300
    itself = Models.of(toy.target, Draft(DraftModel(toy.target), toy.good.token_ids))
    assert profile.bytes_read(itself, TREE, 3, 100) == 3 * (weights + 2 * keys * 300)


def first_layers(name):
    """Of a target, in shapes: four of them."""
    values = json.loads((TARGETS / name / "config.json").read_text())
    values.get("text_config", values)["num_hidden_layers"] = 4
    config = read_shape(values, (1, 2, 3))
    return nnx.eval_shape(lambda: family_of(config).model(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))


def bytes_of(module):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(module))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "experts", "chosen", "numbers"),  # numbers: of one expert, in all layers together
    [
        ("deepseek_v3", 256, 8, 3 * 7168 * 2048),  # the first three layers have none
        ("gpt_oss_20b", 32, 4, 4 * (3 * 2880 * 2880 + 3 * 2880)),
        ("llama4_scout", 16, 1, 4 * 3 * 5120 * 8192),
        ("qwen3_30b_a3b", 128, 8, 4 * 3 * 2048 * 768),
    ],
)
def test_of_experts_as_many_are_read_as_the_tokens_of_a_pass_may_choose(name, experts, chosen, numbers):
    model = first_layers(name)
    whole = bytes_of(model) - bytes_of(model.embed)
    copies = Tier(DraftTree(num_steps=2, num_draft_tokens=3, lookup_tokens=2), head=False)
    for tier, batch, tokens in ((tiers.VANILLA, 1, 1), (tiers.VANILLA, 2, 2), (copies, 1, 3), (copies, 50, 150)):
        unread = max(0, experts - tokens * chosen) * 2 * numbers
        assert profile.bytes_read(Models.of(model, None), tier, batch, 0) == whole - unread


def test_a_sequence_s_states_are_read_whatever_its_length():
    """Of Qwen3.5-9B three layers of Gated DeltaNet, and one of attention."""
    models = Models.of(first_layers("qwen35_9b"), None)
    states, token = 3 * (32 * 128 * 128 * 4 + 3 * 8192 * 2), 2 * 4 * 256 * 2
    sizes = [profile.bytes_read(models, tiers.VANILLA, batch, length) for batch, length in ((1, 0), (3, 0), (3, 100))]
    assert [b - a for a, b in itertools.pairwise(sizes)] == [2 * states, 300 * token]


def test_a_draft_s_experts_are_those_of_its_own_tokens():
    """DeepSeek-V3's own layer, and four layers as a draft model: 2 nodes of a level, then the 3 tokens committed."""
    target, ids = first_layers("deepseek_v3"), jnp.arange(1)
    layer = mtp.abstract(target.config, jnp.bfloat16)
    expert = 2 * 3 * 7168 * 2048
    alone = profile.bytes_read(Models.of(target, None), TREE, 1, 0)
    for head, whole in ((layer, bytes_of(layer)), (DraftModel(target), bytes_of(target) - bytes_of(target.embed))):
        drafted = profile.bytes_read(Models.of(target, Draft(head, ids)), TREE, 1, 0) - alone
        assert drafted == 2 * (whole - 256 * expert) + (2 + 3) * 8 * expert
