"""Decoding with the target split over a mesh gives the tokens of one device."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from toy import SMALL, Tokenizer, make

from eagle3_jax.config import DraftTree, MeshConfig, TargetConfig
from eagle3_jax.decoding.choice import costs, tiers
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.rounds.generate import generate
from eagle3_jax.mesh import make_mesh, shardings
from eagle3_jax.models.checkpoint.fetch import load_target
from eagle3_jax.models.drafts.eagle3 import DraftHead
from eagle3_jax.models.layers import SHARDING_RULES


@pytest.mark.slow
@pytest.mark.parametrize("sample_drafts", [None, *(pytest.param(x, marks=pytest.mark.long) for x in (False, True))])
def test_a_sharded_target_decodes_alike(toy, sample_drafts):
    """Greedy rows, and sampled ones beside them, with filters: padding or a wrong row's temperature would show."""
    mesh = make_mesh(MeshConfig(data=1, model=2), jax.devices()[:2])
    split = jax.device_put(toy.target, shardings(toy.target, mesh, SHARDING_RULES))
    prompts = jnp.asarray(np.random.default_rng(1).integers(0, 24, (4, 6)))
    arguments = (toy.good, prompts, jnp.array([6, 4, 2, 5]), jax.random.key(3))
    asked: dict[str, Any] = {"tree": DraftTree(num_steps=3, topk=2, num_draft_tokens=6)}
    if sample_drafts is not None:
        asked = {
            "temperature": jnp.array([0.0, 1.0, 0.7, 1.5]),
            "top_k": jnp.array([0, 0, 5, 0]),
            "top_p": jnp.array([1.0, 0.9, 1.0, 1.0]),
            "tree": dataclasses.replace(asked["tree"], sample_drafts=sample_drafts),
        }
    expected = generate(toy.target, *arguments, max_tokens=16, **asked)
    got = generate(split, *arguments, max_tokens=16, **asked)
    np.testing.assert_array_equal(got.output, expected.output)
    np.testing.assert_array_equal(got.accepted, expected.accepted)
    assert split.blocks[0].attention.qkv[...].sharding.spec[1] == "model"


def test_an_engine_splits_its_draft_as_its_target(toy):
    """Else it would be sent from its one device to all others in every call."""
    mesh = make_mesh(MeshConfig(data=1, model=2), jax.devices()[:2])
    split = jax.device_put(toy.target, shardings(toy.target, mesh, SHARDING_RULES))
    engine = Engine(split, None, toy.good, DraftTree(num_steps=3, topk=2, num_draft_tokens=6), max_length=64)
    assert engine.draft is not None and isinstance(engine.draft.head, DraftHead)
    assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(engine.draft))
    place: Any = engine.draft.head.mlp.gate[...].sharding
    assert place.spec[1] == "model"


@pytest.mark.long
def test_tiers_take_turns_on_a_mesh(toy, monkeypatch):
    """Copies, a head that rests and wakes, and the measurement of their costs."""
    mesh = make_mesh(MeshConfig(data=1, model=2), jax.devices()[:2])
    split = jax.device_put(toy.target, shardings(toy.target, mesh, SHARDING_RULES))
    order = [tiers.VANILLA, tiers.CHAIN, tiers.LOOKUP]
    monkeypatch.setattr(tiers, "of_head", lambda head: tuple(order))
    engine = Engine(split, Tokenizer(), toy.good, **SMALL)
    for width in (1, 2):  # with one request left, rounds are narrow
        measured = costs.round_costs(engine.own_runner, engine.tiers.tiers, greedy=True, width=width)
        assert min(measured.rounds.values()) > 0 and measured.waking > 0
    engine.own_runner.use(engine.own_runner.sizes.widths, engine.own_runner.prefill_shapes)
    assert engine.own_runner.widths == [1, 2]
    compiled, turns = engine.stats().programs, itertools.cycle(order)
    monkeypatch.setattr(engine.tiers, "choose", lambda *args, **kwargs: next(turns))
    prompts = [np.random.default_rng(i).integers(0, 24, 5 + i).tolist() for i in range(6)]
    params = SamplingParams(max_tokens=50)
    got = engine.generate(prompts, params)
    expected = make(toy, None).generate(prompts, params)
    assert [answer.token_ids for answer in got] == [answer.token_ids for answer in expected]
    assert max(answer.stats.acceptance_length for answer in got) > 1.3
    reading = len(engine.own_runner.sizes.prefill_shapes) + 1  # programs of prompts, which measuring does not need
    assert engine.stats().programs <= compiled + reading, "rounds were compiled again"


@pytest.mark.slow
def test_programs_compiled_ahead_fit_the_state_on_a_mesh(toy):
    mesh = make_mesh(MeshConfig(data=1, model=2), jax.devices()[:2])
    split = jax.device_put(toy.target, shardings(toy.target, mesh, SHARDING_RULES))
    engine = Engine(split, Tokenizer(), **SMALL)
    engine.warm_up(progress=False)
    compiled, params = engine.stats().programs, SamplingParams(max_tokens=20)
    got = [engine.generate([prompt], params)[0].token_ids for prompt in ([1, 2, 3], [4] * 20)]
    assert engine.stats().programs == compiled == engine.stats().ready_programs == 4
    plain = make(toy, None)
    assert got == [answer.token_ids for answer in plain.generate([[1, 2, 3], [4] * 20], params)]


def test_a_loaded_target_is_not_spread_again(tmp_path):
    target = load_target(TargetConfig(name=str(tiny.write_target(tmp_path)), aux_layers=(1, 2, 3)))
    with pytest.raises(ValueError, match="dtype, weights, mesh: got bfloat16"):
        Engine.load(target, dtype="bfloat16")
