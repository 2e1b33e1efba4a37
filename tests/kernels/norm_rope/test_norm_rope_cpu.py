"""What lies between products equals XLA's forms, the same to the bit for any number of rows."""

import arm
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from llvmlite import ir

from eagle3_jax.kernels.norm_rope import cpu as rows_cpu
from eagle3_jax.kernels.norm_rope.cpu import NormWeight
from eagle3_jax.models import layers

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
norm = jax.jit(rows_cpu.rms_norm, static_argnums=2)
heads = jax.jit(rows_cpu.rotated_heads, static_argnums=3)
rotated = jax.jit(layers.apply_rope)


def normal(shape, dtype, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), DTYPES[dtype])


def close(got, expected, dtype):
    """bfloat16: one step of it at most, where a sum in another order rounds to the other side."""
    got, expected = (np.asarray(x, np.float32) for x in (got, expected))
    np.testing.assert_allclose(got, expected, rtol=1e-5 if dtype == "float32" else 2**-7, atol=1e-6)


@pytest.mark.slow
@examples(6)
@given(st.integers(1, 70), st.integers(1, 40), st.sampled_from(sorted(DTYPES)), st.sampled_from([1e-5, 1e-6]))
def test_norm_is_the_layers(m, steps, dtype, eps):
    h = steps * rows_cpu.WIDTH
    x, weight = normal((m, h), dtype), normal((h,), dtype, seed=1)
    got = norm(x, NormWeight(weight), eps)
    if dtype == "float32":
        return close(got, layers.rms_norm(x, weight, eps), dtype)
    # Rounded twice, as the layers do; a sum in another order may end on the other side of the first rounding.
    exact, rows = np.asarray(x, np.float64), np.asarray(weight)
    exact /= np.sqrt(np.mean(exact * exact, axis=-1, keepdims=True) + eps)
    sides = [(exact * slightly).astype(np.float32).astype(rows.dtype) * rows for slightly in (1 - 1e-6, 1 + 1e-6)]
    low, high = np.minimum(*sides), np.maximum(*sides)
    assert np.all((low <= got) & (got <= high))


@pytest.mark.slow
@examples(6)
@given(st.integers(1, 70), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.sampled_from(sorted(DTYPES)))
def test_heads_are_split_and_rotated_as_the_layers_do(m, kv_heads, group, steps, dtype):
    half = steps * rows_cpu.WIDTH
    fused = normal((m, kv_heads * (group + 2) * 2 * half), dtype)
    positions = jnp.asarray(np.random.default_rng(2).integers(0, 2000, (1, m)))
    cos, sin = layers.rope_table(positions, layers.rope_frequencies(2 * half, 1e4))
    by_head = fused.reshape(1, m, kv_heads, group + 2, 2 * half)
    q, k, v = by_head[..., :-2, :].reshape(1, m, -1, 2 * half), by_head[..., -2, :], by_head[..., -1, :]
    expected = rotated(q, (cos, sin)), rotated(k, (cos, sin)), v
    got = heads(fused, cos.reshape(m, half), sin.reshape(m, half), kv_heads)
    for part, of_layers in zip(got, expected, strict=True):
        close(part, of_layers.reshape(m, -1), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_whatever_stands_beside_it(dtype):
    x, weight = normal((21, 96), dtype), NormWeight(normal((96,), dtype, seed=1))
    together = norm(x, weight, 1e-5)
    for count in range(1, 12):
        np.testing.assert_array_equal(norm(x[5 : 5 + count], weight, 1e-5), together[5 : 5 + count])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_compile_for_arm(dtype):
    """To instructions for vectors."""
    for name in ("norm", "heads"):
        module = ir.Module(name)
        if name == "norm":
            rows_cpu.write_norm(module, name, dtype, 1e-5)
        else:
            rows_cpu.write_heads(module, name, dtype, 3)
        assert ".4s" in arm.assembly(module), name


def test_zeros_and_large_numbers():
    weight = NormWeight(jnp.ones(16))
    np.testing.assert_array_equal(norm(jnp.zeros((2, 16)), weight, 1e-5), np.zeros((2, 16)))
    np.testing.assert_allclose(norm(jnp.full((1, 16), 1e15), weight, 1e-5), np.ones((1, 16)), rtol=1e-6)
    assert np.isnan(np.asarray(norm(jnp.full((1, 16), jnp.nan), weight, 1e-5))).all()
