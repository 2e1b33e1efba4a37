"""Targets whose weights are a GGUF file: read as the package gguf reads them, kept in their bits, refused by name."""

import dataclasses
import gc
import json
import pathlib
import re
import shutil
import weakref
from typing import Any

import jax
import numpy as np
import pytest
import tiny_families
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFReader,
    GGUFWriter,
    RopeScalingType,
    TokenType,
    get_tensor_name_map,
)
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file, save_file

from eagle3_jax import Engine, SamplingParams
from eagle3_jax.config import TargetConfig
from eagle3_jax.models.chat_template import prompt_ids
from eagle3_jax.models.checkpoint.fetch import load_target, load_tokenizer, read_config
from eagle3_jax.models.checkpoint.gguf_blocks import BLOCK_KINDS, multiplied_out
from eagle3_jax.models.checkpoint.gguf_file import hf_name, open_gguf
from eagle3_jax.models.checkpoint.load import WeightsError
from eagle3_jax.models.families import FAMILIES, family_of
from eagle3_jax.models.quantisation import is_quantised

ROOT = pathlib.Path(__file__).parents[3]
# `model_type` -> llama.cpp's architecture.
ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "mistral": MODEL_ARCH.LLAMA,
    "ministral3": MODEL_ARCH.MISTRAL3,
    "phi3": MODEL_ARCH.PHI3,
    "smollm3": MODEL_ARCH.SMOLLM3,
    "olmo2": MODEL_ARCH.OLMO2,
    "olmo3": MODEL_ARCH.OLMO2,
    "granite": MODEL_ARCH.GRANITE,
    "granitemoehybrid": MODEL_ARCH.GRANITE_HYBRID,
    "seed_oss": MODEL_ARCH.SEED_OSS,
    "exaone4": MODEL_ARCH.EXAONE4,
    "ernie4_5": MODEL_ARCH.ERNIE4_5,
    "hunyuan_v1_dense": MODEL_ARCH.HUNYUAN_DENSE,
}
PERMUTED = {"llama", "mistral", "ministral3", "smollm3", "granite", "granitemoehybrid"}
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_hidden_layers": 4,
    "max_position_embeddings": 256,
}
OWN: dict[str, Any] = {
    "phi3": {"rope_scaling": None},
    "ministral3": {"sliding_window": None},
    "granitemoehybrid": {"shared_intermediate_size": 512},
}
# llama.cpp's mixtures: `Q4_K_M` has more bits for values and `down` of some layers.
MIXTURES = {
    "Q8_0": {r"": "Q8_0"},
    "Q4_1": {r"embed|lm_head": "Q8_0", r"": "Q4_1"},
    "Q4_K_M": {r"v_proj|down_proj|embed|lm_head": "Q6_K", r"": "Q4_K"},
    "Q2_K": {r"v_proj|o_proj": "Q3_K", r"embed|lm_head": "Q6_K", r"": "Q2_K"},
}


@pytest.fixture(autouse=True)
def no_files_left(monkeypatch, tmp_path):
    monkeypatch.setenv("EAGLE3_JAX_CACHE", str(tmp_path / "cache"))


