"""A resting head: the pairs it missed, and its state after the catch-up pass."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_heads
from toy import prefilled

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding.device import programs
from eagle3_jax.decoding.device.calls import Models
from eagle3_jax.decoding.device.memory import empty_state
from eagle3_jax.decoding.device.shapes import Sizes
from eagle3_jax.decoding.rounds.round import run_rounds
from eagle3_jax.decoding.rounds.state import behind
from eagle3_jax.decoding.rounds.unread import ROOM, Unread, feed_unread
from eagle3_jax.decoding.tier import VANILLA, RoundPlan, Tier

CHAIN = DraftTree(num_steps=2, num_draft_tokens=3)
COPIES = DraftTree(num_steps=3, num_draft_tokens=4, lookup_tokens=3)
PROMPTS = jnp.asarray(np.random.default_rng(2).integers(0, 24, (2, 8)), jnp.int32)
LENGTHS = jnp.array([8, 5], jnp.int32)


@jax.jit
def wake(toy_target, draft, state):
    unread, cache, draft_state = feed_unread(
        toy_target, draft, state.unread, state.draft_cache, state.draft_state, behind(state), ~state.done
    )
    return dataclasses.replace(state, unread=unread, draft_cache=cache, draft_state=draft_state)


@functools.partial(jax.jit, static_argnames=("tree", "count", "head"))
def advance(toy_target, draft, state, tree, count, head):
    return run_rounds(toy_target, draft, state, count, 2, RoundPlan(Tier(tree, head=head), greedy=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tree", "kind"),
    [
        pytest.param(None, "head", id="vanilla", marks=pytest.mark.long),
        pytest.param(COPIES, "head", id="lookup"),
        pytest.param(None, "model", id="a draft model", marks=pytest.mark.long),
    ],
)
def test_it_wakes_as_if_it_had_never_rested(toy, tree, kind):
    """Rest, wake, draft, rest, wake: caches and state are those of a prefill of the whole text."""
    draft = toy.good if kind == "head" else tiny_heads.draft_model(toy.target, layers=1, width=40)
    toy = dataclasses.replace(toy, target=toy.target.observed_at(draft.head.config.aux_layers))
    state = prefilled(toy.target, draft, PROMPTS, LENGTHS, COPIES, 400, 300)
    width = draft.head.config.num_aux_layers * draft.head.config.target_hidden_size
    state = dataclasses.replace(state, unread=Unread.empty(2, width, 4, jnp.dtype("float32")))
    for count, head in ((9, False), (3, True), (17, False)):
        state = advance(toy.target, draft, state, CHAIN if head else tree, count, head)
        assert head or int(state.unread.count.min()) >= count
        state = wake(toy.target, draft, state)
        assert state.unread.count.tolist() == [0, 0]
    texts = np.zeros((2, int(state.lengths.max())), np.int32)
    for row, length in enumerate(LENGTHS):
        text = [*PROMPTS[row, :length].tolist(), *state.output[row, : state.num_output[row]].tolist()]
        texts[row, : state.lengths[row]] = text[:-1]
    fresh = prefilled(toy.target, draft, texts, state.lengths, COPIES, 400, 300)
    np.testing.assert_array_equal(fresh.root, state.root)
    np.testing.assert_allclose(fresh.draft_state, state.draft_state, atol=2e-5)
    for ours, expected in ((state.draft_cache, fresh.draft_cache), (state.cache, fresh.cache)):
        for row, length in enumerate(state.lengths):
            got, wanted = (cache.layers[0].keys[row, :, :length] for cache in (ours, expected))
            np.testing.assert_allclose(got, wanted, atol=2e-5)


def test_what_outgrows_the_buffer_is_lost_and_nothing_else():
    rng = np.random.default_rng(0)
    unread, expected = Unread.empty(2, 3, 4, jnp.dtype("float32")), [[], []]
    note = jax.jit(Unread.note)
    while int(unread.count[1]) <= ROOM:
        tokens, aux = rng.integers(0, 99, (2, 4)), rng.normal(size=(2, 4, 3)).astype(np.float32)
        taken = np.array([rng.integers(0, 2), 4])
        unread = note(unread, jnp.asarray(tokens, jnp.int32), jnp.asarray(aux), jnp.asarray(taken, jnp.int32))
        for row in range(2):
            expected[row] += [(t, a.tolist()) for t, a in zip(tokens[row, : taken[row]], aux[row], strict=False)]
    assert unread.count.tolist() == [len(row) for row in expected]
    for row, pairs in enumerate(expected):
        for place, (token, feature) in enumerate(pairs[:ROOM]):
            assert unread.tokens[row, place] == token and unread.aux[row, place].tolist() == feature
    lost = unread.count[1]
    again = note(unread, jnp.asarray(tokens, jnp.int32), jnp.asarray(aux), jnp.array([0, 4], jnp.int32))
    assert again.count[1] == lost, "lost stays lost"


@pytest.mark.slow
@pytest.mark.parametrize("places", [None, [1, 3]], ids=["the whole batch", "narrow"])
def test_a_head_wakes_for_those_that_run_and_writes_to_no_other_s_pages(toy, places):
    """The first of three requests was cancelled: another may own its pages by now."""
    every = (VANILLA, Tier(CHAIN, head=True))
    sizes, models = Sizes.plan(3, 64, 16, every), Models.of(toy.target, toy.good)
    state = jax.jit(lambda m: empty_state(m, sizes, every, None))(models)
    state = programs.rehearse(state, np.int32(8))
    before, pages = np.asarray(state.draft_cache.layers[0].keys), np.asarray(state.page_table)[:, 0]
    woken = None if places is None else jnp.array(places, jnp.int32)
    state = programs.catch_up(models, state, jnp.array([True, False, False]), woken)
    written = [bool((np.asarray(state.draft_cache.layers[0].keys)[page] != before[page]).any()) for page in pages]
    assert written == [False, True, places is None]
    assert state.unread.count.tolist() == [8, 0, 8 * (places is not None)]
    assert state.done.tolist() == [True, False, False]
