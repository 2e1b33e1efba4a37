"""A model with packed matrices computes the same, lies where it lay, and shares what is not packed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.experimental.layout import Format, Layout

from eagle3_jax.config import TargetConfig
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.kernels.cpu import compiler
from eagle3_jax.kernels.linear.layouts import Panels, QuantisedPanels
from eagle3_jax.models import inference_layout
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.checkpoint.fetch import load_target
from eagle3_jax.models.inference_layout import for_inference, for_many_rows
from eagle3_jax.models.quantisation import quantised_model


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tiny.write_target(tmp_path_factory.mktemp("target"))
    return load_target(TargetConfig(name=str(folder), aux_layers=(1, 2, 3)))


def run(model, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    none = jnp.zeros(len(tokens), jnp.int32)
    hidden, aux, _ = model(tokens, Pass(positions, none), model.empty_cache(len(tokens), 128))
    return model.logits(hidden), aux


@pytest.mark.slow
def test_it_computes_what_the_model_computes(target):
    packed = for_inference(target.model)
    assert isinstance(packed.lm_head[...], Panels)
    assert packed.embed[...] is target.model.embed[...]
    assert for_inference(packed) is packed
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, tiny.CONFIG["vocab_size"], (3, 20)), jnp.int32)
    for got, expected in zip(jax.jit(run)(packed, tokens), jax.jit(run)(target.model, tokens), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-4, rtol=2e-4)


def test_a_model_on_several_devices_is_left_as_it_is(target):
    mesh = jax.make_mesh((2,), ("model",))
    spread = jax.device_put(target.model, jax.NamedSharding(mesh, jax.P()))
    assert for_inference(spread) is spread


@pytest.mark.parametrize(("tiles", "dtype", "packed"), [(1, "bfloat16", 0), (1, "float32", 1), (0, "bfloat16", 1)])
def test_many_rows_of_bfloat16_are_left_to_amx(target, monkeypatch, tiles, dtype, packed):
    monkeypatch.setattr(compiler, "has_tiles", lambda: bool(tiles))
    model = jax.tree.map(lambda leaf: leaf.astype(dtype), target.model)
    assert (for_many_rows(model) is not model) == bool(packed)


def test_by_rows_though_the_default_has_columns(target):
    """Of the same numbers, and a program is compiled for them as they lie."""
    columns = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    embed = jax.device_put(target.model.embed[...], Format(Layout((1, 0)), columns))
    model = jax.tree.map(lambda leaf: embed if leaf is target.model.embed[...] else leaf, target.model)
    assert model.embed[...].format.layout.major_to_minor == (1, 0)
    twin = inference_layout._by_rows(model)
    assert twin.embed[...].format.layout.major_to_minor == (0, 1)
    assert twin.lm_head[...] is model.lm_head[...]
    np.testing.assert_array_equal(twin.embed[...], target.model.embed[...])
    read = jax.jit(lambda rows: rows[jnp.array([3, 1])]).lower(twin.embed[...]).compile().input_formats
    assert jax.tree.leaves(read)[0].layout.major_to_minor == (0, 1)


@pytest.mark.long
@pytest.mark.parametrize("place", ["a device", pytest.param("a mesh of one", marks=pytest.mark.long)])
def test_wherever_it_lies_warm_programs_stay_compiled(target, place):
    device = jax.devices()[1]
    if place == "a mesh of one":
        mesh = jax.make_mesh((1, 1), ("data", "model"), devices=[device], axis_types=(jax.sharding.AxisType.Auto,) * 2)
        device = jax.NamedSharding(mesh, jax.P())
    engine = Engine(jax.device_put(target.model, device), target.tokenizer, batch_size=2, max_length=64)
    assert engine.target.lm_head[...].panels.devices() == {jax.devices()[1]}  # pyrefly: ignore
    engine.warm_up(progress=False)
    compiled = engine.stats().programs
    engine.generate([[1, 2, 3]] * 3, SamplingParams(max_tokens=5))
    engine.generate([[1, 2, 3] * 9] * 3, SamplingParams(max_tokens=5, temperature=1.0, seed=0))
    assert engine.stats().programs == compiled


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_quantised_model_is_packed_in_its_bits(target, weights):
    """Its logits are those of its matrices multiplied out, but for rows rounded to 8 bits; embeddings stay rows."""
    model = quantised_model(target.model, weights, vocabulary=True)
    packed = for_inference(model)
    assert isinstance(packed.lm_head[...], QuantisedPanels)
    assert isinstance(packed.blocks[0].mlp.down[...], QuantisedPanels)
    assert packed.embed[...].values is model.embed[...].values
    assert for_inference(packed) is packed
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, tiny.CONFIG["vocab_size"], (3, 20)), jnp.int32)
    got, expected = (np.asarray(jax.jit(run)(of, tokens)[0]) for of in (packed, model))
    assert 1e-5 < np.abs(got - expected).mean() < 0.03 * np.abs(expected).mean()


def test_what_the_kernel_does_not_multiply_stays(target):
    model = quantised_model(target.model, "fp8", vocabulary=True)
    packed = for_inference(model)
    assert packed.blocks[0].mlp.down[...].values is model.blocks[0].mlp.down[...].values
    assert packed.output_rows.values is model.output_rows.values
