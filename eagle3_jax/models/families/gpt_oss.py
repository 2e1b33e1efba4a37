"""gpt-oss: a mixture of experts with biases everywhere and attention sinks; every other layer has a sliding window.

Checkpoints hold the experts' weights in MXFP4 (4 bits each, one scale per 32) or unquantised.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax import P
from jaxtyping import Array, Float

from eagle3_jax.kernels.linear.api import linear
from eagle3_jax.models.checkpoint.table import Entry, Packed, kernel, plain
from eagle3_jax.models.experts import Product, mixture
from eagle3_jax.models.families import qwen2
from eagle3_jax.models.layers import apply_rope, normal, rms_norm, zeros
from eagle3_jax.models.target import Attend, Rope, TargetModel
from eagle3_jax.models.target_config import ModelConfig, layer_types, local_layers

_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_FP4_GROUP = 32
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptOssConfig(ModelConfig):
    """Fields of `ModelConfig`, with an expert's `intermediate_size`.

    Attributes:
        sliding_window: positions that a local layer attends to, its own included.
        local_layers: the local layers.
        swiglu_alpha, swiglu_limit: parameters of the experts' activation.
        mxfp4: whether the checkpoint holds the experts' matrices in MXFP4.
    """

    architecture: ClassVar[str] = "GptOssForCausalLM"
    model_type: ClassVar[str] = "gpt_oss"
    supported: ClassVar[dict[str, Any]] = {"hidden_act": "silu", "attention_bias": True}
    packings: ClassVar[tuple[str, ...]] = ("mxfp4",)
    defaults: ClassVar[dict[str, Any]] = {
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
    }

    num_experts: int
    num_experts_per_tok: int
    sliding_window: int
    local_layers: tuple[int, ...]
    swiglu_alpha: float
    swiglu_limit: float
    mxfp4: bool

    @classmethod
    def from_hf(cls, values: dict[str, Any], aux_layers: tuple[int, ...] | None = None) -> ModelConfig:
        if not values.get("rope_parameters") and not values.get("rope_scaling"):
            values = values | {"rope_scaling": _YARN}
        return super().from_hf(values, aux_layers)

    @classmethod
    def own(cls, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        window = values.get("sliding_window", 128)
        experts = values.get("num_local_experts", values.get("num_experts"))
        if experts is None:
            problems.append("num_local_experts: missing")
        method = (values.get("quantization_config") or {}).get("quant_method")
        return {
            "num_experts": experts,
            "num_experts_per_tok": values.get("num_experts_per_tok", 4),
            "sliding_window": window,
            "local_layers": local_layers(values, problems, window, lambda layer: layer % 2 == 0),
            "swiglu_alpha": float(values.get("swiglu_alpha", 1.702)),
            "swiglu_limit": float(values.get("swiglu_limit", 7.0)),
            "mxfp4": method == "mxfp4",
        }

    def to_hf(self) -> dict[str, Any]:
        values = super().to_hf()
        local, experts = values.pop("local_layers"), values.pop("num_experts")
        kinds = layer_types(self.num_hidden_layers, local)
        method = {"quantization_config": {"quant_method": "mxfp4"}} if values.pop("mxfp4") else {}
        return values | {"layer_types": kinds, "num_local_experts": experts} | method


class SparseMLP(nnx.Module):
    """Top experts by the router's logits, weighted by a softmax over them.

    `expert_gate_up` [experts, hidden, 2 * intermediate] interleaves gate and up, `expert_down` [experts, intermediate,
    hidden]; each has a bias.
    """

    def __init__(self, config: GptOssConfig, *, dtype: Any, rngs: nnx.Rngs) -> None:
        c = config
        h, f, count = c.hidden_size, c.intermediate_size, c.num_experts
        self.chosen, self.alpha, self.limit = c.num_experts_per_tok, c.swiglu_alpha, c.swiglu_limit
        self.router, self.router_bias = normal((h, count), dtype, rngs), zeros(count, dtype)
        self.expert_gate_up = normal((count, h, 2 * f), dtype, rngs)
        self.expert_gate_up_bias = nnx.Param(jnp.zeros((count, 2 * f), dtype))
        self.expert_down = normal((count, f, h), dtype, rngs)
        self.expert_down_bias = nnx.Param(jnp.zeros((count, h), dtype))

    def __call__(self, x: Float[Array, "b t h"]) -> Float[Array, "b t h"]:
        scores, chosen = jax.lax.top_k(linear(x, self.router[...]) + self.router_bias[...][None, None], self.chosen)
        weights = jax.nn.softmax(scores, axis=-1)

        def feed(rows: Array, product: Product, expert: Array, gate_up: Any, down: Any, bias: Array) -> Array:
            both = product(rows, gate_up) + bias[expert].astype(jnp.float32)
            gate, up = jnp.minimum(both[:, ::2], self.limit), jnp.clip(both[:, 1::2], -self.limit, self.limit)
            return product(((up + 1) * gate * jax.nn.sigmoid(gate * self.alpha)).astype(x.dtype), down)

        parameters = self.expert_gate_up[...], self.expert_down[...], self.expert_gate_up_bias[...]
        mixed = mixture(
            x, chosen, weights, feed, parameters, (P(None, None, "model"), P(None, "model"), P(None, "model"))
        )
        # Added once, outside the sum over the model axis.
        biases = self.expert_down_bias[...][chosen].astype(jnp.float32)
        bias = jnp.einsum("btkh,btk->bth", biases, weights.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        return (mixed + bias).astype(x.dtype)


class Block(qwen2.Block):
    """One decoder layer."""

    def __init__(self, config: GptOssConfig, layer: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        self.o_bias = zeros(config.hidden_size, dtype)
        self.sinks = zeros(config.num_attention_heads, dtype)

    def feed_forward(self, config: GptOssConfig, layer: int, *, dtype: Any, rngs: nnx.Rngs) -> nnx.Module:
        return SparseMLP(config, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b t h"], rope: Rope, attend: Attend) -> Float[Array, "b t h"]:
        q, k, v = self.heads(self.attention.fused(rms_norm(x, self.input_norm[...], self.eps)))
        attended = attend(apply_rope(q, rope), apply_rope(k, rope), v, window=self.window, sinks=self.sinks[...])
        x = x + self.attention.output(attended) + self.o_bias[...][None, None]
        return x + self.mlp(rms_norm(x, self.post_norm[...], self.eps))


class GptOss(TargetModel):
    block = Block


def table(config: GptOssConfig) -> dict[str, Entry]:
    """Maps parameter paths to Hugging Face tensors."""
    c = config
    h, f, count = c.hidden_size, c.intermediate_size, c.num_experts
    entries = qwen2.table(c)
    for i in range(c.num_hidden_layers):
        path, source = f"blocks/{i}", f"model.layers.{i}"
        for name in ("gate", "up", "down"):
            del entries[f"{path}/mlp/{name}"]
        experts, matrix = f"{source}.mlp.experts", _mxfp4 if c.mxfp4 else plain
        entries |= {
            f"{path}/o_bias": plain(f"{source}.self_attn.o_proj.bias", h),
            f"{path}/sinks": plain(f"{source}.self_attn.sinks", c.num_attention_heads),
            f"{path}/mlp/router": kernel(f"{source}.mlp.router.weight", count, h),
            f"{path}/mlp/router_bias": plain(f"{source}.mlp.router.bias", count),
            f"{path}/mlp/expert_gate_up": matrix(f"{experts}.gate_up_proj", count, h, 2 * f),
            f"{path}/mlp/expert_gate_up_bias": plain(f"{experts}.gate_up_proj_bias", count, 2 * f),
            f"{path}/mlp/expert_down": matrix(f"{experts}.down_proj", count, f, h),
            f"{path}/mlp/expert_down_bias": plain(f"{experts}.down_proj_bias", count, h),
        }
    return entries


def _mxfp4(name: str, experts: int, rows: int, columns: int) -> Entry:
    """Reads MXFP4 [experts, rows, columns]: 32 rows of a column share a scale; two numbers a byte, low first."""

    def numbers(index: tuple[slice, slice, slice], blocks: Any, scales: Any) -> np.ndarray:
        expert, row, column = index
        packed = blocks[expert, column]  # [e, columns, rows / 32, 16]
        codes = np.stack([packed & 15, packed >> 4], axis=-1)
        return codes.reshape(*packed.shape[:2], rows)[..., row].swapaxes(1, 2)

    def scale(group: int, index: tuple[slice, slice, slice], blocks: Any, scales: Any) -> np.ndarray:
        expert, part, column = index
        exponents = np.repeat(scales[expert, column].astype(np.int32), _FP4_GROUP // group, axis=-1)
        return np.ldexp(np.float32(1), exponents[..., part].swapaxes(1, 2) - 127)

    def part(index: tuple[slice, slice, slice], *tensors: Any) -> np.ndarray:
        expert, row, column = index
        return _FP4[numbers(index, *tensors)] * scale(1, (expert, row, column), *tensors)

    def values(index: tuple[slice, slice, slice], *tensors: Any) -> np.ndarray:
        return np.ascontiguousarray(numbers(index, *tensors)).view(ml_dtypes.float4_e2m1fn)

    def split(_: np.ndarray) -> tuple[np.ndarray, ...]:
        raise ValueError("mxfp4: not written, only read; load an unquantised checkpoint")

    shape, packed = (experts, columns, rows // _FP4_GROUP), Packed(_FP4_GROUP, values, scale)
    return Entry({f"{name}_blocks": (*shape, 16), f"{name}_scales": shape}, part, split, 3, ("U8",), packed)
