"""Qwen3-Next, Qwen 3.5, 3.6 and 3.8: Gated DeltaNet in most layers, gated attention in the others.

Attention rotates a part of each head. Norms multiply by 1 + the stored weight. Dense, or with experts beside a gated
shared one. Source: transformers' models/qwen3_next, qwen3_5 and qwen3_5_moe.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from eagle3_jax.kernels.gated_delta.solve import Tokens
from eagle3_jax.kernels.linear.api import linear
from eagle3_jax.models.cache import LayerCache, LayerPass
from eagle3_jax.models.checkpoint.table import Entry, grouped, kernel, plain, swiglu, taps
from eagle3_jax.models.families import llama, qwen3_moe
from eagle3_jax.models.families.gemma3 import OffsetNormed, offset_norm
from eagle3_jax.models.layers import Attention, SwiGLU, apply_rope, normal, ones, rms_norm, zeros
from eagle3_jax.models.recurrent import ConvolutionCache, DeltaCache
from eagle3_jax.models.target import Attend, Rope
from eagle3_jax.models.target_config import PartialRotaryConfig

LINEAR, FULL = "linear_attention", "full_attention"
_GATES = "in_proj_b", "in_proj_a"
_SIZES = {  # of Gated DeltaNet, with transformers' defaults
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen35Config(PartialRotaryConfig):
    """Shape of a dense Qwen 3.5.

    Attributes:
        layer_types: "linear_attention" or "full_attention" for each layer.
        linear_num_key_heads, linear_num_value_heads, linear_key_head_dim, linear_value_head_dim: of Gated DeltaNet.
        linear_conv_kernel_dim: taps of its convolution, the token's own included.
    """

    architecture: ClassVar[str] = "Qwen3_5ForCausalLM"
    model_type: ClassVar[str] = "qwen3_5_text"
    supported: ClassVar[dict[str, Any]] = {"hidden_act": "silu", "attention_bias": False}
    defaults: ClassVar[dict[str, Any]] = {"head_dim": 256, "max_position_embeddings": 32768}
    recurrent: ClassVar[bool] = True
    rotary_share: ClassVar[float | None] = 0.25

    layer_types: tuple[str, ...]
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int

    @classmethod
    def own(cls, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        layers, every = values.get("num_hidden_layers", 0), values.get("full_attention_interval", 4)
        types = values.get("layer_types") or [LINEAR if (i + 1) % every else FULL for i in range(layers)]
        if len(types) != layers or not set(types) <= {LINEAR, FULL} or FULL not in types:
            expected = f"{LINEAR!r} or {FULL!r} for each of {layers} layers, one of the latter at least"
            problems.append(f"layer_types: got {types!r}, expected {expected}")
        found = {name: values.get(name, size) for name, size in _SIZES.items()}
        wrong = {name: size for name, size in found.items() if not isinstance(size, int) or size < 1}
        problems += [f"{name}: got {size!r}, expected a positive whole number" for name, size in wrong.items()]
        if not wrong and found["linear_num_value_heads"] % (keys := found["linear_num_key_heads"]):
            value_heads = found["linear_num_value_heads"]
            problems.append(f"linear_num_value_heads: got {value_heads}, expected a multiple of the {keys} key heads")
        return super().own(values, problems) | found | {"layer_types": tuple(types)}

    def to_hf(self) -> dict[str, Any]:
        return super().to_hf() | {"layer_types": list(self.layer_types)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen35MoeConfig(Qwen35Config):
    """Shape of a Qwen 3.5 with experts in all layers, beside a shared one of its own width."""

    architecture: ClassVar[str] = "Qwen3_5MoeForCausalLM"
    model_type: ClassVar[str] = "qwen3_5_moe_text"
    defaults: ClassVar[dict[str, Any]] = Qwen35Config.defaults | {"intermediate_size": 0, "norm_topk_prob": True}

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    norm_topk_prob: bool
    expert_layers: tuple[int, ...]

    @classmethod
    def own(cls, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        shared = values.get("shared_expert_intermediate_size")
        if shared is None:
            problems.append("shared_expert_intermediate_size: missing")
        experts = qwen3_moe.Qwen3MoeConfig.own(values, problems)
        return super().own(values, problems) | experts | {"shared_expert_intermediate_size": shared}

    def to_hf(self) -> dict[str, Any]:
        values = super().to_hf()
        have = values.pop("expert_layers")
        return values | {"mlp_only_layers": [i for i in range(self.num_hidden_layers) if i not in have]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(Qwen35MoeConfig):
    """Shape of a Qwen3-Next; `intermediate_size` is that of the layers without experts."""

    architecture: ClassVar[str] = "Qwen3NextForCausalLM"
    model_type: ClassVar[str] = "qwen3_next"
    defaults: ClassVar[dict[str, Any]] = Qwen35Config.defaults | {"norm_topk_prob": True}


class GatedAttention(Attention):
    """Grouped-query attention whose output a sigmoid gates.

    `qkv` [in, kv_heads * (2 * group + 2) * head_dim]: behind each query head lies its gate.
    """

    def __init__(self, config: Qwen35Config, *, dtype: Any, rngs: nnx.Rngs) -> None:
        c = config
        heads = 2 * c.num_attention_heads, c.num_key_value_heads, c.head_dim
        super().__init__(c.hidden_size, c.hidden_size, *heads, dtype=dtype, rngs=rngs)
        self.o = normal((c.num_attention_heads * c.head_dim, c.hidden_size), dtype, rngs)
        self.q_offset, self.k_offset = zeros(c.head_dim, dtype), zeros(c.head_dim, dtype)
        self.eps = c.rms_norm_eps

    def __call__(self, x: Float[Array, "b t h"], rope: Rope, own: Attend) -> Float[Array, "b t h"]:
        q, k, v = self.heads(self.fused(x))
        q, gate = q[:, :, ::2], q[:, :, 1::2]
        q, k = offset_norm(q, self.q_offset[...], self.eps), offset_norm(k, self.k_offset[...], self.eps)
        attended = own(apply_rope(q, rope), apply_rope(k, rope), v)
        return self.output(attended * jax.nn.sigmoid(gate))


class GatedDeltaNet(nnx.Module):
    """Gated DeltaNet (https://arxiv.org/abs/2412.06464), with a convolution over queries, keys and values.

    Columns of a key head lie side by side, so that the model axis splits key heads: in `project` [H, heads * (query,
    key, values, gates)], in `gates` [H, heads * (b, a)], in `taps` [w, heads * (query, key, values)].
    """

    def __init__(self, config: Qwen35Config, *, dtype: Any, rngs: nnx.Rngs) -> None:
        c = config
        self.key_heads, self.value_heads = c.linear_num_key_heads, c.linear_num_value_heads
        self.key_dim, self.value_dim, self.eps = c.linear_key_head_dim, c.linear_value_head_dim, c.rms_norm_eps
        queries, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        self.project = normal((c.hidden_size, 2 * queries + 2 * values), dtype, rngs)
        self.gates = normal((c.hidden_size, 2 * self.value_heads), dtype, rngs)
        self.taps = normal((c.linear_conv_kernel_dim, 2 * queries + values), dtype, rngs)
        self.decay, self.decay_bias = zeros(self.value_heads, jnp.float32), ones(self.value_heads, jnp.float32)
        self.norm = ones(self.value_dim, dtype)
        self.o = normal((values, c.hidden_size), dtype, rngs)

    def __call__(self, x: Float[Array, "b t h"], own: LayerPass) -> Float[Array, "b t h"]:
        b, t, _ = x.shape
        d, n = self.key_dim, self.value_heads // self.key_heads
        fused = jax.lax.optimization_barrier(linear(x, self.project[...])).reshape(b, t, self.key_heads, -1)
        inputs, z = fused[..., : 2 * d + n * self.value_dim], fused[..., 2 * d + n * self.value_dim :]
        mixed = own.convolve(inputs.reshape(b, t, -1), self.taps[...])
        mixed = jax.nn.silu(mixed).astype(jnp.float32).reshape(inputs.shape)
        queries, keys = _unit(mixed[..., :d]) * d**-0.5, _unit(mixed[..., d : 2 * d])
        values = mixed[..., 2 * d :].reshape(b, t, self.value_heads, -1)
        gates = linear(x, self.gates[...]).astype(jnp.float32).reshape(b, t, self.key_heads, 2, n)
        beta, a = (gates[:, :, :, part].reshape(b, t, -1) for part in range(2))
        decays = -jnp.exp(self.decay[...])[None, None] * jax.nn.softplus(a + self.decay_bias[...][None, None])
        outputs = own.advance(Tokens(queries, keys, values, decays, jax.nn.sigmoid(beta)))
        normed = rms_norm(outputs.astype(x.dtype), self.norm[...], self.eps).astype(jnp.float32)
        gated = normed * jax.nn.silu(z.reshape(outputs.shape).astype(jnp.float32))
        return linear(gated.astype(x.dtype).reshape(b, t, -1), self.o[...])


def _unit(x: Float[Array, "b t k d"]) -> Float[Array, "b t k d"]:
    return x * jax.lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


class SparseMLP(qwen3_moe.SparseMLP):
    """Top experts by a softmax over all of them, and a shared expert that a sigmoid gates."""

    def __init__(self, config: Qwen35MoeConfig, *, dtype: Any, rngs: nnx.Rngs) -> None:
        c: Any = config
        super().__init__(c, dtype=dtype, rngs=rngs)
        self.shared = SwiGLU(c.hidden_size, c.shared_expert_intermediate_size, dtype=dtype, rngs=rngs)
        self.shared_gate = normal((c.hidden_size, 1), dtype, rngs)

    def __call__(self, x: Float[Array, "b t h"]) -> Float[Array, "b t h"]:
        return super().__call__(x) + jax.nn.sigmoid(linear(x, self.shared_gate[...])) * self.shared(x)


class Block(nnx.Module):
    """One decoder layer; `own` is a `LayerPass`, or, of full attention, any `Attend`."""

    def __init__(self, config: Qwen35Config, layer: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        c: Any = config
        self.eps, self.linear = c.rms_norm_eps, c.layer_types[layer] == LINEAR
        self.input_offset, self.post_offset = zeros(c.hidden_size, dtype), zeros(c.hidden_size, dtype)
        if self.linear:
            self.delta = GatedDeltaNet(c, dtype=dtype, rngs=rngs)
        else:
            self.attention = GatedAttention(c, dtype=dtype, rngs=rngs)
        if layer in getattr(c, "expert_layers", ()):
            self.mlp: Any = SparseMLP(c, dtype=dtype, rngs=rngs)
        else:
            self.mlp = SwiGLU(c.hidden_size, c.intermediate_size, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b t h"], rope: Rope, own: Any) -> Float[Array, "b t h"]:
        normed = offset_norm(x, self.input_offset[...], self.eps)
        x = x + (self.delta(normed, own) if self.linear else self.attention(normed, rope, own))
        return x + self.mlp(offset_norm(x, self.post_offset[...], self.eps))


class Qwen35(OffsetNormed):
    block = Block

    def layer_cache(self, layer: int, pages: int, page_size: int, dtype: Any, states: int, tail: int) -> LayerCache:
        """See `TargetModel`; a convolution's inputs have the activations' dtype, states are float32."""
        c: Any = self.config
        if c.layer_types[layer] == FULL:
            return super().layer_cache(layer, pages, page_size, dtype, states, tail)
        heads = c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
        channels = 2 * heads[0] * heads[2] + heads[1] * heads[3]
        of_inputs = states, c.linear_conv_kernel_dim - 1, tail, channels
        return DeltaCache.empty(ConvolutionCache.empty(*of_inputs, self.embed[...].dtype), *heads)


def table(config: Qwen35Config) -> dict[str, Entry]:
    """Maps parameter paths to Hugging Face tensors."""
    c: Any = config
    h = c.hidden_size
    entries = llama.ends(c)
    entries["offset"] = entries.pop("norm")
    for i, kind in enumerate(c.layer_types):
        path, source = f"blocks/{i}", f"model.layers.{i}"
        entries |= {
            f"{path}/input_offset": plain(f"{source}.input_layernorm.weight", h),
            f"{path}/post_offset": plain(f"{source}.post_attention_layernorm.weight", h),
            **(_attention if kind == FULL else _delta)(c, path, source),
            **_mlp(c, i, path, source),
        }
    return entries


def _attention(config: Any, path: str, source: str) -> dict[str, Entry]:
    c, h, d, source = config, config.hidden_size, config.head_dim, f"{source}.self_attn"
    sizes = {"q": 2 * d * c.num_attention_heads // c.num_key_value_heads, "k": d, "v": d}
    blocks = {f"{source}.{name}_proj.weight": (size,) for name, size in sizes.items()}
    return {
        f"{path}/attention/qkv": grouped(blocks, c.num_key_value_heads, h),
        f"{path}/attention/o": kernel(f"{source}.o_proj.weight", h, c.num_attention_heads * d),
        f"{path}/attention/q_offset": plain(f"{source}.q_norm.weight", d),
        f"{path}/attention/k_offset": plain(f"{source}.k_norm.weight", d),
    }


def _delta(config: Any, path: str, source: str) -> dict[str, Entry]:
    c, h, path, source = config, config.hidden_size, f"{path}/delta", f"{source}.linear_attn"
    heads, d, group = c.linear_num_key_heads, c.linear_key_head_dim, c.linear_num_value_heads // c.linear_num_key_heads
    values = group * c.linear_value_head_dim
    if isinstance(c, Qwen3NextConfig):  # a key head's rows lie side by side on disk too
        projections = {"in_proj_qkvz": (2 * d + 2 * values,)}, {"in_proj_ba": (2 * group,)}
    else:
        projections = (
            {"in_proj_qkv": (d, d, values), "in_proj_z": (values,)},
            {"in_proj_b": (group,), "in_proj_a": (group,)},
        )
    fused = [grouped({f"{source}.{name}.weight": x for name, x in each.items()}, heads, h) for each in projections]
    return {
        f"{path}/project": fused[0],
        f"{path}/gates": fused[1],
        f"{path}/taps": taps(f"{source}.conv1d.weight", (d, d, values), heads, c.linear_conv_kernel_dim),
        f"{path}/decay": plain(f"{source}.A_log", c.linear_num_value_heads),
        f"{path}/decay_bias": plain(f"{source}.dt_bias", c.linear_num_value_heads),
        f"{path}/norm": plain(f"{source}.norm.weight", c.linear_value_head_dim),
        f"{path}/o": kernel(f"{source}.out_proj.weight", h, heads * values),
    }


def _mlp(config: Any, layer: int, path: str, source: str) -> dict[str, Entry]:
    c, h, path, source = config, config.hidden_size, f"{path}/mlp", f"{source}.mlp"
    if layer not in getattr(c, "expert_layers", ()):
        entries = swiglu(source, h, c.intermediate_size)
    else:
        entries = qwen3_moe.experts_table(c, source, ("gate_proj", "up_proj", "down_proj"), fused=True)
        entries["shared_gate"] = kernel(f"{source}.shared_expert_gate.weight", 1, h)
        shared = swiglu(f"{source}.shared_expert", h, c.shared_expert_intermediate_size)
        entries |= {f"shared/{name}": entry for name, entry in shared.items()}
    return {f"{path}/{name}": entry for name, entry in entries.items()}


MTP = "mtp."


def unused(config: Any) -> tuple[str, ...]:
    """Prefixes of the tensors that are not read: those of the layer in `drafts.mtp`, which predicts further tokens."""
    return (MTP,)
