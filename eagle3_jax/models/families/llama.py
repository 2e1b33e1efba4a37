"""Llama 2, 3, 3.x: RMSNorm, RoPE, grouped-query attention, SwiGLU, tied or untied embeddings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, Float

from eagle3_jax.models.checkpoint.table import Entry, llama_layer, plain
from eagle3_jax.models.layers import Attention, SwiGLU, apply_rope, ones, rms_norm
from eagle3_jax.models.target import Attend, Rope, TargetModel
from eagle3_jax.models.target_config import ModelConfig


@dataclasses.dataclass(frozen=True)
class LlamaConfig(ModelConfig):
    architecture: ClassVar[str] = "LlamaForCausalLM"
    model_type: ClassVar[str] = "llama"
    supported: ClassVar[dict[str, Any]] = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


class Block(nnx.Module):
    """One decoder layer; other families override `heads`, and what comes behind attention."""

    def __init__(self, config: Any, layer: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        c = config
        self.eps = c.rms_norm_eps
        self.window = c.sliding_window if layer in getattr(c, "local_layers", ()) else None
        heads = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.input_norm = ones(c.hidden_size, dtype)
        self.attention = Attention(c.hidden_size, c.hidden_size, *heads, dtype=dtype, rngs=rngs)
        self.post_norm = ones(c.hidden_size, dtype)
        self.mlp: Any = self.feed_forward(c, layer, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b t h"], rope: Rope, attend: Attend) -> Float[Array, "b t h"]:
        q, k, v = self.heads(self.attention.fused(rms_norm(x, self.input_norm[...], self.eps)))
        window = {} if self.window is None else {"window": self.window}  # a draft head's `attend` knows none
        x = x + self.attention.output(attend(apply_rope(q, rope), apply_rope(k, rope), v, **window))
        return x + self.mlp(rms_norm(x, self.post_norm[...], self.eps))

    def heads(self, fused: Float[Array, "b t out"]) -> tuple[Array, Array, Array]:
        """Splits the projection into queries [b, t, n, d], keys and values [b, t, k, d] before RoPE."""
        return self.attention.heads(fused)

    def feed_forward(self, config: Any, layer: int, *, dtype: Any, rngs: nnx.Rngs) -> nnx.Module:
        """Makes the MLP."""
        return SwiGLU(config.hidden_size, config.intermediate_size, dtype=dtype, rngs=rngs)


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

    def layer(config: Any, i: int) -> dict[str, Entry]:
        h, source = config.hidden_size, f"model.layers.{i}"
        return {"input_norm": plain(f"{source}.input_layernorm.weight", h), **llama_layer(config, source, h)}

    return by_layer(config, layer)
