"""A model of its own as the draft: the promises that heads keep, and what a model that drafts for itself must do."""

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_heads

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding.choice.tiers import VANILLA
from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.decoding.rounds.generate import generate
from eagle3_jax.decoding.rounds.state import State
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.drafts.head import Draft

CHAIN = DraftTree(num_steps=3, num_draft_tokens=4)
TREE = DraftTree(num_steps=3, topk=3, num_draft_tokens=10)
TREES = [CHAIN, TREE, DraftTree(num_steps=3, topk=2, num_draft_tokens=8, lookup_tokens=3)]
MAX_TOKENS = 24
PROMPTS = jnp.asarray(np.random.default_rng(0).integers(0, 24, (4, 9)), jnp.int32)
LENGTHS = jnp.asarray([9, 3, 6, 1])
TOKENIZER = types.SimpleNamespace(decode=lambda ids, **_: "", convert_tokens_to_ids=lambda _: None, chat_template=None)


@pytest.fixture
def model(toy):
    """The target; nobody reads its states."""
    return toy.target.observed_at(())


@pytest.fixture
def small(toy) -> Draft:
    """Its first layer, in a wider stream, whose norms and caches are therefore others."""
    return tiny_heads.draft_model(toy.target, layers=1, width=40)


@pytest.fixture
def itself(toy) -> Draft:
    return tiny_heads.draft_model(toy.target, layers=2, width=40)


def generated(target, draft, tree, **options: Any) -> State:
    key = jax.random.key(0)
    return generate(target, draft, PROMPTS, LENGTHS, key, max_tokens=MAX_TOKENS, tree=tree, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tree",
    [*(pytest.param(tree, marks=pytest.mark.long) for tree in TREES[:2]), TREES[2]],
    ids=["chain", "tree", "tree and text"],
)
def test_greedy_drafts_change_no_token(toy, model, small, tree):
    vanilla, drafted = generated(toy.target, None, None), generated(model, small, tree)
    np.testing.assert_array_equal(drafted.output[:, :MAX_TOKENS], vanilla.output[:, :MAX_TOKENS])
    assert int(drafted.accepted.sum()) > 10  # it is of use


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [None, 1.5], ids=["greedy", "drawn"])
def test_what_a_model_drafts_for_itself_is_accepted(model, itself, temperature):
    """All of a chain, whether its tokens are the best or drawn: draft and target know the same text."""
    state = generated(model, itself, CHAIN, temperature=temperature)
    np.testing.assert_array_equal(state.accepted, np.broadcast_to(state.rounds[:, None], (4, 3)))


@pytest.mark.long
@pytest.mark.parametrize("sample_drafts", [pytest.param(False, marks=pytest.mark.long), True])
def test_sampled_tokens_have_the_target_s_distribution(toy, model, small, sample_drafts):
    """The second token of 4,096 answers against the exact distribution, by chi-square."""
    samples, prompt = 4096, np.array([3, 14, 15, 9, 2, 6], np.int32)
    state = generate(
        model,
        small,
        jnp.asarray(np.tile(prompt, (samples, 1))),
        jnp.full(samples, 6, jnp.int32),
        jax.random.key(7),
        max_tokens=2,
        tree=dataclasses.replace(TREE, sample_drafts=sample_drafts),
        temperature=1.5,
    )
    assert int(state.accepted.sum()) > samples // 10
    tokens = np.concatenate([np.tile(prompt, (24, 1)), np.arange(24, dtype=np.int32)[:, None]], axis=1)
    positions = jnp.broadcast_to(jnp.arange(7), (24, 7))
    hidden, _, _ = toy.target(
        jnp.asarray(tokens), Pass(positions, jnp.zeros(24, jnp.int32)), toy.target.empty_cache(24, 7)
    )
    probs = np.asarray(jax.nn.softmax(toy.target.logits(hidden[:, 5:]) / 1.5, axis=-1), np.float64)
    expected = samples * probs[0, 0] @ probs[:, 1]
    got = np.bincount(np.asarray(state.output[:, 1]), minlength=24)
    chi_square = ((got - expected) ** 2 / expected)[expected >= 5].sum()
    freedom = int((expected >= 5).sum()) - 1
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


@pytest.mark.long
def test_in_the_engine_with_pages_prefixes_and_tiers(toy, model, itself):
    """Prompts in several stretches, packed rows that continue each other, pages that an earlier request read, a draft
    that rests and catches up: after all of it everything that is drafted is accepted.
    """
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    size: dict[str, Any] = {"batch_size": 3, "max_length": 128, "page_size": 16}
    drawn = np.random.default_rng(1).integers(0, 24, 90).tolist()
    prompts = [drawn[:70], [5], [*drawn[:40], 3], drawn[:70], drawn[:33], drawn[:48]]
    plain = Engine(toy.target, TOKENIZER, **size).generate(prompts, params)
    engine = Engine(model, TOKENIZER, itself, [CHAIN], **size)
    for pinned in (None, VANILLA, None):
        engine.tiers.pinned = pinned
        for _ in range(2):
            answers = engine.generate(prompts, params)
            assert [x.token_ids for x in answers] == [x.token_ids for x in plain]
            if pinned is None:
                for x in answers:
                    assert x.stats.accepted_per_position == [x.stats.rounds] * 3
    assert engine.stats().cached_tokens > 5 * 64


def test_it_reads_no_states(toy, itself):
    with pytest.raises(ValueError, match=r"draft\.aux_layers: got \(\), expected the target's \(0, 1, 2\)"):
        Engine(toy.target, TOKENIZER, itself, CHAIN, max_length=64)
