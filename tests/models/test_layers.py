"""The functions models are made of, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eagle3_jax.models.layers import argmax, linear, vocabulary_logits


@settings(max_examples=60, deadline=None)
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
@pytest.mark.parametrize("vocabulary", [64, 61])
def test_products_of_any_number_of_rows(rows, vocabulary):
    """A CPU takes other ways for few rows than for one or many; all give the same."""
    generator = np.random.default_rng(rows)
    x = generator.normal(size=(1, rows, 24)).astype(np.float32)
    kernel = generator.normal(size=(24, 15)).astype(np.float32)
    table = generator.normal(size=(vocabulary, 24)).astype(np.float32)
    np.testing.assert_allclose(jax.jit(linear)(x, kernel), x @ kernel, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jax.jit(vocabulary_logits)(x, table), x @ table.T, rtol=1e-5, atol=1e-5)
