"""The functions models are made of, against numpy."""

import jax
import numpy as np
import pytest

from eagle3_jax.models.layers import linear


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17])
def test_products_of_any_number_of_rows(rows):
    """A CPU takes another way for few rows than for one or many; all give the same."""
    generator = np.random.default_rng(rows)
    x = generator.normal(size=(1, rows, 24)).astype(np.float32)
    kernel = generator.normal(size=(24, 15)).astype(np.float32)
    np.testing.assert_allclose(jax.jit(linear)(x, kernel), x @ kernel, rtol=1e-5, atol=1e-5)
