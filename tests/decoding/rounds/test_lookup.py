"""Drafts copied from the text: found where a plain search finds them, and the tokens stay the target's."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import LENGTHS, MAX_TOKENS, TEXTS, Tokenizer, generated

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding.choice.tiers import choice_for
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.rounds import lookup
from eagle3_jax.decoding.rounds.lookup import MOST, PROBABILITIES, continuation

find = jax.jit(continuation, static_argnames="count")
LONG = DraftTree(num_steps=7, num_draft_tokens=8, lookup_tokens=7)
GRAFTED = DraftTree(num_steps=3, topk=2, num_draft_tokens=8, lookup_tokens=5)


def search(tokens: list[int], count: int) -> tuple[list[int], int]:
    """The definition: longest match of the last tokens, the latest of equals, then what follows, again and again."""
    best, length = 0, 0
    for place in range(len(tokens) - 1):
        same = 0
        while same < min(MOST, place + 1) and tokens[place - same] == tokens[-1 - same]:
            same += 1
        if same and same >= length:
            best, length = place, same
    follows = list(tokens)
    for i in range(count if length else 0):
        follows.append(follows[best + 1 + i])
    return follows[len(tokens) :], length


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=3, max_size=3))
def test_it_finds_what_a_search_finds(sequences):
    history = np.full((3, 24), 9)  # what stands behind a sequence is not looked at
    for row, tokens in enumerate(sequences):
        history[row, : len(tokens)] = tokens
    ends = jnp.asarray([len(tokens) - 1 for tokens in sequences])
    got, lengths = find(jnp.asarray(history), ends, count=5)
    for row, tokens in enumerate(sequences):
        expected, length = search(tokens, 5)
        assert lengths[row] == length
        if length:
            assert got[row].tolist() == expected


@pytest.mark.slow
def test_each_copied_token_that_is_right_makes_the_next_more_probable():
    p, text = PROBABILITIES, [8, 1, 2, 3, 9, 1, 2]
    copied = lookup.copy(jnp.asarray([text, [1, 2, 3, 4, 5, 6, 7]]), jnp.array([6, 6]), 6)
    assert copied.tokens[0].tolist() == [3, 9, 1, 2, 3, 9]
    np.testing.assert_allclose(copied.scores[0], np.cumsum(np.log([p[1], p[2], p[3], p[4], p[5], p[5]])), rtol=1e-6)
    assert (np.asarray(copied.scores[1]) == -np.inf).all()


@pytest.mark.slow
def test_greedy_tokens_are_vanilla_s(toy, vanilla):
    state = generated(toy.target, None, tree=LONG)
    np.testing.assert_array_equal(state.output[:, :MAX_TOKENS], vanilla)
    assert 0 < int(state.drafted.max()) < int(state.rounds.max()), "where there is nothing to copy it does not draft"
    for row, length in enumerate(LENGTHS):  # the text that drafts are copied from is the text
        text = [*TEXTS[row, :length], *vanilla[row]]
        assert state.history is not None
        assert state.history[row, : len(text)].tolist() == text


def test_what_it_cannot_do_is_refused(toy):
    tree = DraftTree(num_steps=2, topk=2, num_draft_tokens=4)
    with pytest.raises(ValueError, match=r"tree: got DraftTree.*expected a chain \(topk=1\)"):
        Engine(toy.target, Tokenizer(), "lookup", tree, max_length=128)
    with pytest.raises(ValueError, match="draft: got None, expected a draft head"):
        Engine(toy.target, Tokenizer(), None, tree, max_length=128)
    unchecked: Any = inspect.unwrap(choice_for)  # as for users, for whom annotations are only text
    with pytest.raises(ValueError, match=r"draft: got 'runs/export', expected a loaded head or 'lookup'"):
        unchecked(toy.target.config, "runs/export", "auto")
    with pytest.raises(ValueError, match=r"tree: got None, expected a DraftTree, a list of them, or 'auto'"):
        unchecked(toy.target.config, "lookup", None)
    with pytest.raises(ValueError, match="draft: got None, expected a draft head"):
        generated(toy.target, None, tree=GRAFTED)
