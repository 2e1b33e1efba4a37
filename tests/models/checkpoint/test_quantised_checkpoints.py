"""Checkpoints that come in 8 bits: read as floats, kept as stored, and refused by name."""

import json
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
import tiny_families
from safetensors.numpy import load_file, save_file

from eagle3_jax.config import TargetConfig
from eagle3_jax.mesh import parameter_path
from eagle3_jax.models.checkpoint.fetch import TargetError, load_target, read_config
from eagle3_jax.models.checkpoint.load import WeightsError, load_model
from eagle3_jax.models.families import FAMILIES
from eagle3_jax.models.quantisation import axis_of, is_quantised

# As published: https://huggingface.co/Qwen/Qwen3-8B-FP8 and RedHatAI's checkpoints of Llama 3.1, config.json.
BLOCK_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def compressed(**weights: Any) -> dict[str, Any]:
    own = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": own | weights, "input_activations": {"num_bits": 8}}}
    kind = "int" if weights.get("type") == "int" else "float"
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "config_groups": groups,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


FORMS = {
    "block fp8": (BLOCK_FP8, "_scale_inv", ml_dtypes.float8_e4m3fn),
    "fp8 by channel": (compressed(), "_scale", ml_dtypes.float8_e4m3fn),
    "fp8 by tensor": (compressed(strategy="tensor"), "_scale", ml_dtypes.float8_e4m3fn),
    "int8 by channel": (compressed(type="int"), "_scale", np.int8),
}
SIZES = {"hidden_size": 64, "intermediate_size": 160}


def write_target(folder: pathlib.Path, model_type: str) -> None:
    """Rows and columns of more than a block, where they are not a Llama's."""
    if model_type == "llama":
        tiny.write_target(folder)
    else:
        family = next(family for family in FAMILIES if family.config.model_type == model_type)
        sizes = {"hidden_size": 144, "intermediate_size": 160, "linear_value_head_dim": 40, "head_dim": 24}
        tiny_families.write(folder, family, **sizes)


def write(
    folder: pathlib.Path, form: str, config: dict[str, Any] | None = None, model_type: str = "llama"
) -> tuple[dict[str, np.ndarray], Any]:
    """A quantised checkpoint; returns its tensors, and the same matrices multiplied out."""
    section, suffix, dtype = FORMS[form]
    write_target(folder, model_type)
    tensors, rng = load_file(folder / "model.safetensors"), np.random.default_rng(0)
    floats = dict(tensors)
    for name in [name for name in tensors if re.search(r"(proj(_qkvz?|_z)?|w[123])\.weight$", name)]:
        rows, columns = tensors[name].shape
        shape = {"block fp8": (-(-rows // 128), -(-columns // 128)), "fp8 by tensor": (1,)}.get(form, (rows, 1))
        factors = rng.uniform(0.01, 0.02, shape).astype(ml_dtypes.bfloat16)
        spread = np.broadcast_to(factors.astype(np.float32), shape)
        if form == "block fp8":
            spread = np.repeat(np.repeat(spread, 128, axis=0)[:rows], 128, axis=1)[:, :columns]
        values = np.clip(tensors[name].astype(np.float32) / spread, -120, 120)
        tensors[name] = (np.round(values) if dtype == np.int8 else values).astype(dtype)
        tensors[f"{name}{suffix}"] = factors
        floats[name] = tensors[name].astype(np.float32) * spread
    tensors["model.layers.0.mlp.down_proj.input_scale"] = np.ones(1, np.float32)
    save_file(tensors, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config or section}))
    return tensors, floats


def leaves(model: Any) -> dict[str, Any]:
    found = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_quantised)
    return {parameter_path(path): leaf for path, leaf in found}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "form"),
    [
        *(("llama", form) for form in FORMS),
        ("qwen3_5_text", "block fp8"),
        *(pytest.param("qwen3_5_text", form, marks=pytest.mark.long) for form in FORMS if form != "block fp8"),
        pytest.param("qwen3_next", "block fp8", marks=pytest.mark.long),
        pytest.param("lfm2", "fp8 by channel", marks=pytest.mark.long),
    ],
)
def test_it_is_read_as_the_floats_that_it_stands_for(tmp_path, model_type, form):
    """And kept as stored, on one device and on two: the same numbers, multiplied out in the program."""
    _, floats = write(tmp_path / "quantised", form, model_type=model_type)
    write_target(tmp_path / "floats", model_type)
    save_file({name: np.asarray(x, np.float32) for name, x in floats.items()}, tmp_path / "floats/model.safetensors")
    expected = leaves(load_target(TargetConfig(name=str(tmp_path / "floats"), aux_layers=(1, 2, 3))).model)
    config = read_config(tmp_path / "quantised", (1, 2, 3))
    mesh = jax.make_mesh((1, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    read = leaves(load_model(tmp_path / "quantised", config, jnp.float32))
    kept, split = (
        leaves(load_model(tmp_path / "quantised", config, jnp.float32, m, weights="stored")) for m in (None, mesh)
    )
    for name, want in expected.items():
        np.testing.assert_array_equal(read[name], want)
        for got in kept[name], split[name]:
            is_matrix = axis_of(name, vocabulary=False) is not None
            assert is_quantised(got) == is_matrix
            if is_matrix:
                assert got.values.dtype == FORMS[form][2]
                np.testing.assert_array_equal(got.array(), want)
    assert split["blocks/0/mlp/down"].values.sharding.spec == jax.P("model", None)


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("block fp8", {"scale": None}, "missing tensor model.layers.1.self_attn.q_proj.weight_scale_inv [1, 1]"),
        ("fp8 by channel", {"scale": np.ones((3, 1), np.float32)}, "weight_scale: got shape [3, 1], expected [64, 1]"),
        (
            "int8 by channel",
            {"scale": np.full((64, 1), np.nan, np.float32)},
            "q_proj.weight_scale: got NaN or infinity",
        ),
    ],
)
def test_bad_scales_are_refused_by_tensor(tmp_path, form, change, message):
    tensors, _ = write(tmp_path, form)
    name = f"model.layers.1.self_attn.q_proj.weight{FORMS[form][1]}"
    tensors = {key: x for key, x in tensors.items() if key != name}
    if change["scale"] is not None:
        tensors[name] = change["scale"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=re.escape(message)):
        load_model(tmp_path, read_config(tmp_path, (1, 2, 3)), jnp.float32)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, "quantization_config.quant_method: got 'awq', expected 'fp8' or 'compr"),
        ({"quant_method": "fp8"}, "quantization_config.weight_block_size: got None, expected [128, 128]"),
        (compressed() | {"format": "pack-quantized"}, "quantization_config.format: got 'pack-quantized', expected 'fl"),
        (compressed(num_bits=4), "quantization_config.config_groups.group_0.weights.num_bits: got 4, expected 8"),
        (compressed(symmetric=False), "config_groups.group_0.weights.symmetric: got False, expected True"),
    ],
)
def test_what_is_not_read_is_refused_by_its_name(tmp_path, section, message):
    write(tmp_path, "fp8 by channel", section)
    with pytest.raises(TargetError, match=re.escape(message)):
        read_config(tmp_path)


def test_stored_weights_of_a_checkpoint_of_floats_are_refused(tmp_path):
    tiny.write_target(tmp_path)
    with pytest.raises(WeightsError, match="target.weights: got 'stored' for .*, which holds floats; expected a check"):
        load_target(TargetConfig(name=str(tmp_path), weights="stored", aux_layers=(1, 2, 3)))
