"""A token drawn from logits in one pass is the one that the inverted running sums of the probabilities give."""

import dataclasses

import arm
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from llvmlite import ir

from eagle3_jax.decoding.rounds.sampling import Sampling, draw, probabilities, sample
from eagle3_jax.kernels.draw import cpu as draw_cpu

run = jax.jit(draw_cpu.draw)


def reference(logits, temperature, coins):
    """In float64, as `decoding.sampling.draw` says; and how near the coins were to a border."""
    size, width = len(logits), draw_cpu.block_width(len(logits))
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)

    def invert(weights, coin):
        sums = np.cumsum(weights) / weights.sum()
        return int(np.searchsorted(sums, coin, side="right")), np.abs(sums - coin).min()

    blocks = [weights[i : i + width] for i in range(0, size, width)]
    block, near = invert(np.array([part.sum() for part in blocks]), coins[0])
    inside, nearer = invert(blocks[block], coins[1])
    return block * width + inside, min(near, nearer)


@pytest.mark.slow
@examples(40)
@given(st.integers(1, 20), st.integers(2, 700), st.sampled_from([0.3, 0.7, 1.0, 2.0]), st.integers(0, 99))
def test_it_is_the_token_of_the_running_sums(rows, size, temperature, seed):
    rng = np.random.default_rng(seed)
    logits, coins = (4 * rng.normal(size=(rows, size))).astype(np.float32), rng.random((rows, 2)).astype(np.float32)
    got = np.asarray(run(jnp.asarray(logits), jnp.full(rows, temperature), jnp.asarray(coins)))
    for row in range(rows):
        expected, border = reference(logits[row], temperature, coins[row])
        assert got[row] == expected or border < 1e-5


def test_it_draws_as_often_as_is_probable():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(np.tile(rng.normal(size=50).astype(np.float32), (40_000, 1)))
    coins = jnp.asarray(rng.random((40_000, 2)), jnp.float32)
    counts = np.bincount(np.asarray(run(logits, jnp.full(40_000, 0.8), coins)), minlength=50)
    expected = np.asarray(jax.nn.softmax(logits[0] / 0.8))
    deviations = (counts / 40_000 - expected) / np.sqrt(expected * (1 - expected) / 40_000)
    assert np.abs(deviations).max() < 4


def test_cold_rows_get_the_first_of_the_greatest_and_forbidden_tokens_never_come():
    logits = np.full((3, 300), -np.inf, np.float32)
    logits[0, [7, 200]] = 5.0
    logits[1, 299] = 0.0
    logits[2, 0] = -3.0
    coins = jnp.asarray([[0.5, 0.5], [0.999999, 0.999999], [0.0, 0.0]], jnp.float32)
    assert run(jnp.asarray(logits), jnp.asarray([0.0, 1.0, 0.5]), coins).tolist() == [7, 299, 0]


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_give_some_token(wrong):
    """The round fails by itself then; nothing may be read from beside the row."""
    logits = jnp.full((2, 40), wrong, jnp.float32)
    got = run(logits, jnp.asarray([0.0, 1.0]), jnp.full((2, 2), 0.9))
    assert all(0 <= token < 40 for token in got.tolist())


def test_draws_compile_for_arm():
    """To instructions for vectors; loads of a part of one, which Arm has none of, become single ones."""
    module = ir.Module("arm")
    draw_cpu.write_draw(module, "arm", 500)
    assert ".4s" in arm.assembly(module)


@pytest.mark.slow
def test_a_neighbour_with_filters_does_not_change_a_token():
    """Filters anywhere in a batch let all rows take the general way."""
    rng = np.random.default_rng(1)
    logits = jnp.asarray(3 * rng.normal(size=(64, 500)), jnp.float32)
    coins = jnp.asarray(rng.random((64, 2)), jnp.float32)
    temperature = jnp.asarray([1.0, *rng.choice([0.0, 0.5, 1.0], 63)], jnp.float32)
    plain = dataclasses.replace(Sampling.greedy(64), temperature=temperature)
    asking = dataclasses.replace(plain, top_k=plain.top_k.at[0].set(3))
    alone, beside = (jax.jit(sample)(logits, sampling, coins) for sampling in (plain, asking))
    np.testing.assert_array_equal(alone[1:], beside[1:])
    np.testing.assert_array_equal(alone, draw(coins, probabilities(logits, plain)))
