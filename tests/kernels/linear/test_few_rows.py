"""Products of few rows, padded to the number of rows that costs least."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.kernels.linear import few_rows
from eagle3_jax.kernels.linear.api import linear
from eagle3_jax.kernels.linear.layouts import Padded
from eagle3_jax.kernels.vocabulary.api import vocabulary_logits, vocabulary_top_k


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({1: 9.6, 2: 9.0, 4: 6.2, 8: 6.3, 16: 6.25}, (4, 8, 16)),
        ({1: 9.6, 2: 9.0, 4: 7.0, 8: 6.5, 16: 7.5}, (8, 16)),
        ({1: 5.0, 2: 6.0, 4: 5.5, 8: 5.3, 16: 6.0}, (1, 8, 16)),
        ({1: 5.0, 2: 5.05, 4: 4.95, 8: 5.0, 16: 5.05}, ()),
    ],
    ids=["all from four rows on", "eight alone", "one is cheap", "noise"],
)
def test_rows_that_no_larger_number_costs_less_than(seconds, expected):
    assert few_rows.cheapest(seconds) == expected


@pytest.mark.parametrize(("given", "taken"), [(1, 4), (4, 4), (5, 8), (9, 9)])
def test_a_product_has_the_next_rows_and_returns_those_that_were_given(given, taken):
    matrix, x, seen = jnp.zeros((16, 24)), np.random.default_rng(0).normal(size=(given, 16)), []

    def product(rows, of):
        assert of is matrix
        seen.append(np.asarray(rows))
        return rows

    returned = Padded(matrix, (4, 8)).apply(product, jnp.asarray(x, jnp.float32))
    assert [rows.shape for rows in seen] == [(taken, 16)] and not seen[0][given:].any()
    np.testing.assert_array_equal(returned, x.astype(np.float32))


@pytest.mark.slow
def test_its_results_are_the_matrix_s_own():
    rng = np.random.default_rng(0)
    x, matrix = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 1, 16), (16, 24)))
    near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    near(linear(x, Padded(matrix, (4, 8))), linear(x, matrix))
    rows = Padded(matrix.T, (4, 8))
    near(vocabulary_logits(x, rows), vocabulary_logits(x, matrix.T))
    near(vocabulary_top_k(x, rows, 2)[0], vocabulary_top_k(x, matrix.T, 2)[0])