def blocks_of(name: str, rows: int, blocks: int) -> np.ndarray:
    """Random blocks; their float16 scales are finite."""
    kind, rng = BLOCK_KINDS[name], np.random.default_rng(0)
    data = rng.integers(0, 256, (rows, blocks, kind.bytes), np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    places |= {"Q4_1": (0, 2), "Q5_1": (0, 2)}
    for place in places.get(name, (0,)):
        scales = rng.normal(0, 1, (rows, blocks, 1)).astype(np.float16)
        data[..., place : place + 2] = scales.view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("name", BLOCK_KINDS)
def test_values_scales_and_offsets_stand_for_what_ggml_says(name):
    data, kind = blocks_of(name, 3, 4), BLOCK_KINDS[name]
    values, scale, offset = kind.read(data)
    assert values.shape == (3, 4 * kind.size) and scale.shape == (3, 4 * kind.size // kind.group)
    assert kind.bits == 8 or (values.min() >= -8 and values.max() <= 7)
    expected = dequantize(data, GGMLQuantizationType[name])
    np.testing.assert_allclose(multiplied_out(values, scale, offset), expected, rtol=1e-6, atol=1e-5)


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Hugging Face's rows as llama.cpp's converter permutes them."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def describe(writer: GGUFWriter, config: Any, tokenizer: Any) -> None:
    """Adds what llama.cpp's converter says of a target in metadata."""
    c, pattern = config, [layer in getattr(config, "local_layers", ()) for layer in range(config.num_hidden_layers)]
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_dimension_count(c.rope_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_theta)
    if c.model_type == "phi3":
        writer.add_rope_scaling_orig_ctx_len(4096)
        writer.add_sliding_window(0)
    if c.model_type == "ministral3":
        scaling = c.rope_scaling
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling.factor)
        writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position_embeddings)
        writer.add_rope_scaling_yarn_beta_fast(scaling.beta_fast)
        writer.add_rope_scaling_yarn_log_mul(1.0)
        writer.add_attn_temperature_scale(scaling.llama_4_scaling_beta)
    if c.model_type in ("olmo3", "exaone4"):
        writer.add_sliding_window(c.sliding_window)
        writer.add_sliding_window_pattern(pattern)
    if c.model_type == "hunyuan_v1_dense":
        writer.add_rope_freq_base(c.rope_theta * c.rope_scaling.alpha ** (c.head_dim / (c.head_dim - 2)))
        writer.add_rope_scaling_type(RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1.0)
    if c.model_type.startswith("granite"):
        writer.add_attention_scale(c.attention_multiplier)
        writer.add_embedding_scale(c.embedding_multiplier)
        writer.add_residual_scale(c.residual_multiplier)
        writer.add_logit_scale(c.logits_scaling)
    tokens, special = tokenizer.convert_ids_to_tokens(range(c.vocab_size)), set(tokenizer.all_special_tokens)
    tokens[tokens.index("Ă")] = "Āā"  # for a merge, without which there is no list of them: bytes 0 and 1, not 2
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    writer.add_token_merges(["Ā ā"])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)


