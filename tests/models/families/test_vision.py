"""The text model of checkpoints with a vision tower, as transformers writes them and as the hub holds older ones."""

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from eagle3_jax.models.cache import Pass
from eagle3_jax.models.checkpoint import fetch
from eagle3_jax.models.checkpoint.load import WeightsError, load_model
from eagle3_jax.models.families.vision import TEXT_OF, TOWER, text_name

VOCABULARY = 60
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": None,
}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}
    | {"partial_rotary_factor": 0.5, "mrope_interleaved": True},
}
TEXT_TOO: dict[str, dict[str, Any]] = {
    "Gemma3ForConditionalGeneration": {
        "sliding_window": 5,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    },
    "Gemma4ForConditionalGeneration": {
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": VOCABULARY,
        "pad_token_id": 0,
    },
    "Gemma4UnifiedForConditionalGeneration": {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "pad_token_id": 0,
    },
    "Llama4ForConditionalGeneration": {"num_local_experts": 4, "intermediate_size_mlp": 48, "attention_chunk_size": 7},
    "Mistral3ForConditionalGeneration": {"model_type": "ministral3"},
    "Qwen2_5_VLForConditionalGeneration": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    },
    "Qwen3VLForConditionalGeneration": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    },
    "Qwen3_5ForConditionalGeneration": DELTA,
    "Qwen3_5MoeForConditionalGeneration": DELTA
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 12},
}
QWEN_TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
SEEING: dict[str, dict[str, Any]] = {
    "Gemma3ForConditionalGeneration": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    | {"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
    "Gemma4ForConditionalGeneration": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    | {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4},
    "Gemma4UnifiedForConditionalGeneration": {"mm_embed_dim": 16, "mm_posemb_size": 8, "patch_size": 4},
    "Llama4ForConditionalGeneration": {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1}
    | {"num_attention_heads": 2, "image_size": 28, "patch_size": 14, "vision_output_dim": 16}
    | {"projector_input_dim": 16, "projector_output_dim": 16},
    "Mistral3ForConditionalGeneration": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    | {"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
    "Qwen2_5_VLForConditionalGeneration": QWEN_TOWER,
    "Qwen3VLForConditionalGeneration": QWEN_TOWER | {"deepstack_visual_indexes": [0]},
    "Qwen3_5ForConditionalGeneration": QWEN_TOWER,
    "Qwen3_5MoeForConditionalGeneration": QWEN_TOWER,
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sorted(TEXT_OF))
def test_it_says_of_text_what_the_whole_model_says(tmp_path, architecture, capsys):
    torch = pytest.importorskip("torch")
    import transformers

    torch.manual_seed(0)
    model_class = getattr(transformers, architecture)
    text = TEXT | TEXT_TOO[architecture]
    config = model_class.config_class(text_config=text, vision_config=SEEING[architecture], image_token_id=59)
    reference = model_class(config).eval()
    reference.save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY - 10, (2, 20))
    with torch.no_grad():
        expected = reference(torch.tensor(tokens)).logits.numpy()

    shape = fetch.read_config(tmp_path, (0, 1))
    assert shape.architecture == TEXT_OF[architecture]
    capsys.readouterr()
    model = load_model(tmp_path, shape, jnp.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    tower = sorted(name for name in tensors if text_name(name).startswith(TOWER))
    assert f"{len(tower)} tensors are not read: {', '.join(tower[:3])} ..." in capsys.readouterr().err
    positions = jnp.broadcast_to(jnp.arange(20), (2, 20))
    this = Pass(positions, jnp.zeros(2, jnp.int32), counts=jnp.full(2, 20))
    hidden, _, _ = model(jnp.asarray(tokens), this, model.empty_cache(2, 20))
    np.testing.assert_allclose(model.logits(hidden), expected, atol=1e-4, rtol=1e-4)

    missing = next(name for name in tensors if text_name(name) == "model.layers.1.input_layernorm.weight")
    del tensors[missing]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="1 problems"):
        load_model(tmp_path, shape, jnp.float32)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.visual.patch_embed.proj.weight", "visual.patch_embed.proj.weight"),
        ("visual.blocks.0.norm1.weight", "visual.blocks.0.norm1.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_names_as_hub_and_library_spell_them(stored, expected):
    assert text_name(stored) == expected


def test_the_hub_s_older_spelling_of_qwen_is_read(tmp_path):
    """Everything in one level, and RoPE for three positions a token."""
    values = {
        **TEXT,
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {"depth": 32},
        "eos_token_id": 7,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    shape = fetch.read_config(tmp_path, (0, 1))
    assert (shape.architecture, shape.rope_scaling, shape.eos_token_ids) == ("Qwen2ForCausalLM", None, (7,))


def test_the_text_model_of_mistral_small_is_mistral(tmp_path):
    values = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": TEXT | {"model_type": "mistral"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert fetch.read_config(tmp_path, (0, 1)).architecture == "MistralForCausalLM"


def test_stop_tokens_of_the_whole_model_hold(tmp_path):
    """transformers writes the class' default into the text part: of Gemma 3 one stop token, where a chat has two."""
    values = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": TEXT | {"eos_token_id": 1}}
    for folder, outside, generation in (("a", {"eos_token_id": [1, 6]}, {}), ("b", {}, {"eos_token_id": [1, 6]})):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(values | outside))
        (tmp_path / folder / "generation_config.json").write_text(json.dumps(generation))
        assert fetch.read_config(tmp_path / folder, (0, 1)).eos_token_ids == (1, 6)
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert fetch.read_config(tmp_path, (0, 1)).eos_token_ids == (1,)
