"""LFM2 and LFM2.5: short convolutions in most layers, grouped-query attention with normed heads in the others.

Dense, or with experts in all layers but the first ones. A convolution's past is its last inputs, one slot for each
sequence. Source: transformers' models/lfm2 and models/lfm2_moe.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from eagle3_jax.kernels.linear.api import linear
from eagle3_jax.models.cache import LayerCache, LayerPass
from eagle3_jax.models.checkpoint.table import Entry, grouped, kernel, plain, qkv, taps
from eagle3_jax.models.experts import Experts
from eagle3_jax.models.families import llama, qwen3, qwen3_moe
from eagle3_jax.models.layers import SwiGLU, normal, ones, rms_norm, zeros
from eagle3_jax.models.recurrent import ConvolutionCache
from eagle3_jax.models.target import Rope, TargetModel
from eagle3_jax.models.target_config import ModelConfig

CONVOLUTION, ATTENTION = "conv", "full_attention"


@dataclasses.dataclass(frozen=True)
class Lfm2Config(ModelConfig):
    """Shape of an LFM2: each of `layer_types` is "conv" or "full_attention"; a convolution has `conv_L_cache` taps, the
    token's own included.
    """

    architecture: ClassVar[str] = "Lfm2ForCausalLM"
    model_type: ClassVar[str] = "lfm2"
    supported: ClassVar[dict[str, Any]] = {"conv_bias": False}
    defaults: ClassVar[dict[str, Any]] = {
        "tie_word_embeddings": True,
        "max_position_embeddings": 128_000,
        "rope_theta": 1_000_000.0,
    }

    recurrent: ClassVar[bool] = True

    layer_types: tuple[str, ...] = ()
    conv_L_cache: int = 3

    @classmethod
    def from_hf(cls, values: dict[str, Any], aux_layers: tuple[int, ...] | None = None) -> ModelConfig:
        """See `ModelConfig`; `tie_embedding`, `block_ff_dim` and `norm_eps` are other names of its fields."""
        others = ("tie_embedding", "block_ff_dim", "norm_eps")
        named = zip(others, ("tie_word_embeddings", "intermediate_size", "rms_norm_eps"), strict=True)
        values = values | {ours: values[theirs] for theirs, ours in named if theirs in values}
        if values.get("block_auto_adjust_ff_dim", True) and isinstance(size := values.get("intermediate_size"), int):
            size = int(values.get("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
            multiple = values.get("block_multiple_of", 256)
            values |= {"intermediate_size": -(-size // multiple) * multiple}
        return super().from_hf(values, aux_layers)

    @classmethod
    def own(cls, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        layers = values.get("num_hidden_layers", 0)
        full = values.get("full_attn_idxs")
        types = values.get("layer_types") or [
            ATTENTION if full is None or layer in full else CONVOLUTION for layer in range(layers)
        ]
        if len(types) != layers or not set(types) <= {CONVOLUTION, ATTENTION} or ATTENTION not in types:
            expected = f"{CONVOLUTION!r} or {ATTENTION!r} for each of {layers} layers, one of the latter at least"
            problems.append(f"layer_types: got {types!r}, expected {expected}")
        taps = values.get("conv_L_cache", 3)
        if not isinstance(taps, int) or taps < 2:
            problems.append(f"conv_L_cache: got {taps!r}, expected at least 2")
        return {"layer_types": tuple(types), "conv_L_cache": taps}

    def to_hf(self) -> dict[str, Any]:
        """See `ModelConfig`; the width of the feed-forward layers is written as it is."""
        named = {"norm_eps": self.rms_norm_eps, "block_auto_adjust_ff_dim": False}
        return super().to_hf() | named | {"layer_types": list(self.layer_types)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lfm2MoeConfig(Lfm2Config):
    """Shape of an LFM2 with experts in all but the first `num_dense_layers`, which have the `intermediate_size`."""

    architecture: ClassVar[str] = "Lfm2MoeForCausalLM"
    model_type: ClassVar[str] = "lfm2_moe"
    supported: ClassVar[dict[str, Any]] = Lfm2Config.supported | {"use_expert_bias": True}

    num_dense_layers: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    routed_scaling_factor: float

    @classmethod
    def from_hf(cls, values: dict[str, Any], aux_layers: tuple[int, ...] | None = None) -> ModelConfig:
        """See `Lfm2Config`; widths stand as they are."""
        return super().from_hf(values | {"block_auto_adjust_ff_dim": False}, aux_layers)

    @classmethod
    def own(cls, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        needed = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        problems += [f"{name}: missing" for name in needed if values.get(name) is None]
        found = {name: values.get(name) for name in needed} | {
            "num_dense_layers": values.get("num_dense_layers", 2),
            "norm_topk_prob": values.get("norm_topk_prob", True),
            "routed_scaling_factor": values.get("routed_scaling_factor", 1.0),
        }
        return super().own(values, problems) | found


class SparseMLP(nnx.Module):
    """Routed experts: the best by sigmoid scores plus `router_bias`; their weights are the scores without it."""

    def __init__(self, config: Lfm2MoeConfig, *, dtype: Any, rngs: nnx.Rngs) -> None:
        c = config
        self.chosen, self.normalised, self.scale = c.num_experts_per_tok, c.norm_topk_prob, c.routed_scaling_factor
        self.router = normal((c.hidden_size, c.num_experts), dtype, rngs)
        self.router_bias = zeros(c.num_experts, jnp.float32)  # bfloat16 is too coarse to tell experts apart
        self.experts = Experts(c.hidden_size, c.moe_intermediate_size, c.num_experts, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b t h"]) -> Float[Array, "b t h"]:
        scores = jax.nn.sigmoid(linear(x.astype(jnp.float32), self.router[...]))
        _, chosen = jax.lax.top_k(scores + self.router_bias[...][None, None], self.chosen)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if self.normalised:
            weights /= weights.sum(axis=-1, keepdims=True) + 1e-6
        return self.experts(x, chosen, weights * self.scale)


class ShortConvolution(nnx.Module):
    """o(C * convolution of (B * y)), with B, C and y from one projection.

    `project` [H, groups * 3 * H / groups]: B, C and y of a group of channels lie side by side, so that the model axis
    splits the groups. `taps` [w, H], the oldest first; `o` [H, H].
    """

    def __init__(self, config: Lfm2Config, *, dtype: Any, rngs: nnx.Rngs) -> None:
        h, self.groups = config.hidden_size, config.num_attention_heads
        self.project, self.o = normal((h, 3 * h), dtype, rngs), normal((h, h), dtype, rngs)
        self.taps = normal((config.conv_L_cache, config.hidden_size), dtype, rngs)

    def __call__(self, x: Float[Array, "b t h"], own: LayerPass) -> Float[Array, "b t h"]:
        parts = linear(x, self.project[...]).reshape(*x.shape[:2], self.groups, 3, -1)
        before, behind, y = (parts[:, :, :, part].reshape(x.shape) for part in range(3))
        return linear(behind * own.convolve(before * y, self.taps[...]), self.o[...])


class ConvolutionBlock(nnx.Module):
    """A decoder layer with a convolution in the place of attention."""

    def __init__(self, config: Lfm2Config, *, dtype: Any, rngs: nnx.Rngs) -> None:
        c = config
        self.eps = c.rms_norm_eps
        self.input_norm = ones(c.hidden_size, dtype)
        self.convolution = ShortConvolution(c, dtype=dtype, rngs=rngs)
        self.post_norm = ones(c.hidden_size, dtype)
        self.mlp = SwiGLU(c.hidden_size, c.intermediate_size, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b t h"], rope: Rope, own: LayerPass) -> Float[Array, "b t h"]:
        x = x + self.convolution(rms_norm(x, self.input_norm[...], self.eps), own)
        return x + self.mlp(rms_norm(x, self.post_norm[...], self.eps))


def _block(config: Lfm2Config, layer: int, *, dtype: Any, rngs: nnx.Rngs) -> nnx.Module:
    block: Any = qwen3.Block(config, layer, dtype=dtype, rngs=rngs)
    if config.layer_types[layer] == CONVOLUTION:
        block = ConvolutionBlock(config, dtype=dtype, rngs=rngs)
    if isinstance(config, Lfm2MoeConfig) and layer >= config.num_dense_layers:
        block.mlp = SparseMLP(config, dtype=dtype, rngs=rngs)
    return block


class Lfm2(TargetModel):
    block = staticmethod(_block)

    def layer_cache(self, layer: int, pages: int, page_size: int, dtype: Any, states: int, tail: int) -> LayerCache:
        """See `TargetModel`; a convolution's inputs have the activations' dtype."""
        c: Any = self.config
        if c.layer_types[layer] == ATTENTION:
            return super().layer_cache(layer, pages, page_size, dtype, states, tail)
        return ConvolutionCache.empty(states, c.conv_L_cache - 1, tail, c.hidden_size, self.embed[...].dtype)


def table(config: Lfm2Config) -> dict[str, Entry]:
    """Maps parameter paths to Hugging Face tensors."""
    c = config
    h, f, groups = c.hidden_size, c.intermediate_size, c.num_attention_heads
    thirds = (h // groups,) * 3
    entries = llama.ends(c) | {"norm": plain("model.embedding_norm.weight", h)}
    for i, kind in enumerate(c.layer_types):
        path, source = f"blocks/{i}", f"model.layers.{i}"
        entries |= {
            f"{path}/input_norm": plain(f"{source}.operator_norm.weight", h),
            f"{path}/post_norm": plain(f"{source}.ffn_norm.weight", h),
        }
        mlp, names = f"{source}.feed_forward", {"gate": "w1", "up": "w3", "down": "w2"}
        if isinstance(c, Lfm2MoeConfig) and i >= c.num_dense_layers:
            experts = qwen3_moe.experts_table(c, mlp, ("w1", "w3", "w2"))
            entries |= {f"{path}/mlp/{name}": entry for name, entry in experts.items()}
            entries[f"{path}/mlp/router_bias"] = plain(f"{mlp}.expert_bias", c.num_experts)
        else:
            for name, theirs in names.items():
                shape = (h, f) if name == "down" else (f, h)
                entries[f"{path}/mlp/{name}"] = kernel(f"{mlp}.{theirs}.weight", *shape)
        if kind == ATTENTION:
            attention = f"{source}.self_attn"
            entries |= {
                f"{path}/attention/qkv": qkv(c, attention, h),
                f"{path}/attention/o": kernel(f"{attention}.out_proj.weight", h, c.num_attention_heads * c.head_dim),
                f"{path}/q_norm": plain(f"{attention}.q_layernorm.weight", c.head_dim),
                f"{path}/k_norm": plain(f"{attention}.k_layernorm.weight", c.head_dim),
            }
            continue
        entries |= {
            f"{path}/convolution/project": grouped({f"{source}.conv.in_proj.weight": thirds}, groups, h),
            f"{path}/convolution/taps": taps(f"{source}.conv.conv.weight", (h,), 1, c.conv_L_cache),
            f"{path}/convolution/o": kernel(f"{source}.conv.out_proj.weight", h, h),
        }
    return entries
