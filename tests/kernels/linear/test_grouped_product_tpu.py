"""The TPU's kernel for groups of few bits: equal to the matrix multiplied out, and compiled without a copy of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from races import MODES, cases, no_races

from eagle3_jax.kernels.contraction import contract
from eagle3_jax.kernels.linear.api import linear, quantise
from eagle3_jax.kernels.linear.layouts import Quantised, chunk_of
from eagle3_jax.kernels.linear.quantised import has_tpu_kernel, product
from eagle3_jax.models.experts import grouped

CHIPS = {"v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}


def matrix(kind: Any, shape: tuple[int, ...], group: int, dtype: Any = jnp.bfloat16) -> Quantised:
    floats = np.random.default_rng(0).normal(loc=0.3, size=shape)
    return quantise(jnp.asarray(floats, dtype), kind, group=group)


def rows(count: int, k: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(loc=0.3, size=(count, k)), jnp.bfloat16)


def kernel(x: jax.Array, given: Quantised, **options: Any) -> np.ndarray:
    def dense(x: jax.Array, y: jax.Array) -> jax.Array:
        return contract("mk,kn->mn", x, y)

    options = {"interpret": True, **options}
    return np.asarray(product(x, given, dense, implementation="pallas", **options), np.float64)


def exact(x: jax.Array, given: Quantised) -> np.ndarray:
    values = Quantised(given.values, given.scale, given.offset, jnp.float32).array()
    return np.asarray(x, np.float64) @ np.asarray(values, np.float64)


@pytest.mark.parametrize(
    ("kind", "group", "count", "k", "n"),
    [
        pytest.param("int4", 32, 1, 256, 1152, id="columns that the last block has no more of"),
        pytest.param("int4", 32, 24, 2560, 128, id="two chunks of rows"),
        pytest.param("int8", 16, 5, 128, 128, id="as in Q6_K"),
        pytest.param("fp8", 128, 9, 1024, 128, id="a scale for all numbers of a product"),
    ],
)
def test_sums_of_few_rows_are_scaled_in_float32(kind, group, count, k, n):
    given = matrix(kind, (k, n), group)
    x = rows(count, k)
    np.testing.assert_allclose(kernel(x, given), exact(x, given), rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize(("kind", "count", "k"), [("int4", 25, 2560), ("int8", 40, 256)])
def test_values_for_more_rows_are_the_matrix_multiplied_out(kind, count, k):
    given = matrix(kind, (k, 256), 32)
    x = rows(count, k)
    np.testing.assert_allclose(kernel(x, given), multiplied_out(x, given), rtol=1e-5, atol=2e-3)


def multiplied_out(x: jax.Array, given: Quantised) -> np.ndarray:
    return np.asarray(contract("mk,kn->mn", x, given.array()))


@pytest.mark.parametrize(("count", "expected"), [(3, exact), (33, multiplied_out)])
def test_blocks_of_columns_share_a_scale(count, expected):
    x, values = rows(count, 256), matrix("fp8", (256, 256), 256).values
    scale = jnp.asarray(np.random.default_rng(2).uniform(0.001, 0.01, (2, 2)), jnp.float32)
    given = Quantised(values, scale, None, jnp.bfloat16)
    np.testing.assert_allclose(kernel(x, given), expected(x, given), rtol=1e-5, atol=1e-3)


def in_blocks(experts: int, size: int, block: int) -> Quantised:
    """As block FP8: a scale for `block` x `block` values."""
    values = matrix("fp8", (experts, size, size), size).values
    scale = np.random.default_rng(2).uniform(0.001, 0.01, (experts, size // block, size // block))
    return Quantised(values, jnp.asarray(scale, jnp.float32), None, jnp.bfloat16)


@pytest.mark.parametrize("stack", [matrix("int4", (3, 256, 128), 32), in_blocks(3, 256, 128)], ids=["int4", "blocks"])
def test_one_of_a_stack_is_multiplied(stack):
    x = rows(4, 256)
    for index in range(3):
        one = jax.tree.map(lambda part, index=index: part[index], stack)
        np.testing.assert_array_equal(kernel(x, stack, index=jnp.int32(index)), kernel(x, one))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "kind", "group", "k", "count"),
    cases(
        (
            (mode, *case, count)
            for case in (("int4", 32, 2560), ("int8", 16, 2560), ("fp8", 128, 4096))
            for count in (3, 25)
            for mode in MODES
        ),
        daily=[("eager", "int4", 32, 2560, 3), ("on_wait", "int8", 16, 2560, 25)],
    ),
)
def test_races_and_reads_of_what_was_never_written(mode, kind, group, k, count):
    """One of a stack, by its scaled sums and by its scaled values; what lies behind the last columns is NaN."""
    x, stack = rows(count, k), matrix(kind, (2, k, 1152), group)
    one = jax.tree.map(lambda part: part[1], stack)
    with no_races(mode) as races:
        got = kernel(x, stack, index=jnp.int32(1), interpret=races)
    np.testing.assert_allclose(got, (exact if count < 25 else multiplied_out)(x, one), rtol=1e-5, atol=2e-3)


def test_what_the_kernel_does_not_take_is_left_to_xla():
    x, given = rows(4, 256), matrix("int4", (256, 128), 32)
    assert has_tpu_kernel(x, given)
    assert not has_tpu_kernel(x.astype(jnp.float32), given)  # a row's result had better not depend on the others
    assert not has_tpu_kernel(rows(513, 256), given)
    assert not has_tpu_kernel(x, matrix("int4", (256, 120), 32))
    assert not has_tpu_kernel(x, matrix("int8", (256, 128), 256))  # one scale for each column: XLA's own
    assert not has_tpu_kernel(rows(4, 192), matrix("int4", (192, 128), 32))
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert not has_tpu_kernel(x, given)


def test_a_chunk_has_whole_registers_of_scales():
    """By Llama, Qwen 2.5 0.5B, and Qwen 2.5 14B; 128 values a scale, as in block FP8, need more rows, or all."""
    assert [chunk_of(k, 32) for k in (4096, 14336, 4864, 5120)] == [2048, 2048, 256, 1280]
    assert [chunk_of(k, 128) for k in (7168, 14336, 1536, 4864)] == [1024, 2048, 1536, None]


def compiled(chip: str, run: Any, *arguments: Any) -> Any:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices
    mesh = Mesh(np.array(devices[:1]), ("model",))
    place = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(run).lower(*shapes).compile()


def shaped(kind: Any, shape: tuple[int, ...], group: int) -> Any:
    return jax.eval_shape(lambda x: quantise(x, kind, group=group), jax.ShapeDtypeStruct(shape, jnp.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "kind", "group", "count"),
    [
        pytest.param("v5e", "int4", 32, 8, marks=pytest.mark.smoke),
        ("v6e", "int4", 32, 512),
        *(
            pytest.param(chip, kind, group, count, marks=pytest.mark.long)
            for chip in CHIPS
            for kind, group in (("int4", 32), ("int8", 16), ("fp8", 128))
            for count in (1, 16, 24, 25, 512)
        ),
    ],
)
def test_a_tpu_reads_the_few_bits_alone(chip, kind, group, count):
    """Of a matrix, and of experts, of which it reads one at a time."""
    pytest.importorskip("libtpu")

    def run(x, matrix, experts, counts):
        return grouped(linear(x, matrix), experts, counts)

    x = jax.ShapeDtypeStruct((count, 4096), jnp.bfloat16)
    matrices = shaped(kind, (4096, 2048), group), shaped(kind, (8, 2048, 2048), group)
    made = compiled(chip, run, x, *matrices, jax.ShapeDtypeStruct((8,), jnp.int32))
    assert made.as_text().count("tpu_custom_call") >= 2
    # Activations alone: no expert's 2 MiB of 4 bits, of which there are eight.
    activations = 3 * 4 * 2048 * (count + 128)
    assert made.memory_analysis().temp_size_in_bytes < activations + (1 << 20)


@pytest.mark.slow
def test_scales_of_one_expert_alone_are_spread_over_columns():
    """By DeepSeek-V3's experts, whose scales for each column would take 117 MB."""
    pytest.importorskip("libtpu")
    values = jax.ShapeDtypeStruct((256, 7168, 2048), jnp.float8_e4m3fn)
    stack = Quantised(values, jax.ShapeDtypeStruct((256, 56, 16), jnp.float32), None, jnp.bfloat16)
    x, counts = jax.ShapeDtypeStruct((16, 7168), jnp.bfloat16), jax.ShapeDtypeStruct((256,), jnp.int32)
    # A copy of the scales as they are takes 8 MiB (8.1 with libtpu 0.0.50.1).
    assert compiled("v6e", grouped, x, stack, counts).memory_analysis().temp_size_in_bytes < 9 << 20


@pytest.mark.long
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("kind", "group"), [("int4", 32), ("int8", 16), ("fp8", 128)])
@pytest.mark.parametrize(("count", "k", "n"), [(512, 14336, 4096), (24, 28672, 1024), (512, 28672, 1024)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_largest_products_fit_vmem(chip, kind, group, count, k, n, dtype):
    pytest.importorskip("libtpu")
    given, x = shaped(kind, (k, n), group), jax.ShapeDtypeStruct((count, k), jnp.bfloat16)
    scale, offset = (part and jax.ShapeDtypeStruct(part.shape, dtype) for part in (given.scale, given.offset))
    made = compiled(chip, linear, x, Quantised(given.values, scale, offset, jnp.bfloat16))
    assert "tpu_custom_call" in made.as_text()
