"""Targets in few bits: which parameters, how near their logits are, on meshes, with drafts, and what is refused."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_families
from flax import nnx

from eagle3_jax.config import TargetConfig
from eagle3_jax.kernels.linear.layouts import bytes_of, dense
from eagle3_jax.mesh import parameter_path, shardings
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.checkpoint.fetch import load_target
from eagle3_jax.models.families import FAMILIES
from eagle3_jax.models.layers import SHARDING_RULES
from eagle3_jax.models.quantisation import axis_of, is_quantised, quantised_model

WORDS = np.random.default_rng(0).integers(0, 60, (2, 12))


def logits(model):
    tokens = jnp.asarray(WORDS, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    counts = jnp.full(len(tokens), tokens.shape[1])
    this = Pass(positions, jnp.zeros(len(tokens), jnp.int32), counts=counts)
    hidden, _, _ = model(tokens, this, model.empty_cache(len(tokens), 128))
    return model.logits(hidden)


def leaves(model):
    found = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_quantised)
    return {parameter_path(path): leaf for path, leaf in found}


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", pytest.param("int4", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(x, id=name, marks=() if name in ("llama", "gpt_oss", "deepseek_v3") else pytest.mark.long)
        for x in FAMILIES
        for name in [x.config.model_type]
    ],
)
def test_every_family_computes_with_its_quantised_matrices(family, weights):
    """As with the same matrices multiplied out."""
    made = quantised_model(tiny_families.make(family), weights, vocabulary=weights == "int8")
    out = jax.tree.map(dense, made, is_leaf=is_quantised)
    np.testing.assert_allclose(jax.jit(logits)(made), jax.jit(logits)(out), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.config.model_type)
def test_of_every_family_all_matrices_are_quantised(family):
    config = tiny_families.config_of(family)
    shapes = nnx.eval_shape(lambda: family.model(config, rngs=nnx.Rngs(0)))
    found = leaves(shapes)
    floats = {name for name, leaf in found.items() if len(leaf.shape) > 1 and axis_of(name, vocabulary=True) is None}
    small = "router", "kv_up", "bias", "taps", "gates", "shared_gate"
    indexer = "index_q", "index_k", "index_weights"  # few numbers, which choose what is attended to
    assert all(name.endswith((*small, *indexer)) for name in floats)
    vocabulary = {name for name in found if axis_of(name, vocabulary=True) != axis_of(name, vocabulary=False)}
    assert vocabulary - {"embed_per_layer"} == {"embed", "lm_head"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_target(tmp_path_factory.mktemp("target"))


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_checkpoint_is_quantised_as_it_is_read(folder, weights):
    """On one device and on a mesh; each lies where the rules put the matrix."""
    config = TargetConfig(name=str(folder), aux_layers=(1, 2, 3), weights=weights, quantise_vocabulary=True)
    mesh = jax.make_mesh((1, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    plain = load_target(dataclasses.replace(config, weights=None, quantise_vocabulary=False)).model
    one, two = load_target(config).model, load_target(config, mesh).model
    for got, floats in (one, plain), (two, jax.device_put(plain, shardings(plain, mesh, SHARDING_RULES))):
        expected = quantised_model(floats, weights, vocabulary=True)
        for leaf, want in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
            np.testing.assert_array_equal(leaf, want)
    places = shardings(two, mesh, SHARDING_RULES)
    jax.tree.map(lambda x, place: np.testing.assert_(x.sharding.is_equivalent_to(place, x.ndim)), two, places)
    assert "model" in two.blocks[0].mlp.down[...].values.sharding.spec
    held = sum(map(bytes_of, jax.tree.leaves(one)))
    assert held < {"int8": 0.3, "int4": 0.35}[weights] * sum(map(bytes_of, jax.tree.leaves(plain)))
    if weights == "int8":  # groups of 4 bits are cut where 32 does not divide a device's part
        with jax.set_mesh(mesh):
            np.testing.assert_allclose(jax.jit(logits)(two), jax.jit(logits)(one), atol=1e-4, rtol=1e-4)


def test_scales_of_parts_of_4_bits_stay_with_their_parts():
    """Groups never span two devices, also where 32 does not divide a device's part."""
    mesh = jax.make_mesh((1, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    place = jax.NamedSharding(mesh, jax.P(None, "model", None))
    for size, group in (128, 32), (48, 8), (10, 1):
        matrix = jax.ShapeDtypeStruct((3, size, 16), jnp.float32, sharding=place)
        made = quantised_model({"expert_down": matrix}, "int4", vocabulary=False)["expert_down"]
        assert made.scale.shape == made.offset.shape == (3, size // group, 16)
        assert math.gcd(size // 2, 32) == group


def test_a_vocabulary_alone_is_not_quantised(folder):
    with pytest.raises(ValueError, match=r"weights: got None, expected a kind of weights, as target.quantise_voc"):
        TargetConfig(name=str(folder), quantise_vocabulary=True)
