"""Small random targets of every family, in memory and in a folder as a hub would have them."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from flax import nnx

from eagle3_jax.config import TargetConfig
from eagle3_jax.export.write_target import write_target
from eagle3_jax.models.checkpoint.fetch import Target, load_target
from eagle3_jax.models.families import Family, read_shape
from eagle3_jax.models.target import TargetModel
from eagle3_jax.models.target_config import ModelConfig

AUX_LAYERS = (1, 2, 3)  # such as engines capture
# What a family adds to the shape that all have; windows and chunks are shorter than the texts of tests.
OWN: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Gemma3ForCausalLM": {"sliding_window": 7, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
    "Gemma4ForCausalLM": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 7,
        "global_head_dim": 16,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 1,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 2.0,
        "hidden_size_per_layer_input": 4,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
    "GptOssForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7},
    "Llama4ForCausalLM": {
        "num_local_experts": 4,
        "attention_chunk_size": 9,
        "no_rope_layer_interval": 2,
        "floor_scale": 8,
        "intermediate_size_mlp": 48,
    },
    "DeepseekV3ForCausalLM": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "DeepseekV32ForCausalLM": {"index_topk": 6, "index_n_heads": 8, "index_head_dim": 12},
    "GlmMoeDsaForCausalLM": {
        "index_topk": 6,
        "index_n_heads": 8,
        "index_head_dim": 12,
        "indexer_types": ["full", "shared", "full", "shared"],
    },
    "Lfm2ForCausalLM": {"full_attn_idxs": [1], "block_auto_adjust_ff_dim": False},
    "Lfm2MoeForCausalLM": {
        "full_attn_idxs": [1],
        "num_dense_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "MiMoForCausalLM": {"attention_bias": True},
    "MistralForCausalLM": {"sliding_window": 7},
    "Ministral3ForCausalLM": {"sliding_window": 7},
    "Phi3ForCausalLM": {
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.5, 2.0, 3.0]},
        "original_max_position_embeddings": 16,
        "partial_rotary_factor": 0.75,
    },
    "Olmo3ForCausalLM": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "GraniteForCausalLM": {"embedding_multiplier": 3, "attention_multiplier": 0.2, "residual_multiplier": 0.4},
    "GraniteMoeHybridForCausalLM": {
        "shared_intermediate_size": 48,
        "num_local_experts": 0,
        "layer_types": ["attention"] * 4,
        "position_embedding_type": "rope",
        "mamba_n_heads": 64,
        "logits_scaling": 4,
    },
    "Exaone4ForCausalLM": {"sliding_window": 7, "sliding_window_pattern": 2},
    "Glm4MoeForCausalLM": {
        "use_qk_norm": True,
        "attention_bias": True,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "MiniMaxM2ForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 4},
    "Ernie4_5_MoeForCausalLM": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "MixtralForCausalLM": {"num_local_experts": 4, "sliding_window": 7},
    "HunYuanDenseV1ForCausalLM": {"rope_scaling": {"type": "dynamic", "alpha": 1000.0}},
}
for architecture in ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"):
    OWN[architecture] = OWN["DeepseekV3ForCausalLM"] | OWN[architecture]
_DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "partial_rotary_factor": 0.5,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
OWN |= {
    "Qwen3_5ForCausalLM": _DELTA,
    "Qwen3_5MoeForCausalLM": _DELTA | _EXPERTS,
    "Qwen3NextForCausalLM": _DELTA | _EXPERTS | {"mlp_only_layers": [0]},
}


def config_of(family: Family, **changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "architectures": [family.config.architecture],
        "vocab_size": 60,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    values |= OWN.get(family.config.architecture, {}) | changes
    if "vocab_size_per_layer_input" in values:
        values["vocab_size_per_layer_input"] = values["vocab_size"]
    if "layer_types" in values:
        values["layer_types"] = values["layer_types"][: values["num_hidden_layers"]]
    return read_shape(values, AUX_LAYERS)


def make(family: Family, **changes: Any) -> TargetModel:
    model = family.model(config_of(family, **changes), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)

    def noisy(leaf: jax.Array) -> jax.Array:
        """Of a size that lets layers matter; around one for norms, and biases that are no zeros."""
        return leaf.astype(jnp.int32).astype(leaf.dtype) + jnp.asarray(rng.normal(size=leaf.shape) * 0.3, leaf.dtype)

    return jax.tree.map(noisy, model)


def write(folder: pathlib.Path, family: Family, **changes: Any) -> Target:
    """One that reads bytes, in a folder, and loaded from it."""
    tokenizer = tiny.make_byte_tokenizer(
        tiny.CHAT_TEMPLATE, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    model = make(family, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **changes)
    write_target(Target(model, tokenizer, tiny.identity(AUX_LAYERS), pathlib.Path()), folder)
    return load_target(TargetConfig(name=str(folder), aux_layers=AUX_LAYERS))
