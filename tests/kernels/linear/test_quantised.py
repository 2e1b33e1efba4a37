"""Matrices in few bits: how near they are, that products need no float copy, and on which devices they lie."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle3_jax.kernels.linear.api import linear, quantise
from eagle3_jax.kernels.linear.layouts import Padded, bytes_of, dense
from eagle3_jax.kernels.linear.quantised import QUANTIZATIONS
from eagle3_jax.kernels.vocabulary.api import vocabulary_logits, vocabulary_top_k
from eagle3_jax.models.experts import grouped

# Kind -> the largest error, in parts of the largest number that shares its scale: half a step.
STEPS = {"int8": 0.5 / 127, "fp8": 2.0**-4, "int4": 1 / 15}


@pytest.mark.slow
@examples(60)
@given(
    matrix=arrays.arrays(np.float32, (12, 5), elements=st.floats(-(2.0**60), 2.0**60, width=32)),
    kind=st.sampled_from(QUANTIZATIONS),
    axis=st.sampled_from([-2, -1]),
)
def test_each_number_is_within_half_a_step(matrix, kind, axis):
    group = 4 if kind == "int4" and axis == -2 else None
    made = quantise(jnp.asarray(matrix), kind, axis=axis, group=group)
    parts = matrix.reshape(-1, group or matrix.shape[axis], 5) if axis == -2 else matrix[None]
    largest = np.abs(parts).max(axis=axis, keepdims=True)
    bound = np.broadcast_to(largest * STEPS[kind] * (1 + 2e-5), parts.shape).reshape(matrix.shape) + 1e-37
    assert (np.abs(np.asarray(made.array()) - matrix) <= bound).all()


def make(kind: Any, shape: tuple[int, ...] = (64, 24), *, axis: int = -2) -> Any:
    matrix = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    return quantise(matrix, kind, axis=axis, group=32 if kind == "int4" else None)


@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_is_that_of_the_matrix_multiplied_out(kind, dtype):
    matrix = make(kind)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 64)), dtype)
    expected = np.asarray(x, np.float64) @ np.asarray(matrix.array(), np.float64)
    got = linear(x, matrix)
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == jnp.float32 else 0.02
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=tolerance, atol=tolerance * 10)
    padded = linear(x, Padded(matrix, (8,)))
    np.testing.assert_allclose(np.asarray(padded, np.float64), np.asarray(got, np.float64), rtol=tolerance, atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_rows_of_a_vocabulary_are_scored_and_looked_up(kind):
    rows = make(kind, (40, 64), axis=-1)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 64)), jnp.float32)
    expected = x @ rows.array().T
    np.testing.assert_allclose(vocabulary_logits(x, rows), expected, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(vocabulary_top_k(x, rows, 3)[1], jax.lax.top_k(expected, 3)[1])
    tokens = jnp.asarray([[7, 0], [39, 7]])
    np.testing.assert_array_equal(rows.rows(tokens), dense(rows)[tokens])


def test_packed_numbers_are_counted_as_half_a_byte():
    assert [bytes_of(make(kind).values) for kind in QUANTIZATIONS] == [64 * 24, 64 * 24, 64 * 12]
    assert bytes_of(jnp.zeros(3, jnp.bfloat16)) == 6 and bytes_of(jnp.zeros(3, bool)) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param("int8", marks=pytest.mark.smoke), pytest.param("fp8", marks=pytest.mark.long)]
)
def test_a_tpu_reads_the_8_bits_and_keeps_no_copy(kind):
    """Of a matrix, of a vocabulary's rows, and of experts, of which it reads one at a time."""
    pytest.importorskip("libtpu")
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:1x1").devices
    mesh = Mesh(np.array(devices[:1]), ("model",))

    def shape(*size: int, axis: int = -2) -> Any:
        made = jax.eval_shape(lambda x: quantise(x, kind, axis=axis), jax.ShapeDtypeStruct(size, jnp.bfloat16))
        place = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), made)

    def run(x, matrix, rows, experts, counts):
        x = grouped(linear(x, matrix), experts, counts).astype(x.dtype)
        return vocabulary_logits(x, rows)

    place = NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct((16, 2048), jnp.bfloat16, sharding=place)
    counts = jax.ShapeDtypeStruct((4,), jnp.int32, sharding=place)
    matrices = shape(2048, 2048), shape(4096, 2048, axis=-1), shape(4, 2048, 2048)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        memory: Any = jax.jit(run).lower(x, *matrices, counts).compile().memory_analysis()
    held = 2048 * (2048 + 4096 + 4 * 2048)
    assert held < memory.argument_size_in_bytes < 1.05 * held
    assert memory.temp_size_in_bytes < 2048 * 2048
