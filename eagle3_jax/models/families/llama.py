"""Llama 2, 3, 3.x: RMSNorm, RoPE, grouped-query attention, SwiGLU, tied or untied embeddings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, Float

from eagle3_jax.models.checkpoint.table import Entry, kernel, plain, qkv
from eagle3_jax.models.layers import Attention, SwiGLU, ones, rms_norm
from eagle3_jax.models.target import Attend, Rope, TargetModel
from eagle3_jax.models.target_config import ModelConfig


@dataclasses.dataclass(frozen=True)
class LlamaConfig(ModelConfig):
    architecture: ClassVar[str] = "LlamaForCausalLM"
    model_type: ClassVar[str] = "llama"
    supported: ClassVar[dict[str, Any]] = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


class Block(nnx.Module):
    """One decoder layer."""

    def __init__(self, config: LlamaConfig, layer: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        c = config
        self.eps = c.rms_norm_eps
        heads = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.input_norm = ones(c.hidden_size, dtype)
        self.attention = Attention(c.hidden_size, c.hidden_size, *heads, dtype=dtype, rngs=rngs)
        self.post_norm = ones(c.hidden_size, dtype)
        self.mlp = SwiGLU(c.hidden_size, c.intermediate_size, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b t h"], rope: Rope, attend: Attend) -> Float[Array, "b t h"]:
        q, k, v = self.attention.project(rms_norm(x, self.input_norm[...], self.eps), rope)
        x = x + self.attention.output(attend(q, k, v))
        return x + self.mlp(rms_norm(x, self.post_norm[...], self.eps))


class Llama(TargetModel):
    block = Block


def ends(config: ModelConfig) -> dict[str, Entry]:
    """Maps the parameters outside the layers (embeddings, final norm, LM head) to tensors."""
    c, h = config, config.hidden_size
    entries = {"embed": plain("model.embed_tokens.weight", c.vocab_size, h), "norm": plain("model.norm.weight", h)}
    return entries if c.tie_word_embeddings else entries | {"lm_head": plain("lm_head.weight", c.vocab_size, h)}


def by_layer(config: ModelConfig, table: Callable[[Any, int], dict[str, Entry]]) -> dict[str, Entry]:
    """Puts `ends` and the tables of all layers together; `table` maps (config, layer) to paths in a block."""
    layers = {f"blocks/{i}": table(config, i) for i in range(config.num_hidden_layers)}
    return ends(config) | {f"{block}/{path}": x for block, layer in layers.items() for path, x in layer.items()}


def table(config: ModelConfig) -> dict[str, Entry]:
    """Maps parameter paths to Hugging Face tensors; the base of other families' tables."""
    c = config
    h, f = c.hidden_size, c.intermediate_size
    entries = ends(c)
    for i in range(c.num_hidden_layers):
        path, source = f"blocks/{i}", f"model.layers.{i}"
        attention, mlp = f"{source}.self_attn", f"{source}.mlp"
        entries |= {
            f"{path}/input_norm": plain(f"{source}.input_layernorm.weight", h),
            f"{path}/post_norm": plain(f"{source}.post_attention_layernorm.weight", h),
            f"{path}/attention/qkv": qkv(c, attention, h),
            f"{path}/attention/o": kernel(f"{attention}.o_proj.weight", h, c.num_attention_heads * c.head_dim),
            f"{path}/mlp/gate": kernel(f"{mlp}.gate_proj.weight", f, h),
            f"{path}/mlp/up": kernel(f"{mlp}.up_proj.weight", f, h),
            f"{path}/mlp/down": kernel(f"{mlp}.down_proj.weight", h, f),
        }
    return entries
