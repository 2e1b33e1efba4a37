"""A model of its own as the draft: the promises that heads keep, and what a model that drafts for itself must do."""

import numpy as np
import pytest
import tiny_heads
from toy import CHAIN, MAX_TOKENS, NO_TEXT, SMALL, TREE, generated

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.decoding.tier import VANILLA
from eagle3_jax.models.drafts.head import Draft

TREES = [CHAIN, TREE, DraftTree(num_steps=3, topk=2, num_draft_tokens=8, lookup_tokens=3)]


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "tree",
    [*(pytest.param(tree, marks=pytest.mark.long) for tree in TREES[:2]), TREES[2]],
    ids=["chain", "tree", "tree and text"],
)
def test_greedy_drafts_change_no_token(vanilla, model, small, tree):
    drafted = generated(model, small, tree=tree)
    np.testing.assert_array_equal(drafted.output[:, :MAX_TOKENS], vanilla)
    assert int(drafted.accepted.sum()) > 10  # it is of use


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [None, 1.5], ids=["greedy", "drawn"])
def test_what_a_model_drafts_for_itself_is_accepted(model, itself, temperature):
    """All of a chain, whether its tokens are the best or drawn: draft and target know the same text."""
    state = generated(model, itself, tree=CHAIN, temperature=temperature)
    np.testing.assert_array_equal(state.accepted, np.broadcast_to(state.rounds[:, None], (4, 3)))


@pytest.mark.long
def test_in_the_engine_with_pages_prefixes_and_tiers(toy, model, itself):
    """Prompts in several stretches, packed rows that continue each other, pages that an earlier request read, a draft
    that rests and catches up: after all of it everything that is drafted is accepted.
    """
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    drawn = np.random.default_rng(1).integers(0, 24, 90).tolist()
    prompts = [drawn[:70], [5], [*drawn[:40], 3], drawn[:70], drawn[:33], drawn[:48]]
    plain = Engine(toy.target, NO_TEXT, **SMALL).generate(prompts, params)
    engine = Engine(model, NO_TEXT, itself, [CHAIN], **SMALL)
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
        Engine(toy.target, NO_TEXT, itself, CHAIN, max_length=64)
