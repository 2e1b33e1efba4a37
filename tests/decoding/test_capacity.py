"""Caches with exactly the slots that are needed: a decode to the last of them overwrites nothing that is committed."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_heads
from toy import plan, prefilled

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding.rounds.generate import cache_length_needed, generate
from eagle3_jax.decoding.rounds.round import advance
from eagle3_jax.decoding.rounds.state import State
from eagle3_jax.models import cache as cache_lib
from eagle3_jax.models.drafts.head import Draft

TREES = {
    "vanilla": None,
    "chain1": DraftTree(num_steps=1, topk=1, num_draft_tokens=2),
    "chain3": DraftTree(num_steps=3, topk=1, num_draft_tokens=4),
    "tree2x2": DraftTree(num_steps=2, topk=2, num_draft_tokens=6),
    # More of the head's own candidates than nodes that are verified, and the other way round.
    "deep": DraftTree(num_steps=4, topk=3, num_draft_tokens=6),
    "wide": DraftTree(num_steps=3, topk=3, num_draft_tokens=16),
}
FAST = [name if name in ("chain3", "deep") else pytest.param(name, marks=pytest.mark.long) for name in TREES]
PROMPTS = np.random.default_rng(3).integers(0, 24, (3, 7)).astype(np.int32)
LENGTHS = np.array([7, 5, 1], np.int32)
MAX_TOKENS = 10


@pytest.fixture(autouse=True)
def exact_slots(monkeypatch):
    """Caches are rounded up to what the attention kernel for TPU reads; not here."""
    monkeypatch.setattr(cache_lib, "SLOTS", 1)


def decode(toy, tree: DraftTree | None, slots: int, draft: Draft | None = None) -> tuple[State, list[State]]:
    """All rounds one by one: the final state, and those from the prefill on."""
    draft = draft or toy.good
    state = prefilled(toy.target, None if tree is None else draft, PROMPTS, LENGTHS, tree, slots, MAX_TOKENS)
    caches = [state.cache] if tree is None else [state.cache, state.draft_cache]
    assert all(leaf.shape[2] == slots for leaf in jax.tree.leaves(caches))
    one_round = jax.jit(lambda state: advance(toy.target, draft, state, plan(tree)))
    states: list[State] = [state]
    while not states[-1].done.all():
        states.append(one_round(states[-1]))
    return states[-1], states


def check_committed(states: list[State]) -> None:
    """What a round committed is as it was after every later round, to the bit."""
    for before, after in itertools.pairwise(states):
        slots = before.cache.layers[0].keys.shape[2]
        committed = (np.arange(slots) < np.asarray(before.lengths)[:, None])[:, None, :, None]
        old, new = ((state.cache, state.draft_cache) for state in (before, after))
        for x, y in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
            np.testing.assert_array_equal(np.where(committed, x, 0), np.where(committed, y, 0))


@pytest.fixture(scope="module")
def vanilla(toy) -> np.ndarray:
    answers = generate(
        toy.target, None, jnp.asarray(PROMPTS), jnp.asarray(LENGTHS), jax.random.key(0), max_tokens=MAX_TOKENS
    )
    return np.asarray(answers.output[:, :MAX_TOKENS])


def needed(tree: DraftTree | None) -> int:
    """A row that has ended lacks only its root, and takes part in the others' rounds."""
    return PROMPTS.shape[1] + MAX_TOKENS - 1 + plan(tree).tier.scratch


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_a_decode_to_the_last_slot_says_what_vanilla_says(toy, vanilla, name):
    tree = TREES[name]
    assert cache_length_needed(PROMPTS.shape[1], MAX_TOKENS, tree) >= needed(tree)
    state, states = decode(toy, tree, needed(tree))
    np.testing.assert_array_equal(state.output[:, :MAX_TOKENS], vanilla)
    assert state.lengths.max() + plan(tree).tier.scratch == needed(tree)
    check_committed(states)


@pytest.mark.slow
def test_the_last_slot_is_a_draft_model_s(toy):
    """Its entries lie one slot further than a head's: a round writes to the last slot of its scratch, not beyond."""
    draft, tree = tiny_heads.draft_model(toy.target, layers=1, width=40), TREES["chain3"]
    toy = dataclasses.replace(toy, target=toy.target.observed_at(()))
    _, states = decode(toy, tree, 64, draft)
    for before, after in itertools.pairwise(states):
        assert before.draft_cache is not None and after.draft_cache is not None
        old, new = (np.asarray(cache.layers[0].keys) for cache in (before.draft_cache, after.draft_cache))
        written = np.any(np.not_equal(old, new), axis=(1, 3))
        for row in np.flatnonzero(~np.asarray(before.done)):
            assert np.flatnonzero(written[row])[-1] == before.lengths[row] + plan(tree).tier.scratch - 1


@pytest.mark.slow
@pytest.mark.parametrize("name", TREES)
def test_a_round_writes_no_further_than_its_scratch(toy, name):
    """Slots behind length + scratch stay as they were, in the target's cache and in the head's."""
    tree = TREES[name]
    _, states = decode(toy, tree, 64)
    for before, after in itertools.pairwise(states):
        end = np.asarray(before.lengths) + plan(tree).tier.scratch
        behind = (np.arange(64) >= end[:, None])[:, None, :, None]
        old, new = ((state.cache, state.draft_cache) for state in (before, after))
        for x, y in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
            np.testing.assert_array_equal(np.where(behind, x, 0), np.where(behind, y, 0))
