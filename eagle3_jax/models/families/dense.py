"""A decoder layer that differs from Llama's by facts of a family and fields of a config; `dense_configs` has both."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.linear.api import linear
from eagle3_jax.models.checkpoint.table import Entry, grouped, kernel, plain, qkv, qkv_bias
from eagle3_jax.models.families import llama, qwen3_moe
from eagle3_jax.models.families.deepseek_v3 import DeepseekYarnScaling
from eagle3_jax.models.layers import (
    Attention,
    SwiGLU,
    apply_rope,
    halves,
    normal,
    ones,
    rms_norm,
    scaled_rope_table,
    zeros,
)
from eagle3_jax.models.target import Attend, Rope, TargetModel, rotary
from eagle3_jax.models.target_config import PartialRotaryConfig, layer_types, local_layers

MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseConfig(PartialRotaryConfig):
    """Fields of `ModelConfig`, with those that some of these families have.

    Attributes:
        sliding_window: positions that a local layer attends to, its own included.
        local_layers, nope_layers: the layers that see a window, and those without RoPE.
        attention_bias: whether queries, keys and values have biases.
        embedding_multiplier, residual_multiplier: factors of embeddings, and of what a sublayer adds.
        attention_multiplier: factor of the scores; None: 1 / sqrt(head_dim).
        logits_scaling: divisor of the logits.
    """

    # Facts of a family: whether layers may see a window only, and if so, every which layer sees the whole text where
    # `layer_types` is left out (None: no layer does, whatever it says); whether queries and keys are normed, each head
    # or ("all") all heads together, and whether behind RoPE; whether sublayers have their norm behind them; whether
    # RoPE rotates neighbours; how a checkpoint names these norms, the matrices that it fuses, and experts' matrices;
    # whether the scaling of RoPE holds in local layers; whether config.json has the multipliers.
    windows: ClassVar[bool] = False
    full_every: ClassVar[int | None] = None
    qk_norm: ClassVar[str] = ""
    qk_names: ClassVar[tuple[str, str]] = ("q_norm", "k_norm")
    norm_behind_rope: ClassVar[bool] = False
    norms_behind: ClassVar[bool] = False
    neighbours: ClassVar[bool] = False
    fused_qkv: ClassVar[bool] = False
    fused_mlp: ClassVar[tuple[str, str] | None] = None
    experts: ClassVar[tuple[str, str, str] | None] = None
    scaled_locally: ClassVar[bool] = True
    multiplied: ClassVar[bool] = False
    supported: ClassVar[dict[str, Any]] = {"hidden_act": "silu", "attention_bias": False}

    sliding_window: int | None = None
    local_layers: tuple[int, ...] = ()
    nope_layers: tuple[int, ...] = ()
    attention_bias: bool = False
    embedding_multiplier: float = 1.0
    attention_multiplier: float | None = None
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    @classmethod
    def own(cls, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        window = values.get("sliding_window") if cls.windows else None
        return super().own(values, problems) | {
            "sliding_window": window,
            "local_layers": cls._local_layers(values, problems, window),
            "attention_bias": bool(values.get("attention_bias", False)),
        }

    @classmethod
    def _local_layers(cls, values: dict[str, Any], problems: list[str], window: int | None) -> tuple[int, ...]:
        if cls.full_every is None:
            return tuple(range(values.get("num_hidden_layers", 0))) if window else ()
        every = values.get("sliding_window_pattern") or cls.full_every
        every = len(every) if isinstance(every, str) else every  # EXAONE's "LLLG"
        return local_layers(values, problems, window, lambda layer: (layer + 1) % every != 0)

    def to_hf(self) -> dict[str, Any]:
        """See `ModelConfig`; without the fields that transformers' class does not have."""
        values = super().to_hf() | {"layer_types": layer_types(self.num_hidden_layers, self.local_layers)}
        unknown = {"local_layers", "nope_layers", *(() if self.full_every else ("layer_types",))}
        unknown |= set() if self.windows else {"sliding_window"}
        unknown |= set() if self.multiplied else set(MULTIPLIERS)
        return {name: value for name, value in values.items() if name not in unknown}


@dataclasses.dataclass(frozen=True)
class GrowingYarnScaling(DeepseekYarnScaling):
    """YaRN whose queries are multiplied by 1 + `llama_4_scaling_beta` * log(1 + original lengths before them)."""

    llama_4_scaling_beta: float = 0.0


