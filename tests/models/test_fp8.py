"""States in 8 bits: how close they are, and what stands for zeros."""

import jax.numpy as jnp
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from eagle3_jax.models import fp8


@pytest.mark.slow
@examples(100)
@given(
    x=arrays.arrays(np.float32, (3, 2, 8), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
    scale=st.sampled_from([1.0, 2.0**-30, 2.0**20]),
)
def test_a_round_trip_stays_within_half_a_step(x, scale):
    x = (x * np.float32(scale)).reshape(3, 16)
    coded = fp8.Fp8.of(jnp.asarray(x), 2)
    assert coded.values.dtype == fp8.DTYPE and coded.values.shape == (3, 16) and coded.scale.shape == (3, 2)
    assert np.isfinite(coded.scale).all() and (np.asarray(coded.scale) > 0).all()
    parts = x.reshape(3, 2, 8)
    got = np.asarray(coded.decode(), np.float32).reshape(parts.shape)
    largest = np.abs(parts).max(-1, keepdims=True)
    # Half of the last of 3 bits, a rounding to bfloat16, and half of the smallest step where a value is tiny.
    bound = np.abs(parts) * (2.0**-4 + 2.0**-8) + np.maximum(largest / 448, np.finfo(np.float32).tiny) * 2.0**-9
    assert (np.abs(got - parts) <= bound).all()


def test_fields_become_the_leaves_of_a_batch():
    coded = fp8.Fp8.of(jnp.asarray([[1.0, -2.0]]), 1)
    fields = {"aux": coded.values, "aux_scale": coded.scale, "argmax": jnp.zeros(1)}
    batch = fp8.paired(fields)
    assert batch.keys() == {"aux", "argmax"} and isinstance(batch["aux"], fp8.Fp8)
    plain = fp8.decoded(batch)
    assert plain["aux"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(plain["aux"], [[1.0, -2.0]])
