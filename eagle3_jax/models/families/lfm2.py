"""LFM2 and LFM2.5, dense: short convolutions in most layers, grouped-query attention with normed heads in the others.

Source: transformers' models/lfm2. A convolution's past is its last inputs, one slot for each sequence.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, Float

from eagle3_jax.kernels.linear.api import linear
from eagle3_jax.models.cache import ConvolutionCache, LayerCache, LayerPass
from eagle3_jax.models.checkpoint.table import Entry, kernel, plain, qkv, side_by_side, taps
from eagle3_jax.models.families import qwen3
from eagle3_jax.models.layers import SwiGLU, normal, ones, rms_norm
from eagle3_jax.models.target import Rope, TargetModel
from eagle3_jax.models.target_config import ModelConfig

CONVOLUTION, ATTENTION = "conv", "full_attention"


@dataclasses.dataclass(frozen=True)
class Lfm2Config(ModelConfig):
    """Shape of an LFM2.

    Attributes:
        layer_types: "conv" or "full_attention" for each layer.
        conv_L_cache: taps of a convolution, the token's own included.
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
        """See `ModelConfig`."""
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
    if config.layer_types[layer] == CONVOLUTION:
        return ConvolutionBlock(config, dtype=dtype, rngs=rngs)
    return qwen3.Block(config, layer, dtype=dtype, rngs=rngs)


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
    h, f = c.hidden_size, c.intermediate_size
    entries = {
        "embed": plain("model.embed_tokens.weight", c.vocab_size, h),
        "norm": plain("model.embedding_norm.weight", h),
    }
    if not c.tie_word_embeddings:
        entries["lm_head"] = plain("lm_head.weight", c.vocab_size, h)
    for i, kind in enumerate(c.layer_types):
        path, source = f"blocks/{i}", f"model.layers.{i}"
        entries |= {
            f"{path}/input_norm": plain(f"{source}.operator_norm.weight", h),
            f"{path}/post_norm": plain(f"{source}.ffn_norm.weight", h),
            f"{path}/mlp/gate": kernel(f"{source}.feed_forward.w1.weight", f, h),
            f"{path}/mlp/up": kernel(f"{source}.feed_forward.w3.weight", f, h),
            f"{path}/mlp/down": kernel(f"{source}.feed_forward.w2.weight", h, f),
        }
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
            f"{path}/convolution/project": side_by_side(f"{source}.conv.in_proj.weight", 3, c.num_attention_heads, h),
            f"{path}/convolution/taps": taps(f"{source}.conv.conv.weight", h, c.conv_L_cache),
            f"{path}/convolution/o": kernel(f"{source}.conv.out_proj.weight", h, h),
        }
    return entries
