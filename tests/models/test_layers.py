"""The functions models are made of, against numpy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.models.layers import embeddings, linear


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17])
def test_products_of_any_number_of_rows(rows):
    """A CPU takes another way for few rows than for one or many; all give the same."""
    generator = np.random.default_rng(rows)
    x = generator.normal(size=(1, rows, 24)).astype(np.float32)
    kernel = generator.normal(size=(24, 15)).astype(np.float32)
    np.testing.assert_allclose(jax.jit(linear)(x, kernel), x @ kernel, rtol=1e-5, atol=1e-5)


def test_gradients_of_bfloat16_are_summed_in_float32_of_bfloat16_products():
    """Float32 weights below bfloat16 rows, as in training: no gradient is rounded on its way to the weights."""
    generator = np.random.default_rng(0)
    x = jnp.asarray(generator.normal(size=(2, 300, 24)), jnp.bfloat16)
    kernel = jnp.asarray(generator.normal(size=(24, 15)), jnp.bfloat16).astype(jnp.float32)
    cotangent = jnp.asarray(generator.normal(size=(2, 300, 15)), jnp.bfloat16)

    def gradients(x, kernel):
        return jax.vjp(linear, x, kernel)[1](cotangent)

    by_x, by_kernel = jax.jit(gradients)(x, kernel)
    assert (by_x.dtype, by_kernel.dtype) == (jnp.bfloat16, jnp.float32)
    rows, over = (np.asarray(value, np.float64).reshape(600, -1) for value in (x, cotangent))
    np.testing.assert_allclose(by_kernel, rows.T @ over, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(by_x.reshape(600, -1), over @ np.asarray(kernel, np.float64).T, rtol=1e-2, atol=1e-2)
    products = [e for e in jax.make_jaxpr(gradients)(x, kernel).eqns if e.primitive is jax.lax.dot_general_p]
    assert {(str(v.aval.dtype)) for e in products for v in e.invars} == {"bfloat16"}


def test_a_loop_gathers_from_a_bfloat16_table_without_converting_it():
    def gather(table, tokens):
        return jax.lax.fori_loop(0, 4, lambda i, x: x + embeddings(table, tokens + i), jnp.zeros((3, 64), jnp.bfloat16))

    table, tokens = jnp.ones((512, 64), jnp.bfloat16), jnp.arange(3)
    np.testing.assert_array_equal(gather(table, tokens), 4)
    memory: Any = jax.jit(gather).lower(table, tokens).compile().memory_analysis()
    assert memory.temp_size_in_bytes < table.nbytes