class Ropes(NamedTuple):
    """What blocks need of positions.

    Attributes:
        whole, local: tables of the layers that see the whole text, and of local layers.
        growth: the queries' factor, [b, t, 1, 1]; None: 1.
    """

    whole: Rope
    local: Rope
    growth: Array | None = None


class FusedSwiGLU(nnx.Module):
    """`SwiGLU` whose gate and up are one matrix, `gate_up` [hidden, 2 * intermediate], with their columns in turns."""

    def __init__(self, hidden: int, intermediate: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        self.gate_up = normal((hidden, 2 * intermediate), dtype, rngs)
        self.down = normal((intermediate, hidden), dtype, rngs)

    def __call__(self, x: Float[Array, "b t h"]) -> Float[Array, "b t h"]:
        pairs = linear(x, self.gate_up[...]).reshape(*x.shape[:-1], -1, 2)  # a mesh splits pairs, and moves nothing
        return linear(jax.nn.silu(pairs[..., 0]) * pairs[..., 1], self.down[...])


class Block(nnx.Module):
    """One decoder layer; `qkv_bias` has the column order of `attention.qkv`."""

    def __init__(self, config: DenseConfig, layer: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        c, h, d = config, config.hidden_size, config.head_dim
        heads = c.num_attention_heads, c.num_key_value_heads
        self.eps, self.neighbours = c.rms_norm_eps, c.neighbours
        self.local = layer in c.local_layers
        self.window = c.sliding_window if self.local else None
        self.turned, self.norm_behind_rope = layer not in c.nope_layers, c.norm_behind_rope
        self.norms_behind = c.norms_behind
        self.scale = 1.0 if c.attention_multiplier is None else c.attention_multiplier * d**0.5
        self.added = c.residual_multiplier
        self.attention = Attention(h, h, *heads, d, dtype=dtype, rngs=rngs)
        if c.attention_bias:
            self.qkv_bias = zeros((heads[0] + 2 * heads[1]) * d, dtype)
        if c.qk_norm:
            self.q_norm, self.k_norm = (ones(d * (count if c.qk_norm == "all" else 1), dtype) for count in heads)
        if not c.norms_behind:
            self.input_norm = ones(h, dtype)
        self.post_norm = ones(h, dtype)
        if c.norms_behind:
            self.post_feedforward_norm = ones(h, dtype)
        self.mlp: Any = (FusedSwiGLU if c.fused_mlp else SwiGLU)(h, c.intermediate_size, dtype=dtype, rngs=rngs)
        if c.experts:
            self.mlp = qwen3_moe.SparseMLP(c, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b t h"], ropes: Ropes, attend: Attend) -> Float[Array, "b t h"]:
        if self.norms_behind:
            x = x + rms_norm(self.attended(x, ropes, attend), self.post_norm[...], self.eps)
            return x + rms_norm(self.mlp(x), self.post_feedforward_norm[...], self.eps)
        x = x + self.attended(rms_norm(x, self.input_norm[...], self.eps), ropes, attend) * self.added
        return x + self.mlp(rms_norm(x, self.post_norm[...], self.eps)) * self.added

    def attended(self, x: Float[Array, "b t h"], ropes: Ropes, attend: Attend) -> Float[Array, "b t h"]:
        """Computes attention, of the normed stream or of the stream itself."""
        fused, rope = self.attention.fused(x), ropes.local if self.local else ropes.whole
        if hasattr(self, "qkv_bias"):
            fused = fused + self.qkv_bias[...].astype(fused.dtype)[None, None]
        q, k, v = self.attention.heads(fused)
        if not self.norm_behind_rope:
            q, k = self.normed(q, k)
        if self.turned:
            q, k = (apply_rope(halves(x) if self.neighbours else x, rope) for x in (q, k))
        if self.norm_behind_rope:
            q, k = self.normed(q, k)
        if ropes.growth is not None or self.scale != 1:
            growth = self.scale if ropes.growth is None else self.scale * ropes.growth
            q = (q.astype(jnp.float32) * growth).astype(q.dtype)  # the scale stays unrounded
        # A draft head's `attend` knows no windows.
        return self.attention.output(attend(q, k, v, **({} if self.window is None else {"window": self.window})))

    def normed(self, q: Array, k: Array) -> tuple[Array, Array]:
        """Norms queries and keys if the family does; each head, or all heads where the weight is as long as they."""
        if not hasattr(self, "q_norm"):
            return q, k
        each = zip((q, k), (self.q_norm[...], self.k_norm[...]), strict=True)
        q, k = (rms_norm(x.reshape(*x.shape[:2], -1, len(w)), w, self.eps).reshape(x.shape) for x, w in each)
        return q, k


class Dense(TargetModel):
    block = Block

    def embedded(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t h"]:
        config: Any = self.config
        return super().embedded(tokens) * config.embedding_multiplier

    def rotary(self, positions: Int[Array, "b t"]) -> Ropes:
        return ropes(self.config, positions)

    def final_norm(self, x: Float[Array, "b t h"]) -> Float[Array, "b t h"]:
        """See `TargetModel`; divided as logits are, so that every product with the LM head is."""
        config: Any = self.config
        return super().final_norm(x) / config.logits_scaling


def ropes(config: Any, positions: Int[Array, "b t"]) -> Ropes:
    """Computes what a family's blocks need of positions."""
    c, growth = config, None
    whole = local = rotary(c, positions)
    if not c.scaled_locally and c.rope_scaling is not None:
        local = scaled_rope_table(positions, c.rope_dim, c.rope_theta, None)
    if isinstance(scaling := c.rope_scaling, GrowingYarnScaling):
        before = (positions // scaling.original_max_position_embeddings).astype(jnp.float32)
        growth = (1 + scaling.llama_4_scaling_beta * jnp.log1p(before))[..., None, None]
    return Ropes(whole, local, growth)


def table(config: DenseConfig) -> dict[str, Entry]:
    """Maps parameter paths to Hugging Face tensors."""
    return llama.by_layer(config, layer_table)


def layer_table(config: DenseConfig, layer: int) -> dict[str, Entry]:
    """Maps parameter paths in `Block` to the tensors of one layer."""
    c, h, f, source = config, config.hidden_size, config.intermediate_size, f"model.layers.{layer}"
    shapes = {"gate": (f, h), "up": (f, h), "down": (h, f)}
    apart = {name: f"{source}.mlp.{name}_proj.weight" for name in shapes}
    mlp = {f"mlp/{name}": kernel(apart[name], *shape) for name, shape in shapes.items()}
    if c.fused_mlp:
        both, down = (f"{source}.{name}.weight" for name in c.fused_mlp)
        others = grouped({apart["gate"]: (1,), apart["up"]: (1,)}, f, h), mlp["mlp/down"]  # as in GGUF files
        mlp = {
            "mlp/gate_up": dataclasses.replace(grouped({both: (1, 1)}, f, h), other=others[0]),
            "mlp/down": dataclasses.replace(kernel(down, h, f), other=others[1]),
        }
    if c.experts:
        experts = qwen3_moe.experts_table(c, f"{source}.block_sparse_moe", c.experts)
        mlp = {f"mlp/{path}": entry for path, entry in experts.items()}
    return attention_table(c, layer) | mlp


def attention_table(config: DenseConfig, layer: int) -> dict[str, Entry]:
    """Maps parameter paths in `Block` to the tensors of one layer, without its MLP."""
    c, h, d, source = config, config.hidden_size, config.head_dim, f"model.layers.{layer}"
    heads, attention = (c.num_attention_heads, c.num_key_value_heads), f"{source}.self_attn"
    norms = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
    if c.norms_behind:
        norms = {"post_norm": "post_attention_layernorm", "post_feedforward_norm": "post_feedforward_layernorm"}
    entries = {path: plain(f"{source}.{name}.weight", h) for path, name in norms.items()}
    fused = {f"{attention}.qkv_proj.weight": (heads[0] // heads[1] * d, d, d)}
    entries["attention/qkv"] = grouped(fused, heads[1], h) if c.fused_qkv else qkv(c, attention, h)
    entries["attention/o"] = kernel(f"{attention}.o_proj.weight", h, heads[0] * d)
    if c.attention_bias:
        entries["qkv_bias"] = qkv_bias(c, attention)
    if c.qk_norm:
        for path, name, count in zip(("q_norm", "k_norm"), c.qk_names, heads, strict=True):
            entries[path] = plain(f"{attention}.{name}.weight", d * (count if c.qk_norm == "all" else 1))
    return entries
