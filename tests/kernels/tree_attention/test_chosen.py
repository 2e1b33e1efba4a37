"""Attention to the slots that an indexer chooses, against a loop: in rows and pages, of texts, documents and trees."""

import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.kernels.tree_attention import chosen
from eagle3_jax.kernels.tree_attention.chosen import Index, attend_chosen, best_slots

BATCH, SLOTS, SIZE, COUNT = 2, 64, 16, 5


def example(rng, tail, t):
    """Rows of an indexer's keys and of latents, the same in pages, queries of both, and the indexer's weights."""
    index, latents = (rng.normal(size=(BATCH, 1, SLOTS, d)).astype(np.float32) for d in (8, 12))
    table = rng.permutation(BATCH * SLOTS // SIZE + 2)[: BATCH * SLOTS // SIZE].reshape(BATCH, -1)
    pages = []
    for rows in (index, latents):
        own = np.full((table.size + 2, 1, SIZE, rows.shape[3]), np.nan, np.float32)
        for b, j in np.ndindex(table.shape):
            own[table[b, j]] = rows[b, :, j * SIZE : (j + 1) * SIZE]
        pages.append(own)
    queries, weights, heads = (rng.normal(size=(BATCH, t, *more)) for more in ((3, 8), (3,), (4, 12)))
    lengths = rng.integers(2, SLOTS - tail, BATCH)
    return (index, latents), pages, table, [x.astype(np.float32) for x in (queries, weights, heads)], lengths


@pytest.mark.parametrize("kind", ["causal", "documents", "tree"])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("at_a_time", [1, 2, 100])
def test_it_is_a_loop_s(kind, paged, at_a_time, monkeypatch):
    rng, t, tail = np.random.default_rng(0), 5, 7 if kind == "tree" else 5
    rows, pages, table, (queries, weights, heads), lengths = example(rng, tail, t)
    monkeypatch.setattr(chosen, "_BYTES", at_a_time * 4 * BATCH * 3 * SLOTS)
    mask = np.tril(rng.random((BATCH, tail, tail)) < 0.6) | np.eye(tail, dtype=bool)
    mask = np.tril(np.ones_like(mask))[:, tail - t :] if kind != "tree" else mask[:, tail - t :]
    first = rng.integers(0, 2 + lengths[:, None], (BATCH, t)) if kind == "documents" else None
    index, latents = (jnp.asarray(x) for x in (pages if paged else rows))
    where = jnp.asarray(table, jnp.int32) if paged else None
    seen = None if kind != "tree" else jnp.asarray(mask)
    starts = None if first is None else jnp.asarray(first, jnp.int32)
    new = Index(jnp.asarray(queries), jnp.asarray(weights), jnp.zeros((BATCH, t, 1, 8)))
    got = best_slots(new, index, jnp.asarray(lengths, jnp.int32), seen, where, starts, COUNT)
    attended = attend_chosen(jnp.asarray(heads), latents, got, where)
    for b, i in np.ndindex(BATCH, t):
        visible = [*range(lengths[b]), *(lengths[b] + np.flatnonzero(mask[b, i]))]
        visible = [s for s in visible if first is None or s >= first[b, i]]
        scores = np.maximum(queries[b, i] @ rows[0][b, 0].T, 0).T @ weights[b, i]
        best = sorted(visible, key=lambda s: -scores[s])[:COUNT]
        assert [s for s in np.asarray(got)[b, i] if s >= 0] == best
        products = heads[b, i] @ rows[1][b, 0, best].T / 12**0.5
        shares = np.exp(products - products.max(-1, keepdims=True))
        expected = shares / shares.sum(-1, keepdims=True) @ rows[1][b, 0, best]
        np.testing.assert_allclose(attended[b, i], expected, atol=1e-5, rtol=1e-5)


def test_of_equal_scores_the_first_slots_are_chosen():
    """So a node of a tree, whose ancestors lie apart, chooses as the same tokens in a row do."""
    nothing, lengths = Index(jnp.zeros((1, 3, 2, 8)), jnp.ones((1, 3, 2)), jnp.zeros((1, 3, 1, 8))), jnp.asarray([4])
    keys = jnp.ones((1, 1, 16, 8))
    in_a_row = best_slots(nothing, keys, lengths, None, None, None, COUNT)
    np.testing.assert_array_equal(in_a_row, jnp.broadcast_to(jnp.arange(COUNT), (1, 3, COUNT)))
    mask = jnp.asarray([[[True, False, False], [False, True, False], [True, False, True]]])
    in_a_tree = best_slots(nothing, keys, lengths, mask, None, None, 6)
    np.testing.assert_array_equal(in_a_tree[0, 1:], [[0, 1, 2, 3, 5, -1], [0, 1, 2, 3, 4, 6]])
