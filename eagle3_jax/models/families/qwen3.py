"""Qwen 3, dense: as Llama, with a norm of each query and key head before RoPE."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, Float

from eagle3_jax.models.checkpoint.table import Entry, plain
from eagle3_jax.models.families import llama
from eagle3_jax.models.layers import ones, rms_norm
from eagle3_jax.models.target import TargetModel
from eagle3_jax.models.target_config import ModelConfig, WindowConfig


@dataclasses.dataclass(frozen=True)
class Qwen3Config(WindowConfig):
    architecture: ClassVar[str] = "Qwen3ForCausalLM"
    model_type: ClassVar[str] = "qwen3"
    supported: ClassVar[dict[str, Any]] = {"hidden_act": "silu", "attention_bias": False}
    defaults: ClassVar[dict[str, Any]] = {"head_dim": 128, "max_position_embeddings": 32768}


class Block(llama.Block):
    """One decoder layer; the norms of queries and keys [head_dim] are shared by all heads."""

    def __init__(self, config: Any, layer: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        self.q_norm, self.k_norm = ones(config.head_dim, dtype), ones(config.head_dim, dtype)

    def heads(self, fused: Float[Array, "b t out"]) -> tuple[Array, Array, Array]:
        q, k, v = super().heads(fused)
        return rms_norm(q, self.q_norm[...], self.eps), rms_norm(k, self.k_norm[...], self.eps), v


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
