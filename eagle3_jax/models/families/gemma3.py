"""Gemma 3's text model: norms before and after each sublayer and of queries and keys, GELU, scaled embeddings.

Most layers attend to a sliding window, the others to the whole text. Norms multiply by 1 + the stored weight, in
float32.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.linear.api import linear
from eagle3_jax.models.checkpoint.table import Entry, plain
from eagle3_jax.models.families import llama
from eagle3_jax.models.layers import Attention, SwiGLU, apply_rope, embeddings, rope_frequencies, rope_table, zeros
from eagle3_jax.models.rope import read_scaling
from eagle3_jax.models.target import Attend, Rope, TargetModel, rotary
from eagle3_jax.models.target_config import FULL, LOCAL, ModelConfig, layer_types, local_layers

gelu = functools.partial(jax.nn.gelu, approximate=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalConfig(ModelConfig):
    """Fields of `ModelConfig`, with RoPE's of the layers of full attention; `rope_local_theta` is its base in the
    others.

    Local layers attend to `sliding_window` positions, their own included.
    """

    defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "head_dim": 256,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "sliding_window": 4096,
    }

    sliding_window: int
    local_layers: tuple[int, ...]
    rope_local_theta: float

    @classmethod
    def from_hf(cls, values: dict[str, Any], aux_layers: tuple[int, ...] | None = None) -> ModelConfig:
        rope = values.get("rope_parameters") or {}
        if FULL in rope:  # spelling of transformers 5
            local = rope.get(LOCAL) or {}
            theta = local.get("rope_theta", values.get("rope_local_base_freq", 1e4))
            values = values | {"rope_parameters": rope[FULL], LOCAL: local, "rope_local_base_freq": theta}
        return super().from_hf(values, aux_layers)

    @classmethod
    def own(cls, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        every, window = values.get("sliding_window_pattern", 6), values["sliding_window"]
        read_scaling(values.get(LOCAL, {}), f"rope_parameters.{LOCAL}", problems, {})  # local layers have no scaling
        return {
            "sliding_window": window,
            "local_layers": local_layers(values, problems, window, lambda layer: (layer + 1) % every != 0),
            "rope_local_theta": float(values.get("rope_local_base_freq", 1e4)),
        }

    def to_hf(self) -> dict[str, Any]:
        values = super().to_hf()
        local, theta = values.pop("local_layers"), values.pop("rope_local_theta")
        kinds = layer_types(self.num_hidden_layers, local)
        rope = {FULL: values["rope_parameters"], LOCAL: {"rope_type": "default", "rope_theta": theta}}
        return values | {"layer_types": kinds, "rope_parameters": rope, "rope_local_base_freq": theta}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Config(LocalConfig):
    """Fields of `LocalConfig`; scores are divided by the square root of `query_pre_attn_scalar`."""

    architecture: ClassVar[str] = "Gemma3ForCausalLM"
    model_type: ClassVar[str] = "gemma3_text"
    supported: ClassVar[dict[str, Any]] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }

    query_pre_attn_scalar: float

    @classmethod
    def own(cls, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        scalar = float(values.get("query_pre_attn_scalar", 256))
        return super().own(values, problems) | {"query_pre_attn_scalar": scalar}

    def to_hf(self) -> dict[str, Any]:
        scalar = self.query_pre_attn_scalar  # transformers accepts no float
        return super().to_hf() | ({"query_pre_attn_scalar": int(scalar)} if scalar.is_integer() else {})


def float32_norm(
    x: Float[Array, "*batch h"], weight: Float[Array, " h"] | None, eps: float
) -> Float[Array, "*batch h"]:
    """Computes x / rms(x) * weight, in float32 until the end; None is a weight of ones."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    if weight is not None:
        normed *= jnp.expand_dims(weight.astype(jnp.float32), range(x.ndim - 1))
    return normed.astype(x.dtype)


def offset_norm(x: Float[Array, "*batch h"], offset: Float[Array, " h"], eps: float) -> Float[Array, "*batch h"]:
    """Computes x / rms(x) * (1 + offset), in float32 until the end."""
    return float32_norm(x, 1 + offset.astype(jnp.float32), eps)


