"""The distribution a request samples from, and its parameters."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from eagle3_jax.decoding.rounds.sampling import Sampling, block_width, draw, probabilities


def sampling(temperature: list[float], top_k: Any = 0, top_p: Any = 1.0, min_p: Any = 0.0) -> Sampling:
    batch = len(temperature)
    return Sampling(
        jnp.asarray(temperature, jnp.float32),
        jnp.asarray(np.broadcast_to(top_k, batch), jnp.int32),
        jnp.asarray(np.broadcast_to(top_p, batch), jnp.float32),
        jnp.asarray(np.broadcast_to(min_p, batch), jnp.float32),
        jax.random.split(jax.random.key(0), batch),
    )


def reference(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """One row, token by token."""
    scaled = logits.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    if top_k:
        order = order[:top_k]
    total, before, kept = sum(probs[token] for token in order), 0.0, np.zeros_like(probs)
    for token in order:
        if before < top_p * total:
            kept[token] = probs[token]
        before += probs[token]
    kept[kept < min_p * kept.max()] = 0.0
    return kept / kept.sum()


@examples(40)
@given(
    st.integers(0, 10_000),
    st.floats(0.2, 3.0),
    st.integers(0, 14),
    st.floats(0.05, 1.0),
    st.sampled_from([0.0, 0.1, 0.5]),
)
def test_temperature_then_top_k_then_top_p_then_min_p(seed, temperature, top_k, top_p, min_p):
    logits = np.random.default_rng(seed).normal(size=(2, 12)).astype(np.float32) * 3
    got = jax.jit(probabilities)(jnp.asarray(logits), sampling([temperature] * 2, top_k, top_p, min_p))
    for row in range(2):
        expected = reference(logits[row], temperature, top_k, top_p, min_p)
        # A token right at the edge of the mass may fall on either side of it in float32.
        kept = reference(logits[row], temperature, top_k, top_p, 0.0)
        share = kept / kept.max()
        edges = np.abs(np.cumsum(np.sort(kept)[::-1]) - top_p).min(), np.abs(share - min_p)[share > 0].min()
        if (edges[0] > 1e-5 or top_p == 1.0) and edges[1] > 1e-5:
            np.testing.assert_allclose(got[row], expected, atol=1e-5)


def test_temperatures_down_to_zero_in_one_batch():
    logits = jnp.broadcast_to(jnp.array([0.0, 100.0, 99.9, -50.0]), (4, 4))
    probs = np.asarray(probabilities(logits, sampling([0.0, 1e-6, 1e-5, 1.0])))
    assert np.isfinite(probs).all()
    np.testing.assert_array_equal(probs[:3], np.eye(4)[[1, 1, 1]])
    assert 0.4 < probs[3, 2] < 0.5


@pytest.mark.slow
def test_a_row_with_top_p_of_one_keeps_everything_beside_a_row_with_less():
    """Without it a running sum that rounds to the whole mass would cut a tail of about 1e-6."""
    logits = jnp.broadcast_to(-jnp.linspace(0, 24, 4096), (2, 4096))
    got = probabilities(logits, sampling([1.0, 1.0], 0, [1.0, 0.9]))
    assert int((got[0] > 0).sum()) == 4096
    assert int((got[1] > 0).sum()) < 4096


def running_sums(logits, temperature, coins):
    """The token in float64, as `draw` defines it; and the coins' distance from the nearest border."""
    width = block_width(len(logits))
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)

    def invert(weights, coin):
        sums = np.cumsum(weights) / weights.sum()
        return int(np.searchsorted(sums, coin, side="right")), np.abs(sums - coin).min()

    blocks = [weights[i : i + width] for i in range(0, len(logits), width)]
    block, near = invert(np.array([part.sum() for part in blocks]), coins[0])
    inside, nearer = invert(blocks[block], coins[1])
    return block * width + inside, min(near, nearer)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "temperature"), [(2, 0.3), (50, 1.0), (700, 0.7)])
def test_a_token_is_that_of_the_running_sums(size, temperature):
    rng = np.random.default_rng(size)
    logits, coins = (4 * rng.normal(size=(64, size))).astype(np.float32), rng.random((64, 2)).astype(np.float32)
    sampling = dataclasses.replace(Sampling.greedy(64), temperature=jnp.full(64, temperature))
    got = draw(jnp.asarray(coins), probabilities(jnp.asarray(logits), sampling))
    for row in range(64):
        expected, border = running_sums(logits[row], temperature, coins[row])
        assert got[row] == expected or border < 1e-5
