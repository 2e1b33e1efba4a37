"""Products of rows with the experts that they were sent to: which weights are read, and what comes out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from eagle3_jax.models.experts import Experts, grouped


def make(counts: list[int], dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    rows, matrices = rng.normal(size=(sum(counts), 12)), rng.normal(size=(len(counts), 12, 10))
    return jnp.asarray(rows, dtype), jnp.asarray(matrices, dtype), jnp.asarray(counts, jnp.int32)


@pytest.mark.parametrize("counts", [[1, 0, 2, 0], [0, 0, 0, 5], [31, 32, 33, 0, 97], [0, 1]], ids=str)
def test_each_row_by_its_own_matrix(counts):
    rows, matrices, sizes = make(counts)
    expected = np.einsum("ri,rio->ro", rows, np.repeat(matrices, counts, axis=0))
    np.testing.assert_allclose(grouped(rows, matrices, sizes), expected, atol=1e-5, rtol=1e-5)


def test_bfloat16_is_summed_in_float32():
    rows, matrices, sizes = make([3, 4], jnp.bfloat16)
    expected = jax.lax.ragged_dot(rows, matrices, sizes, preferred_element_type=jnp.float32)
    got = grouped(rows, matrices, sizes)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5)


def test_experts_that_no_token_chose_are_not_read():
    """Where all are multiplied and the others masked, NaN spreads."""
    experts = Experts(12, 10, 4, dtype=jnp.float32, rngs=nnx.Rngs(0))
    x, chosen = jax.random.normal(jax.random.key(0), (2, 3, 12)), jnp.asarray([[[0, 2], [2, 0], [0, 2]]] * 2)
    expected = experts(x, chosen, jnp.full(chosen.shape, 0.5))
    for name in ("expert_gate", "expert_up", "expert_down"):
        parameter = getattr(experts, name)
        parameter[...] = parameter[...].at[jnp.asarray([1, 3])].set(jnp.nan)
    np.testing.assert_array_equal(experts(x, chosen, jnp.full(chosen.shape, 0.5)), expected)
    assert np.isfinite(expected).all()
