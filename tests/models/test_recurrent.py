"""The cache of a convolution: trees, commits, prompts in rows and in stretches are as one pass over the whole text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_jax.models.cache import Pass
from eagle3_jax.models.recurrent import ConvolutionCache

CHANNELS, SLOTS, TAIL, LONGEST = 3, 3, 6, 12


def whole(inputs: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """One text [t, c], tap by tap."""
    taps = len(kernel)
    rows = np.concatenate([np.zeros((taps - 1, inputs.shape[1])), inputs])
    return np.sum([kernel[j] * rows[j : j + len(inputs)] for j in range(taps)], axis=0)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def read(cache, inputs, kernel, slots, lengths, counts, **more):
    positions = jnp.asarray(lengths)[:, None] + jnp.arange(inputs.shape[1])[None]
    this = Pass(positions, jnp.asarray(lengths), states=jnp.asarray(slots), counts=jnp.asarray(counts), **more)
    return cache.convolve(jnp.asarray(inputs), jnp.asarray(kernel), this)


def stale(taps: int, seed: int = 9) -> ConvolutionCache:
    """Slots that other sequences have used."""
    cache = ConvolutionCache.empty(SLOTS, taps - 1, TAIL, CHANNELS, jnp.float32)
    return dataclasses.replace(cache, inputs=jnp.asarray(random(*cache.inputs.shape, seed=seed)))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(2, 4), st.integers(0, 7), st.lists(st.integers(0, 5), min_size=TAIL - 1, max_size=TAIL - 1), st.data()
)
def test_a_tree_and_its_committed_path_are_the_text_along_it(taps, length, draws, data):
    """In a slot that another sequence left; a row without a request beside it writes nothing."""
    kernel, text = random(taps, CHANNELS), random(1, 8, CHANNELS, seed=1)
    parents = [-1, *(draw % (node + 1) for node, draw in enumerate(draws))]
    mask = np.zeros((TAIL, TAIL), bool)
    for node, parent in enumerate(parents):
        mask[node, node] = True
        if parent >= 0:
            mask[node] |= mask[parent]
    slot, cache = data.draw(st.integers(0, SLOTS - 1)), stale(taps)
    if length:
        _, cache = read(cache, text, kernel, [slot], [0], [length])
    nodes, depth = random(TAIL, CHANNELS, seed=2), mask.sum(axis=1) - 1
    positions = jnp.asarray(np.stack([length + depth, depth]))
    this = Pass(
        positions, jnp.asarray([length, 0]), jnp.asarray(np.stack([mask, mask])), states=jnp.asarray([slot, SLOTS])
    )
    both = jnp.asarray(np.stack([nodes, random(TAIL, CHANNELS, seed=3)]))
    got, after = cache.convolve(both, jnp.asarray(kernel), this)
    for node in range(TAIL):
        path = np.flatnonzero(mask[node])
        expected = whole(np.concatenate([text[0, :length], nodes[path]]), kernel)[-1]
        np.testing.assert_allclose(got[0, node], expected, atol=1e-5)
    leaf = data.draw(st.integers(0, TAIL - 1))
    path = np.flatnonzero(mask[leaf])
    padded = jnp.asarray(np.stack([np.pad(path, (0, TAIL - len(path)), mode="edge")] * 2))
    committed = after.commit(this, padded, jnp.asarray([len(path), 0]))
    others = np.delete(np.arange(SLOTS), slot)
    np.testing.assert_array_equal(committed.inputs[others], cache.inputs[others])
    now = np.concatenate([text[0, :length], nodes[path]])
    more = random(1, 2, CHANNELS, seed=4)
    last, _ = read(committed, more, kernel, [slot], [len(now)], [2])
    np.testing.assert_allclose(last[0], whole(np.concatenate([now, more[0]]), kernel)[-2:], atol=1e-5)


@pytest.mark.parametrize("taps", [2, 4])
def test_a_prompt_in_rows_of_one_pass_and_padding(taps):
    """Two rows of one prompt, the second padded; another prompt in a third row; a row of no request."""
    kernel, text, other = random(taps, CHANNELS), random(9, CHANNELS, seed=1), random(4, CHANNELS, seed=2)
    rows = np.zeros((4, 5, CHANNELS), np.float32)
    rows[0], rows[1, :4], rows[2, :4], rows[1, 4:] = text[:5], text[5:], other, 7
    got, cache = read(stale(taps), rows, kernel, [2, 2, 0, SLOTS], [0, 5, 0, 0], [5, 4, 4, 0], continued=True)
    np.testing.assert_allclose(np.concatenate([got[0], got[1, :4]]), whole(text, kernel), atol=1e-5)
    np.testing.assert_allclose(got[2, :4], whole(other, kernel), atol=1e-5)
    np.testing.assert_array_equal(cache.inputs[2, : taps - 1], text[-taps + 1 :])
    np.testing.assert_array_equal(cache.inputs[0, : taps - 1], other[-taps + 1 :])
    np.testing.assert_array_equal(cache.inputs[1], stale(taps).inputs[1])


def test_documents_in_a_row_begin_anew():
    kernel, one, two = random(3, CHANNELS), random(4, CHANNELS, seed=1), random(5, CHANNELS, seed=2)
    row = np.concatenate([one, two])[None]
    this = Pass(jnp.asarray([[*range(4), *range(5)]]), jnp.zeros(1, jnp.int32), counts=jnp.asarray([9]))
    got, _ = ConvolutionCache.empty(1, 2, 1, CHANNELS, jnp.float32).convolve(
        jnp.asarray(row), jnp.asarray(kernel), this
    )
    np.testing.assert_allclose(got[0], np.concatenate([whole(one, kernel), whole(two, kernel)]), atol=1e-5)


def test_a_tail_that_has_no_room_is_refused():
    this = Pass(jnp.arange(7)[None], jnp.zeros(1, jnp.int32))
    with pytest.raises(ValueError, match="tail: got 7 tokens, expected at most 6"):
        jax.eval_shape(lambda: stale(2).convolve(jnp.zeros((1, 7, CHANNELS)), jnp.zeros((2, CHANNELS)), this))
