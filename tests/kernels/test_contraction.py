"""Products that are trained, and their gradients: exact sums, operands of one dtype."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.kernels.contraction import contract

SPECS = {
    "mk,kn->mn": ((600, 24), (24, 15)),
    "mk,nk->mn": ((600, 24), (15, 24)),
    "bkrd,bskd->bkrs": ((2, 3, 40, 16), (2, 50, 3, 16)),
}


@pytest.mark.parametrize("of_y", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("spec", SPECS)
def test_gradients_of_bfloat16_are_summed_in_float32_of_bfloat16_products(spec, of_y):
    """Float32 weights below bfloat16 rows, as in training: no gradient is rounded on its way to the weights."""
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in SPECS[spec])
    y = y.astype(of_y)
    product, cotangent = contract(spec, x, y), jnp.asarray(rng.normal(size=contract(spec, x, y).shape), jnp.float32)
    cotangent = cotangent.astype(jnp.bfloat16).astype(jnp.float32)
    exact_x, exact_y, over = (np.asarray(value, np.float64) for value in (x, y, cotangent))
    assert product.dtype == jnp.float32
    np.testing.assert_allclose(product, np.einsum(spec, exact_x, exact_y), rtol=1e-4, atol=1e-4)

    def gradients(x, y):
        return jax.vjp(lambda x, y: contract(spec, x, y), x, y)[1](cotangent)

    by_x, by_y = jax.jit(gradients)(x, y)
    assert (by_x.dtype, by_y.dtype) == (jnp.bfloat16, of_y)
    of_x, of_y_, of_result = spec.replace("->", ",").split(",")
    fine: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4} if of_y == jnp.float32 else {"rtol": 1e-2, "atol": 1e-2}
    np.testing.assert_allclose(
        by_y.astype(jnp.float32), np.einsum(f"{of_x},{of_result}->{of_y_}", exact_x, over), **fine
    )
    expected = np.einsum(f"{of_result},{of_y_}->{of_x}", over, exact_y)
    np.testing.assert_allclose(by_x.astype(jnp.float32), expected, rtol=1e-2, atol=1e-2)
    products = re.findall(r"dot_general .*: \((.*)\) ->", jax.jit(gradients).lower(x, y).as_text())
    assert len(products) == 2 and all(operands.count("xbf16>") == 2 for operands in products)


def test_other_devices_than_cpus_round_a_sum_at_once():
    """A cast behind the product would leave float32 for a model axis to add up, and for a checkpoint to keep."""
    topologies = pytest.importorskip("jax.experimental.topologies")
    pytest.importorskip("libtpu")
    mesh = jax.sharding.Mesh(np.array(topologies.get_topology_desc("v6e:2x2", "tpu").devices), ("model",))
    x, y = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (((64, 32), jnp.bfloat16), ((32, 16), jnp.float32)))

    def run(x, y, cotangent):
        product, gradients = jax.vjp(lambda x, y: contract("mk,kn->mn", x, y, x.dtype), x, y)
        return product, gradients(cotangent)

    def dots(*operands):
        text = str(jax.make_jaxpr(run)(*operands))
        return re.findall(r"(\w+)\[[\d,]+\] = dot_general", text)

    operands = x, y, jax.ShapeDtypeStruct((64, 16), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert dots(*operands)[:2] == ["bf16", "bf16"]
    assert dots(*operands)[:2] == ["f32", "f32"]
