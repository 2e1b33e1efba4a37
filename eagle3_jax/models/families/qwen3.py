"""Qwen 3, dense: as Llama, with a norm of each query and key head before RoPE."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, Float

from eagle3_jax.models.checkpoint.table import Entry, plain
from eagle3_jax.models.families import llama
from eagle3_jax.models.layers import Attention, SwiGLU, apply_rope, ones, rms_norm
from eagle3_jax.models.target import Attend, Rope, TargetModel
from eagle3_jax.models.target_config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Qwen3Config(ModelConfig):
    architecture: ClassVar[str] = "Qwen3ForCausalLM"
    model_type: ClassVar[str] = "qwen3"
    supported: ClassVar[dict[str, Any]] = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}
    defaults: ClassVar[dict[str, Any]] = {"head_dim": 128, "max_position_embeddings": 32768}


class Block(nnx.Module):
    """One decoder layer; the norms of queries and keys [head_dim] are shared by all heads."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        c = config
        self.eps = c.rms_norm_eps
        heads = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.input_norm = ones(c.hidden_size, dtype)
        self.attention = Attention(c.hidden_size, c.hidden_size, *heads, dtype=dtype, rngs=rngs)
        self.q_norm, self.k_norm = ones(c.head_dim, dtype), ones(c.head_dim, dtype)
        self.post_norm = ones(c.hidden_size, dtype)
        self.mlp = SwiGLU(c.hidden_size, c.intermediate_size, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b t h"], rope: Rope, attend: Attend) -> Float[Array, "b t h"]:
        q, k, v = self.attention.heads(self.attention.fused(rms_norm(x, self.input_norm[...], self.eps)))
        q, k = rms_norm(q, self.q_norm[...], self.eps), rms_norm(k, self.k_norm[...], self.eps)
        x = x + self.attention.output(attend(apply_rope(q, rope), apply_rope(k, rope), v))
        return x + self.mlp(rms_norm(x, self.post_norm[...], self.eps))


class Qwen3(TargetModel):
    block = Block


def table(config: ModelConfig) -> dict[str, Entry]:
    """Maps parameter paths to Hugging Face tensors."""
    norms = {
        f"blocks/{i}/{name}": plain(f"model.layers.{i}.self_attn.{name}.weight", config.head_dim)
        for i in range(config.num_hidden_layers)
        for name in ("q_norm", "k_norm")
    }
    return llama.table(config) | norms
