"""The engine's programs, called as the runner calls them."""

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding.choice.tiers import CHAIN
from eagle3_jax.decoding.device import programs
from eagle3_jax.decoding.device.calls import Models
from eagle3_jax.decoding.device.memory import empty_state
from eagle3_jax.decoding.device.shapes import Sizes
from eagle3_jax.decoding.rounds.unread import ROOM
from eagle3_jax.decoding.tier import VANILLA, RoundPlan, Tier


@pytest.mark.slow
def test_what_was_cancelled_never_runs_again(toy):
    """Another request may own a cancelled one's pages: narrow and whole-batch rounds do not write there."""
    sizes, models = Sizes.plan(3, 64, 16, [VANILLA]), Models.of(toy.target, None)
    state = jax.jit(lambda m: empty_state(m, sizes, [VANILLA], None))(models)
    state = programs.rehearse(state, np.int32(8))
    before, pages = np.array(state.cache.layers[0].keys), np.array(state.page_table)[:, 0]
    cancelled, nobody = jnp.array([True, False, False]), jnp.zeros(3, bool)
    one, plan = (jnp.int32(1), jnp.int32(3)), RoundPlan(VANILLA, jnp.bool_(True))
    state, narrow = programs.decode(models, state, cancelled, jnp.array([1, 3]), *one, plan)
    state, whole = programs.decode(models, state, nobody, None, *one, plan)
    after = np.array(state.cache.layers[0].keys)
    assert [bool((after[page] != before[page]).any()) for page in pages] == [False, True, True]
    assert state.lengths.tolist() == [8, 10, 9] and state.done.tolist() == [True, False, False]
    assert (len(narrow), len(whole)) == (2, 3)


@pytest.mark.slow
def test_rounds_of_greedy_requests_and_others_in_one_program_copy_no_cache(toy):
    tier = Tier(DraftTree(num_steps=2, topk=2, num_draft_tokens=3), head=True)
    sizes, models = Sizes.plan(3, 64, 16, [tier]), Models.of(toy.target, toy.good)
    state = jax.jit(lambda m: empty_state(m, sizes, [tier], None))(models)
    assert state.draft_cache is not None
    few, nobody = (jnp.int32(1), jnp.int32(3)), jnp.zeros(3, bool)
    leaves, structure = jax.tree.flatten((models, state, nobody, None, *few, RoundPlan(tier, jnp.bool_(True))))
    first = len(jax.tree.leaves(models))
    places = range(first, first + len(jax.tree.leaves(state)))
    decode: Any = programs.decode

    def run(*leaves):
        return jax.tree.leaves(decode.__wrapped__(*jax.tree.unflatten(structure, leaves)))

    text = jax.jit(run, donate_argnums=places).lower(*leaves).compile().as_text() or ""
    caches = [layer.keys for cache in (state.cache, state.draft_cache) for layer in cache.layers]
    shapes = {f"f32[{','.join(map(str, cache.shape))}]" for cache in caches}
    copies = re.findall(r"(\w+\[[\d,]*\])\S* copy\(", text)
    assert "conditional(" in text and copies and not shapes & set(copies)


def test_padding_of_any_program_stays_in_the_page_table(toy):
    """The kernel writes the padding of a prompt's last stretch and of a catch-up pass; rounds have none."""
    tiers, models = [VANILLA, CHAIN], Models.of(toy.target, None)
    for max_length, page_size in itertools.product((1, 64, 100, 200, 2000), (16, 128, 256)):
        sizes = Sizes.plan(2, max_length, page_size, tiers)
        assert sizes.columns * page_size >= max_length + max(length for _, length in sizes.prefill_shapes)
        table = jax.eval_shape(lambda m, s=sizes: empty_state(m, s, tiers, None).page_table, models)
        assert table.shape == (2, -(-(max_length + CHAIN.scratch) // page_size))
        assert programs.beyond(jnp.zeros(table.shape, jnp.int32), page_size).shape[1] * page_size >= max_length + ROOM
