"""Logits, argmax and top-k over a vocabulary, against numpy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import AxisType
from races import MODES, cases, no_races

from eagle3_jax.kernels.vocabulary import tpu as vocabulary_tpu
from eagle3_jax.kernels.vocabulary.api import argmax, vocabulary_logits, vocabulary_top_k


@pytest.mark.slow
@examples(60)
@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.integers(1, 300)),
        elements=st.sampled_from([-np.inf, -3.0, 0.0, 1.0, 7.0]),
    )
)
def test_argmax_takes_the_first_of_the_greatest(x):
    np.testing.assert_array_equal(argmax(jnp.asarray(x)), np.argmax(x, axis=-1))


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17])
@pytest.mark.parametrize("tokens", [64, 61])
def test_logits_of_any_number_of_rows(rows, tokens):
    """A CPU takes another way for few rows than for one or many; all give the same."""
    generator = np.random.default_rng(rows)
    x = generator.normal(size=(1, rows, 24)).astype(np.float32)
    table = generator.normal(size=(tokens, 24)).astype(np.float32)
    np.testing.assert_allclose(jax.jit(vocabulary_logits)(x, table), x @ table.T, rtol=1e-5, atol=1e-5)


top_k = jax.jit(vocabulary_top_k, static_argnames=("k", "implementation", "interpret"))


def reference(x, rows, k):
    """Every logit in float64, sorted."""
    logits = np.asarray(x, np.float64) @ np.asarray(rows, np.float64).T
    ids = np.argsort(-logits, axis=-1, kind="stable")[..., :k]
    greatest = logits.max(axis=-1, keepdims=True)
    normalizer = greatest + np.log(np.exp(logits - greatest).sum(axis=-1, keepdims=True))
    return np.take_along_axis(logits, ids, axis=-1) - normalizer, ids


def example(batch, vocabulary, hidden=24, dtype="float32", seed=0):
    """Small whole numbers: logits are exact in any type and order of summation, and many are equal."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-2, 3, size=(*batch, hidden))
    return jnp.asarray(x, dtype), jnp.asarray(rng.integers(-2, 3, size=(vocabulary, hidden)), dtype)


def check(got, expected):
    (log_probs, ids), (expected_log_probs, expected_ids) = got, expected
    assert log_probs.dtype == jnp.float32
    assert ids.dtype == jnp.int32
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(log_probs, expected_log_probs, rtol=1e-5, atol=1e-5)
    assert (np.asarray(log_probs) <= 0).all()


@pytest.mark.long
@examples(6)
@given(
    batch=st.sampled_from([(1,), (2, 3), (40,)]),
    vocabulary=st.sampled_from([1, 22, 256, 300, 1000]),  # less and more than a block, whole blocks and not
    k=st.sampled_from([1, 2, 5, 9]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    cores=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_top_k_in_both_forms(batch, vocabulary, k, dtype, cores, seed):
    k = min(k, vocabulary)
    x, rows = example(batch, vocabulary, dtype=dtype, seed=seed)
    expected = reference(x, rows, k)
    check(top_k(x, rows, k, implementation="xla"), expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary_tpu, "_BLOCK_ROWS", 256)
        patch.setattr(vocabulary_tpu, "_TILE_ROWS", 32)
        patch.setattr("eagle3_jax.kernels.vocabulary.tpu.cores", lambda: cores)
        check(vocabulary_top_k(x, rows, k, implementation="pallas", interpret=True), expected)


@pytest.mark.slow
def test_of_equals_the_lowest_come_first():
    """All tokens alike: in one lane, over lanes, blocks and cores."""
    x, rows = jnp.ones((3, 8)), jnp.ones((2500, 8))
    for cores in (1, 2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vocabulary_tpu, "_BLOCK_ROWS", 256)
            patch.setattr("eagle3_jax.kernels.vocabulary.tpu.cores", lambda cores=cores: cores)
            log_probs, ids = vocabulary_top_k(x, rows, 5, implementation="pallas", interpret=True)
        np.testing.assert_array_equal(ids, np.broadcast_to(np.arange(5), (3, 5)))
        np.testing.assert_allclose(log_probs, -np.log(2500), rtol=1e-6)


def test_nothing_leaks_from_a_query_into_others():
    """One that is not a number, beside the zeros that fill the last tile."""
    x, rows = example((19,), 300)
    expected = reference(x, rows, 4)
    got = top_k(x.at[7].set(jnp.nan), rows, 4, implementation="pallas", interpret=True)
    check([np.delete(a, 7, axis=0) for a in got], [np.delete(a, 7, axis=0) for a in expected])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "cores", "dtype"),
    cases(itertools.product(MODES, (1, 2), ("float32", "bfloat16")), daily=[("eager", 2, "float32")]),
)
def test_races_and_reads_of_what_was_never_written(mode, cores, dtype, monkeypatch):
    """What lies behind the vocabulary in the last block is NaN; two tiles of queries."""
    x, rows = example((20,), 700, dtype=dtype)
    monkeypatch.setattr(vocabulary_tpu, "_BLOCK_ROWS", 256)
    monkeypatch.setattr(vocabulary_tpu, "_TILE_ROWS", 16)
    monkeypatch.setattr(vocabulary_tpu, "cores", lambda: cores)
    with no_races(mode, cores) as races:
        check(vocabulary_top_k(x, rows, 4, implementation="pallas", interpret=races), reference(x, rows, 4))


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [1000, 1001])  # 1,001 tokens do not divide over the model axis
@pytest.mark.parametrize("batch", [(4, 3), (5,)])  # nor 5 queries over the data axis
def test_sharded_equals_unsharded(vocabulary, batch):
    x, rows = example(batch, vocabulary)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        got = top_k(x, rows, 4, implementation="pallas", interpret=True)
    check(got, reference(x, rows, 4))


@pytest.mark.slow
def test_more_devices_than_tokens_to_choose():
    """Each device has less than k tokens of its own."""
    x, rows = example((3,), 16)
    mesh = jax.make_mesh((1, 8), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        got = top_k(x, rows, 5, implementation="pallas", interpret=True)
    check(got, reference(x, rows, 5))


def test_more_than_there_are_is_refused():
    with pytest.raises(ValueError, match=r"k: got 5, expected 1 to the vocabulary's 4"):
        vocabulary_top_k(jnp.ones((1, 8)), jnp.ones((4, 8)), 5)
