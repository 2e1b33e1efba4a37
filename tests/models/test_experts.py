"""Products of rows with their experts: which weights are read, and the result."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle3_jax.models.experts import Experts, grouped

OTHERS = ("v5e:1x1", "v5p:1x1x1", "tpu7x:1x1x1")


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


@pytest.mark.slow
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


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("topology", ["v6e:1x1", *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)])
def test_experts_compile_for_a_tpu(topology, dtype):
    pytest.importorskip("libtpu")
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices[:1]), ("model",))

    def shapes(tree: Any) -> Any:
        place = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)

    experts = shapes(nnx.eval_shape(lambda: Experts(256, 128, 8, dtype=dtype, rngs=nnx.Rngs(0))))
    x, chosen = jax.ShapeDtypeStruct((2, 4, 256), dtype), jax.ShapeDtypeStruct((2, 4, 2), jnp.int32)
    weights = jax.ShapeDtypeStruct((2, 4, 2), jnp.float32)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(lambda experts, *rest: experts(*rest)).lower(experts, *shapes((x, chosen, weights)))
    assert "ragged_dot" in lowered.as_text()
    lowered.compile()