class GeGLU(SwiGLU):
    """down(gelu(gate(x)) * up(x)), with GELU's tanh approximation."""

    def __call__(self, x: Float[Array, "b t h"]) -> Float[Array, "b t h"]:
        return linear(gelu(linear(x, self.gate[...])) * linear(x, self.up[...]), self.down[...])


class Block(nnx.Module):
    """One decoder layer."""

    def __init__(self, config: Gemma3Config, layer: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        c = config
        self.eps, self.local = c.rms_norm_eps, layer in c.local_layers
        self.window = c.sliding_window if self.local else None
        self.scale = (c.head_dim / c.query_pre_attn_scalar) ** 0.5  # attention divides by the root of `head_dim`
        heads = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.input_offset = zeros(c.hidden_size, dtype)
        self.attention = Attention(c.hidden_size, c.hidden_size, *heads, dtype=dtype, rngs=rngs)
        self.q_offset, self.k_offset = zeros(c.head_dim, dtype), zeros(c.head_dim, dtype)
        self.post_attention_offset = zeros(c.hidden_size, dtype)
        self.pre_feedforward_offset = zeros(c.hidden_size, dtype)
        self.mlp = GeGLU(c.hidden_size, c.intermediate_size, dtype=dtype, rngs=rngs)
        self.post_feedforward_offset = zeros(c.hidden_size, dtype)

    def __call__(self, x: Float[Array, "b t h"], ropes: tuple[Rope, Rope], attend: Attend) -> Float[Array, "b t h"]:
        rope = ropes[self.local]
        q, k, v = self.attention.heads(self.attention.fused(offset_norm(x, self.input_offset[...], self.eps)))
        q, k = offset_norm(q, self.q_offset[...], self.eps), offset_norm(k, self.k_offset[...], self.eps)
        q = apply_rope(q, rope)
        q = (q.astype(jnp.float32) * self.scale).astype(q.dtype)  # the scale stays unrounded
        attended = attend(q, apply_rope(k, rope), v, window=self.window)
        x = x + offset_norm(self.attention.output(attended), self.post_attention_offset[...], self.eps)
        fed = self.mlp(offset_norm(x, self.pre_feedforward_offset[...], self.eps))
        return x + offset_norm(fed, self.post_feedforward_offset[...], self.eps)


class OffsetNormed(TargetModel):
    """A target whose final norm is `offset_norm`, of `offset` [H]."""

    def __init__(self, config: ModelConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
        super().__init__(config, dtype=dtype, rngs=rngs)
        del self.norm
        self.offset = zeros(config.hidden_size, dtype)

    def final_norm(self, x: Float[Array, "b t h"]) -> Float[Array, "b t h"]:
        return offset_norm(x, self.offset[...], self.config.rms_norm_eps)


class Gemma3(OffsetNormed):
    block = Block

    def embedded(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t h"]:
        return scaled_embeddings(self.embed[...], tokens)

    def rotary(self, positions: Int[Array, "b t"]) -> tuple[Any, Any]:
        return ropes(self.config, positions)


def scaled_embeddings(table: Any, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch h"]:
    """Looks up table[tokens] times the root of the rows' width, which is rounded as the rows are."""
    rows = embeddings(table, tokens)
    return rows * jnp.asarray(rows.shape[-1] ** 0.5, rows.dtype)


def ropes(config: Any, positions: Int[Array, "b t"]) -> tuple[Any, Any]:
    """Computes RoPE tables of the layers of full attention, and of local layers."""
    local = rope_table(positions, rope_frequencies(config.head_dim, config.rope_local_theta))
    return rotary(config, positions), local


def table(config: Gemma3Config) -> dict[str, Entry]:
    """Maps parameter paths to Hugging Face tensors."""
    c = config
    entries = llama.table(c)
    entries["offset"] = entries.pop("norm")
    for i in range(c.num_hidden_layers):
        path, source = f"blocks/{i}", f"model.layers.{i}"
        entries[f"{path}/input_offset"] = entries.pop(f"{path}/input_norm")
        entries[f"{path}/post_attention_offset"] = entries.pop(f"{path}/post_norm")
        for name in ("pre_feedforward", "post_feedforward"):
            entries[f"{path}/{name}_offset"] = plain(f"{source}.{name}_layernorm.weight", c.hidden_size)
        for name in ("q", "k"):
            entries[f"{path}/{name}_offset"] = plain(f"{source}.self_attn.{name}_norm.weight", c.head_dim)
    return entries
