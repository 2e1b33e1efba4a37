"""A live draft vocabulary: tokens of the answers get places, and rows that draft at once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_heads
from hypothesis import given
from hypothesis import strategies as st
from tiny_blocks import make_block_head

from eagle3_jax.config import MeshConfig
from eagle3_jax.decoding.adapt import vocabulary
from eagle3_jax.mesh import make_mesh
from eagle3_jax.models.drafts.dflash2 import DFlash2
from eagle3_jax.models.drafts.dspark import DSpark
from eagle3_jax.training.state import init_state

V = 60


@given(
    st.sets(st.integers(0, V - 1), min_size=1),
    st.lists(st.integers(0, 3), min_size=V, max_size=V),
    st.integers(0, V - 1),
)
def test_a_token_of_the_answers_gets_a_place_and_another_makes_room(held, occurrences, end):
    old, counts = np.array(sorted(held), np.int32), np.array(occurrences)
    new = vocabulary.renewed(old, counts, (end,))
    assert len(new) == len(old) and (np.diff(new) > 0).all() and new.dtype == np.int32
    came, left = set(new.tolist()) - held, held - set(new.tolist())
    assert not any(counts[token] for token in left) and end not in left
    assert all(counts[token] for token in came)
    stayed = held - left
    out = set(np.flatnonzero(counts).tolist()) - set(new.tolist())
    assert not out or stayed <= {*np.flatnonzero(counts).tolist(), end}, "a place is left"
    assert not (out and came) or max(counts[list(out)]) <= min(counts[list(came)]), "the most frequent come first"
    absent = [token for token in stayed if not counts[token] and token != end]
    assert not (left and absent) or max(absent) < min(left), "what the tokenizer learnt last leaves first"
    places = vocabulary.places(old, new)
    assert [int(old[at]) if at >= 0 else None for at in places] == [t if t in held else None for t in new.tolist()]


@pytest.mark.parametrize("kind", ["eagle3", DSpark, DFlash2], ids=["eagle3", "dspark", "dflash2"])
def test_tokens_keep_their_rows_and_moments_and_a_new_one_gets_what_fits(kind):
    rng = np.random.default_rng(0)
    old, new = np.sort(rng.permutation(V)[:24]).astype(np.int32), np.sort(rng.permutation(V)[:24]).astype(np.int32)
    target = tiny_heads.TARGET
    head = tiny_heads.make_draft(ids=old.tolist(), target=target).head if kind == "eagle3" else make_block_head(kind)
    rows = jnp.asarray(rng.normal(size=(V, 16)), jnp.float32)
    maps = {name: rng.normal(size=(16, getattr(head, name).shape[1])) for name in head.vocabulary_rows}
    mesh = make_mesh(MeshConfig(data=1, model=1), jax.devices()[:1])
    state = init_state(lambda x: x, head, optax.adam(1e-3), mesh)
    state = jax.tree.map(lambda x: x + jnp.arange(x.size).reshape(x.shape) / x.size if x.ndim else x, state)
    for name, map_ in maps.items():
        getattr(state.head, name)[...] = jnp.asarray(rows[old] @ map_ + 0.5, jnp.float32)
    places = vocabulary.places(old, new)
    stays, kept = places >= 0, places[places >= 0]
    assert 0 < stays.sum() < len(new)
    moved = vocabulary.make_move(head.vocabulary_rows, mesh)(state, jnp.asarray(places), rows[old], rows[new])
    assert moved.step == state.step + 1
    for name, map_ in maps.items():
        found = getattr(moved.head, name)[...]
        assert np.array_equal(found[stays], getattr(state.head, name)[...][kept])
        expected = (rows[new] @ map_ + 0.5)[~stays]
        assert np.abs(found[~stays] - expected).max() < 0.05 * np.abs(expected).max()
        for moment in ("mu", "nu"):
            moments, before = (getattr(getattr(x.opt_state[0], moment), name)[...] for x in (moved, state))
            assert np.array_equal(moments[stays], before[kept]) and np.any(before)
            assert not np.any(moments[~stays])
    (here, found), (there, left) = ((x.head, x.opt_state[0].mu) for x in (moved, state))
    for tree in (here, found, there, left):
        for name in maps:
            getattr(tree, name)[...] = jnp.zeros(())
    assert jax.tree.all(jax.tree.map(np.array_equal, (here, found), (there, left))), "nothing else moves"
