"""Qwen 2 and 2.5: as Llama, with biases of queries, keys and values."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, Float

from eagle3_jax.models.checkpoint.table import Entry, qkv_bias
from eagle3_jax.models.families import llama
from eagle3_jax.models.layers import Attention, SwiGLU, apply_rope, ones, rms_norm, zeros
from eagle3_jax.models.target import Attend, Rope, TargetModel
from eagle3_jax.models.target_config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Qwen2Config(ModelConfig):
    architecture: ClassVar[str] = "Qwen2ForCausalLM"
    model_type: ClassVar[str] = "qwen2"
    supported: ClassVar[dict[str, Any]] = {"hidden_act": "silu", "use_sliding_window": False}
    defaults: ClassVar[dict[str, Any]] = {"max_position_embeddings": 32768}


class Block(nnx.Module):
    """One decoder layer; `qkv_bias` has the column order of `attention.qkv`."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        c = config
        self.eps = c.rms_norm_eps
        heads = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.input_norm = ones(c.hidden_size, dtype)
        self.attention = Attention(c.hidden_size, c.hidden_size, *heads, dtype=dtype, rngs=rngs)
        self.qkv_bias = zeros((c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim, dtype)
        self.post_norm = ones(c.hidden_size, dtype)
        self.mlp = SwiGLU(c.hidden_size, c.intermediate_size, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b t h"], rope: Rope, attend: Attend) -> Float[Array, "b t h"]:
        fused = self.attention.fused(rms_norm(x, self.input_norm[...], self.eps))
        q, k, v = self.attention.heads(fused + self.qkv_bias[...].astype(fused.dtype)[None, None])
        x = x + self.attention.output(attend(apply_rope(q, rope), apply_rope(k, rope), v))
        return x + self.mlp(rms_norm(x, self.post_norm[...], self.eps))


class Qwen2(TargetModel):
    block = Block


def table(config: ModelConfig) -> dict[str, Entry]:
    """Maps parameter paths to Hugging Face tensors."""
    layers = range(config.num_hidden_layers)
    biases = {f"blocks/{i}/qkv_bias": qkv_bias(config, f"model.layers.{i}.self_attn") for i in layers}
    return llama.table(config) | biases
