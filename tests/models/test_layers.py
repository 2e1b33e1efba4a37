"""The functions models are made of, against numpy."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eagle3_jax.models.layers import argmax


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.integers(1, 40)),
        elements=st.sampled_from([-np.inf, -3.0, 0.0, 1.0, 7.0]),
    )
)
def test_argmax_takes_the_first_of_the_greatest(x):
    np.testing.assert_array_equal(argmax(jnp.asarray(x)), np.argmax(x, axis=-1))
