"""Products from panels: right, the same to the bit for any number of rows, on machines with narrower vectors too."""

import dataclasses
import re

import arm
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from llvmlite import ir

from eagle3_jax.kernels.cpu import compiler
from eagle3_jax.kernels.linear import cpu as linear_cpu
from eagle3_jax.kernels.linear.cpu import pack, product
from eagle3_jax.kernels.linear.layouts import Panels
from eagle3_jax.kernels.vocabulary.api import vocabulary_top_k

run = jax.jit(product)
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
KINDS = [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]  # of x and of panels


def operands(m, k, n, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(m, k)), DTYPES[dtype]), jnp.asarray(rng.normal(size=(k, n)), DTYPES[dtype])


def close(got, x, matrix):
    expected = np.asarray(x, np.float64) @ np.asarray(matrix, np.float64)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6 * x.shape[1])


@pytest.mark.slow
@examples(25)
@given(st.integers(1, 40), st.integers(1, 300), st.integers(1, 200), st.sampled_from(sorted(DTYPES)))
def test_it_is_the_product(m, k, n, dtype):
    x, matrix = operands(m, k, n, dtype)
    close(run(x, pack(matrix)), x, matrix)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_whatever_stands_beside_it(dtype):
    x, matrix = operands(21, 96, 160, dtype)
    panels = pack(matrix)
    together = run(x, panels)
    for count in range(1, 12):
        np.testing.assert_array_equal(run(x[5 : 5 + count], panels), together[5 : 5 + count])


@pytest.mark.slow
@pytest.mark.parametrize("halved", [(True, True), (True, False), (False, True)])
def test_what_bfloat16_holds_is_stored_so_and_multiplies_the_same(halved):
    """Equal to the bit for any number of rows, alone and in the gated form."""
    x, _ = operands(19, 70, 100, "float32")
    matrices = [operands(70, 70, 100, "bfloat16" if half else "float32", seed)[1] for seed, half in enumerate(halved)]
    packed = [pack(matrix.astype(jnp.float32)) for matrix in matrices]
    wide = [dataclasses.replace(panels, panels=panels.panels.astype(jnp.float32)) for panels in packed]
    assert [panels.panels.dtype for panels in packed] == [matrix.dtype for matrix in matrices]
    assert all(panels.dtype == jnp.float32 for panels in packed)
    for count in (1, 8, 19):
        np.testing.assert_array_equal(product(x[:count], packed[0]), product(x[:count], wide[0]))
        of_packed, of_wide = (product(x[:count], *panels) for panels in (packed, wide))
        np.testing.assert_array_equal(of_packed, of_wide)


@pytest.mark.parametrize("bit", range(16))
def test_one_number_that_bfloat16_does_not_hold_keeps_float32(bit):
    matrix = np.ones((3, 5), np.float32)
    matrix.view(np.uint32)[1, 2] |= 1 << bit
    assert pack(jnp.asarray(matrix)).panels.dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize("features", ["-avx512f", "-avx512f,-avx2,-fma"])
@pytest.mark.parametrize(("dtype", "stored"), KINDS)
def test_machines_with_narrower_vectors(dtype, stored, features):
    name = f"test_{dtype}_{stored}_{features}"
    module = ir.Module(name)
    linear_cpu.write_product(module, name, 4, 16, dtype, (stored,), 1)
    compiler.register(module, name, features)
    (x, _), (_, matrix) = (operands(7, 50, 48, kind) for kind in (dtype, stored))
    panels = matrix.reshape(50, 3, 16, 1).swapaxes(0, 1)
    close(jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((7, 48), jnp.float32))(x, panels), x, matrix)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "stored"), KINDS)
@pytest.mark.parametrize("count", [1, 2])
def test_products_compile_for_arm(dtype, stored, count):
    """To multiplications of vectors that add: 4 for each of the rows of blocks of 1 to 4, at least."""
    module = ir.Module("arm")
    linear_cpu.write_product(module, "arm", *linear_cpu._BLOCKS[False], dtype, (stored,) * count, 1)
    assert len(re.findall(r"fmla\tv\d+\.4s", arm.assembly(module))) >= 4 * (1 + 2 + 3 + 4)


@pytest.mark.slow
def test_many_calls_at_once(monkeypatch):
    """More helpers than threads: a call is done when it returns, and a helper that comes late finds nothing to do."""
    monkeypatch.setattr(compiler, "threads", lambda: 5)
    name, width = "test_helpers", 16
    module = ir.Module(name)
    linear_cpu.write_product(module, name, 4, width, "float32", ("float32",), 1)
    compiler.register(module, name)
    x, matrix = operands(3, 64, 64, "float32")
    panels = matrix.reshape(64, 4, width, 1).swapaxes(0, 1)

    @jax.jit
    def powers(x):
        call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((3, 64), jnp.float32))
        found = []
        for i in range(200):
            found.append(call(x + i, panels))
        return jnp.stack(found)

    for _ in range(5):
        got = powers(x)
    for i in range(200):
        close(got[i], x + i, matrix)
    assert isinstance(pack(matrix), Panels)


@pytest.mark.parametrize("k", [0, 49])
def test_more_tokens_than_the_vocabulary_has_are_refused(k):
    """Panels of 32 columns are padded to 64: padding is never a token."""
    x, matrix = operands(2, 16, 48, "float32")
    with pytest.raises(ValueError, match=f"k: got {k}, expected 1 to the vocabulary's 48"):
        vocabulary_top_k(x, pack(matrix), k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [49, 64])
def test_panels_are_cast_to_another_dtype_of_the_rows(dtype, k):
    """Near-ties are judged in float32 with the weights of a bfloat16 model."""
    x, matrix = operands(5, k, 48, dtype)
    (other,) = set(DTYPES.values()) - {DTYPES[dtype]}
    close(run(x, pack(matrix.astype(other))), x, matrix.astype(other).astype(DTYPES[dtype]))
