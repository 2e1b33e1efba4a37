"""Shared functions of models, against numpy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import llama_config, make_target

from eagle3_jax.kernels.linear.api import linear
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.layers import embeddings


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17])
def test_products_of_any_number_of_rows(rows):
    """A CPU takes another way for few rows than for one or many; all give the same."""
    generator = np.random.default_rng(rows)
    x = generator.normal(size=(1, rows, 24)).astype(np.float32)
    kernel = generator.normal(size=(24, 15)).astype(np.float32)
    np.testing.assert_allclose(jax.jit(linear)(x, kernel), x @ kernel, rtol=1e-5, atol=1e-5)


def test_cosines_are_computed_once_a_pass_on_a_cpu():
    """XLA for CPUs drops barriers, and would compute them again in every layer."""
    target = make_target(llama_config(num_hidden_layers=4, aux_layers=(1, 2, 3))).model

    def read(model, tokens, positions):
        return model(tokens, Pass(positions, jnp.zeros(1, jnp.int32)), model.empty_cache(1, 16, 8))[0]

    tokens, positions = jnp.zeros((1, 8), jnp.int32), jnp.arange(8)[None]
    text = jax.jit(read).lower(target, tokens, positions).compile().as_text()
    assert str(text).count(" cosine(") == 1


def test_a_loop_gathers_from_a_bfloat16_table_without_converting_it():
    def gather(table, tokens):
        return jax.lax.fori_loop(0, 4, lambda i, x: x + embeddings(table, tokens + i), jnp.zeros((3, 64), jnp.bfloat16))

    table, tokens = jnp.ones((512, 64), jnp.bfloat16), jnp.arange(3)
    np.testing.assert_array_equal(gather(table, tokens), 4)
    memory: Any = jax.jit(gather).lower(table, tokens).compile().memory_analysis()
    assert memory.temp_size_in_bytes < table.nbytes