def write(folder: pathlib.Path, name: str, mixture: str) -> pathlib.Path:
    """Writes a target as floats into `floats` and as a GGUF file into `blocks`, which have equal numbers."""
    family = next(family for family in FAMILIES if family.config.model_type == name)
    floats, blocks = folder / "floats", folder / "blocks"
    tiny_families.write(floats, family, **SIZES | OWN.get(name, {}))
    shutil.copytree(floats, blocks, ignore=shutil.ignore_patterns("*.safetensors"))
    config, tensors = read_config(floats), load_file(floats / "model.safetensors")
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    held = tensors
    if name == "granitemoehybrid":  # apart in a GGUF file
        held = {tensor: x for tensor, x in tensors.items() if "shared_mlp" not in tensor}
        for tensor in tensors.keys() - held.keys():
            parts = np.split(tensors[tensor], 2) if "input" in tensor else [tensors[tensor]]
            theirs = ("gate", "up") if "input" in tensor else ("down",)
            held |= {re.sub(r"shared_mlp\.\w+", f"mlp.{x}_proj", tensor): y for x, y in zip(theirs, parts, strict=True)}
    writer = GGUFWriter(blocks / "model.gguf", MODEL_ARCH_NAMES[ARCHITECTURES[name]])
    describe(writer, config, load_tokenizer(floats))
    names = get_tensor_name_map(ARCHITECTURES[name], config.num_hidden_layers)
    for place, (tensor, x) in enumerate(sorted(held.items())):
        x, kind = x.astype(np.float32), None
        permuted = [count for part, count in heads.items() if name in PERMUTED and part in tensor]
        if x.ndim == 2:
            kind = GGMLQuantizationType[
                next(kind for part, kind in MIXTURES[mixture].items() if re.search(part, tensor))
            ]
            rows = interleaved(x, permuted[0]) if permuted else x
            if kind.name.endswith("_K"):  # gguf only reads these
                size = dequantize(blocks_of(kind.name, 1, 1), kind).size
                stored = np.roll(blocks_of(kind.name, len(rows), rows.shape[1] // size), place, axis=0)
                stored = _smaller(stored.reshape(-1, stored.shape[1] * size // rows.shape[1]), kind.name, 0.002)
                stored = stored.reshape(len(rows), -1)
            else:
                stored = quantize(rows, kind)
            x = dequantize(stored, kind)
            if permuted:
                x = x.reshape(permuted[0], -1, 2, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
            held[tensor] = x
        else:
            stored = interleaved(x[:, None], permuted[0])[:, 0] if permuted else x
        found = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        assert found is not None
        writer.add_tensor(found, stored, raw_dtype=kind)
    writer.add_tensor("rope_freqs.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if name == "granitemoehybrid":
        for i in range(config.num_hidden_layers):
            mlp = f"model.layers.{i}.mlp"
            gate, up, down = (held.pop(f"{mlp}.{x}_proj.weight") for x in ("gate", "up", "down"))
            held |= {f"model.layers.{i}.shared_mlp.input_linear.weight": np.concatenate([gate, up])}
            held |= {f"model.layers.{i}.shared_mlp.output_linear.weight": down}
    save_file({tensor: np.ascontiguousarray(x, np.float32) for tensor, x in held.items()}, floats / "model.safetensors")
    return folder


def _smaller(blocks: np.ndarray, name: str, factor: float) -> np.ndarray:
    """Makes the float16 scales of blocks smaller, so that a model of them computes."""
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q6_K": (208,)}[name]
    for place in places:
        scale = np.ascontiguousarray(blocks[:, place : place + 2]).view(np.float16)
        blocks[:, place : place + 2] = (scale * np.float16(factor)).view(np.uint8)
    return blocks


def target_of(folder: pathlib.Path, **options):
    return load_target(TargetConfig(name=str(folder), aux_layers=(1, 2, 3), **options))


@pytest.mark.parametrize(
    ("name", "mixture"),
    [
        *(("llama", "Q4_K_M"), ("llama", "Q2_K"), ("qwen2", "Q4_1"), ("qwen3", "Q8_0")),
        *(("phi3", "Q4_K_M"), ("granitemoehybrid", "Q4_K_M"), ("hunyuan_v1_dense", "Q8_0"), ("olmo2", "Q4_1")),
        *(pytest.param(*x, marks=pytest.mark.long) for x in (("mistral", "Q4_K_M"), ("ministral3", "Q2_K"))),
        *(pytest.param(*x, marks=pytest.mark.long) for x in (("smollm3", "Q4_K_M"), ("granite", "Q8_0"))),
        *(pytest.param(*x, marks=pytest.mark.long) for x in (("olmo3", "Q4_K_M"), ("seed_oss", "Q4_1"))),
        *(pytest.param(*x, marks=pytest.mark.long) for x in (("exaone4", "Q8_0"), ("ernie4_5", "Q4_K_M"))),
    ],
)
def test_it_is_the_target_of_its_numbers_and_keeps_their_bits(tmp_path, name, mixture):
    write(tmp_path, name, mixture)
    expected, found = target_of(tmp_path / "floats"), target_of(tmp_path / "blocks")
    for one, other in zip(jax.tree.leaves(expected.model), jax.tree.leaves(found.model), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    alone = target_of(tmp_path / "blocks/model.gguf")  # without what lies beside it
    for one, other in zip(jax.tree.leaves(found.model), jax.tree.leaves(alone.model), strict=True):
        np.testing.assert_array_equal(one, other)
    assert_same_shape(alone.model.config, found.model.config)
    messages = [{"role": "user", "content": "It's 1234 o'clock:\n\n  tell me"}]
    assert prompt_ids(alone.tokenizer, messages) == prompt_ids(found.tokenizer, messages)
    stored = target_of(tmp_path / "blocks/model.gguf", weights="stored")
    kept = jax.tree_util.tree_leaves_with_path(stored.model, is_leaf=is_quantised)
    floats = dict(jax.tree_util.tree_leaves_with_path(found.model))
    bits = {}
    for path, leaf in kept:
        if is_quantised(leaf):
            exact = not re.search(r"embed|lm_head", jax.tree_util.keystr(path)) or mixture in ("Q8_0", "Q4_1")
            (one,) = [x for other, x in floats.items() if other == path]
            bound = 1e-6 if exact else 0.005 * np.abs(one).max()
            np.testing.assert_allclose(leaf.array(), one, rtol=1e-6, atol=bound)
            bits[jax.tree_util.keystr(path)] = leaf.values.dtype.name, leaf.shape[-2] // leaf.scale.shape[-2]
    of = {
        part: {x for key, x in bits.items() if any(f".{name}." in key for name in names)}
        for part, names in {"up": ("up", "gate_up"), "down": ("down",), "qkv": ("qkv",)}.items()
    }
    assert (
        of
        == {
            "Q4_K_M": {"up": {("int4", 32)}, "down": {("int8", 16)}, "qkv": {("int8", 16)}},
            "Q2_K": {"up": {("int8", 16)}, "down": {("int8", 16)}, "qkv": {("int8", 16)}},
            "Q4_1": {"up": {("int4", 32)}, "down": {("int4", 32)}, "qkv": {("int4", 32)}},
            "Q8_0": {"up": {("int8", 32)}, "down": {("int8", 32)}, "qkv": {("int8", 32)}},
        }[mixture]
    )


def assert_same_shape(found: Any, expected: Any) -> None:
    """Compares configs. A file has floats of 32 bits, and tells of Mistral and Hunyuan less than config.json."""
    name = expected.model_type
    assert found.model_type == {"mistral": "llama"}.get(name, name)
    if name == "hunyuan_v1_dense":
        stretched = expected.rope_scaling.alpha ** (expected.head_dim / (expected.head_dim - 2))
        expected = dataclasses.replace(expected, rope_theta=expected.rope_theta * stretched, rope_scaling=None)
    if name == "ministral3":
        scaling = dataclasses.replace(expected.rope_scaling, attention_factor=None, mscale=1.0, mscale_all_dim=1.0)
        assert scaling.amplitude == expected.rope_scaling.amplitude
        expected = dataclasses.replace(expected, rope_scaling=scaling)
    got, wanted = (jax.tree.map(np.asarray, dataclasses.asdict(x)) for x in (found, expected))
    for field in got:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), got[field], wanted[field])


def test_a_file_alone_answers_as_its_folder(tmp_path):
    write(tmp_path, "qwen3", "Q8_0")
    texts, params = ["It's 1234 o'clock", "and then"], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = []
    for place in ("blocks", "blocks/model.gguf"):
        engine = Engine.load(tmp_path / place, draft=None, max_length=128)
        found.append([out.token_ids for out in engine.generate(texts, params)])
    assert found[0] == found[1] and len(found[0][0]) == 12


def test_what_was_read_is_not_kept_beside_the_model(tmp_path):
    write(tmp_path, "qwen3", "Q8_0")
    found, tensor = open_gguf(tmp_path / "blocks/model.gguf")
    read = [weakref.ref(x.parts(slice(None))[1]) for x in map(tensor, found) if x.kind is not None]
    gc.collect()
    assert len(read) > 8 and sum(x() is not None for x in read) <= 3


@pytest.mark.parametrize(("config", "name"), [("llama31_8b", "llama"), ("qwen25_7b", "qwen2"), ("qwen3_8b", "qwen3")])
def test_every_tensor_of_a_published_config_has_its_name(config, name):
    shape = read_config(ROOT / "configs/targets" / config)
    names = get_tensor_name_map(ARCHITECTURES[name], shape.num_hidden_layers)
    for entry in family_of(shape).table(shape).values():
        for tensor in entry.tensors:
            known = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
            assert known is not None and hf_name(known) == tensor


def test_what_is_not_read_is_refused_by_its_name(tmp_path):
    write(tmp_path, "qwen3", "Q8_0")
    blocks = tmp_path / "blocks"
    content = (blocks / "model.gguf").read_bytes()
    for damaged, message in {
        content[:4000]: "not a GGUF file",
        content.replace(b"qwen3", b"bert3", 1): "general.architecture: got 'bert3', expected 'llama' or",
        content.replace(b"attention.head_count", b"attention.head_lount", 1): "attention.head_count: got None",
        content.replace(b"attn_k_norm", b"attn_k_morn", 1): "attn_k_morn.weight: unknown",
    }.items():
        (blocks / "model.gguf").write_bytes(damaged)
        with pytest.raises(WeightsError, match=message):
            target_of(blocks)
    (blocks / "model.gguf").write_bytes(content)
    shutil.copy(blocks / "model.gguf", blocks / "other.gguf")
    with pytest.raises(WeightsError, match="got model.gguf, other.gguf, expected one"):
        target_of(blocks)
    (blocks / "other.gguf").unlink()
    config = json.loads((blocks / "config.json").read_text())
    (blocks / "config.json").write_text(json.dumps(config | {"intermediate_size": 500}))
    with pytest.raises(WeightsError, match=r"mlp.up_proj.weight: got shape \[512, 256\], expected \[500, 256\]"):
        target_of(blocks)


@pytest.mark.parametrize("weights", [None, "stored"])
def test_scales_that_are_not_finite_are_refused_by_tensor(tmp_path, weights):
    write(tmp_path, "qwen3", "Q8_0")
    path = tmp_path / "blocks/model.gguf"
    (tensor,) = [x for x in GGUFReader(path, "r+").tensors if x.name == "blk.2.ffn_up.weight"]
    tensor.data[3, :2] = np.array([np.inf], np.float16).view(np.uint8)  # in the file
    with pytest.raises(ValueError, match=r"layers.2.mlp.up_proj.weight: got NaN or infinity, expected finite scales"):
        target_of(tmp_path / "blocks", weights=weights)
