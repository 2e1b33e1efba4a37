"""Qwen 2 and 2.5: as Llama, with biases of queries, keys and values; MiMo-7B, whose layers are the same."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, Float

from eagle3_jax.models.checkpoint.table import Entry, qkv_bias
from eagle3_jax.models.families import llama
from eagle3_jax.models.layers import zeros
from eagle3_jax.models.target import TargetModel
from eagle3_jax.models.target_config import ModelConfig, WindowConfig

MTP = "model.mtp_layers."


@dataclasses.dataclass(frozen=True)
class Qwen2Config(WindowConfig):
    architecture: ClassVar[str] = "Qwen2ForCausalLM"
    model_type: ClassVar[str] = "qwen2"
    supported: ClassVar[dict[str, Any]] = {"hidden_act": "silu"}
    defaults: ClassVar[dict[str, Any]] = {"max_position_embeddings": 32768}


@dataclasses.dataclass(frozen=True)
class MimoConfig(ModelConfig):
    architecture: ClassVar[str] = "MiMoForCausalLM"
    model_type: ClassVar[str] = "mimo"
    supported: ClassVar[dict[str, Any]] = Qwen2Config.supported | {"use_sliding_window": False, "attention_bias": True}
    defaults: ClassVar[dict[str, Any]] = Qwen2Config.defaults


class Block(llama.Block):
    """One decoder layer; `qkv_bias` has the column order of `attention.qkv`."""

    def __init__(self, config: Any, layer: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        self.qkv_bias = zeros((config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim, dtype)

    def heads(self, fused: Float[Array, "b t out"]) -> tuple[Array, Array, Array]:
        return super().heads(fused + self.qkv_bias[...].astype(fused.dtype)[None, None])


class Qwen2(TargetModel):
    block = Block


def table(config: ModelConfig) -> dict[str, Entry]:
    """Maps parameter paths to Hugging Face tensors."""
    layers = range(config.num_hidden_layers)
    biases = {f"blocks/{i}/qkv_bias": qkv_bias(config, f"model.layers.{i}.self_attn") for i in layers}
    return llama.table(config) | biases


def unused(config: MimoConfig) -> tuple[str, ...]:
    """Prefix of MiMo's MTP layers, see `drafts.mtp`."""
    return (MTP,)
