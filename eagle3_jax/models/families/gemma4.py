"""Gemma 4's text model: as Gemma 3, with layers that differ in heads, in what they cache, and in what they add.

Layers of full attention have wider heads, fewer KV heads, and may take their keys as values. The last layers may read
the keys and values of an earlier layer of their kind. Each layer may add a small embedding of the token that is its own
(PLE), and have experts beside its MLP. Norms multiply by the stored weight. Source: transformers' models/gemma4.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.linear.api import linear
from eagle3_jax.kernels.vocabulary.api import capped
from eagle3_jax.models.cache import BorrowedCache, KVCache, LayerCache
from eagle3_jax.models.checkpoint.table import Entry, grouped, kernel, plain, stacked
from eagle3_jax.models.experts import Experts
from eagle3_jax.models.families import llama
from eagle3_jax.models.families.gemma3 import GeGLU, LocalConfig, float32_norm, gelu, ropes, scaled_embeddings
from eagle3_jax.models.layers import Attention, apply_rope, embeddings, normal, ones
from eagle3_jax.models.rope import PROPORTIONAL, Scalings
from eagle3_jax.models.target import TargetModel
from eagle3_jax.models.target_config import LOCAL, ModelConfig

_ROPE = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    LOCAL: {"rope_type": "default", "rope_theta": 1e4},
}
_EXPERTS = ("num_experts", "top_k_experts", "moe_intermediate_size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Config(LocalConfig):
    """Fields of `LocalConfig`; `num_key_value_heads` and `head_dim` are those of local layers.

    Attributes:
        global_head_dim, num_global_key_value_heads: those of the layers of full attention.
        attention_k_eq_v: whether these layers' keys, before their norm, are values too.
        num_kv_shared_layers: the last layers, which read another layer's keys and values.
        use_double_wide_mlp: whether their MLPs are twice as wide.
        final_logit_softcapping: logits are at most so large; None: as large as they are.
        hidden_size_per_layer_input: width of a layer's own embeddings; 0: there are none.
        num_experts, top_k_experts, moe_intermediate_size: of the experts beside the MLPs; None: there are none.
    """

    architecture: ClassVar[str] = "Gemma4ForCausalLM"
    model_type: ClassVar[str] = "gemma4_text"
    supported: ClassVar[dict[str, Any]] = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
    defaults: ClassVar[dict[str, Any]] = {
        **LocalConfig.defaults,
        **{"vocab_size": 262_144, "sliding_window": 512},
        **{"global_head_dim": 512, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 256},
        **dict.fromkeys(("attention_k_eq_v", "use_double_wide_mlp"), False),
        **dict.fromkeys(("num_global_key_value_heads", "final_logit_softcapping", *_EXPERTS)),
    }
    scalings: ClassVar[Scalings] = PROPORTIONAL

    global_head_dim: int
    num_global_key_value_heads: int
    attention_k_eq_v: bool
    num_kv_shared_layers: int
    use_double_wide_mlp: bool
    final_logit_softcapping: float | None
    hidden_size_per_layer_input: int
    num_experts: int | None
    top_k_experts: int | None
    moe_intermediate_size: int | None

    @classmethod
    def from_hf(cls, values: dict[str, Any], aux_layers: tuple[int, ...] | None = None) -> ModelConfig:
        """See `ModelConfig`; transformers' `per_layer_config` is read where it says heads of full layers alone."""
        values = {**values, "rope_parameters": values.get("rope_parameters") or _ROPE}
        if (kinds := values.get("layer_types")) and kinds[-1] == LOCAL:  # as transformers corrects it
            values["layer_types"] = [*kinds[:-1], "full_attention"]
        if values.get("model_type") == "gemma4_unified_text":  # which has no such field
            values["hidden_size_per_layer_input"] = 0
        if each := values.get("per_layer_config"):
            last = {int(layer): own for layer, own in each.items()}.get(values.get("num_hidden_layers", 0) - 1, {})
            found = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
            values |= {ours: last[theirs] for theirs, ours in found.items() if theirs in last}
        if not values.get("enable_moe_block"):
            values |= dict.fromkeys(_EXPERTS)
        return super().from_hf(values, aux_layers)

    @classmethod
    def own(cls, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        """See `ModelConfig`."""
        inherited = {field.name for field in dataclasses.fields(LocalConfig)}
        found = super().own(values, problems)
        found |= {x.name: values[x.name] for x in dataclasses.fields(cls) if x.name not in inherited}
        if not (values["attention_k_eq_v"] and values["num_global_key_value_heads"]):
            found["num_global_key_value_heads"] = values["num_key_value_heads"]
        layers, shared = values.get("num_hidden_layers", 0), values["num_kv_shared_layers"]
        local = [layer in found["local_layers"] for layer in range(layers)]
        if not 0 <= shared < max(layers, 1) or set(local[layers - shared :]) - set(local[: layers - shared]):
            expected = f"fewer than {layers}, behind a layer of each of their kinds"
            problems.append(f"num_kv_shared_layers: got {shared}, expected {expected}")
        rows, size = values.get("vocab_size_per_layer_input", values["vocab_size"]), values["vocab_size"]
        if values["hidden_size_per_layer_input"] and rows != size:
            problems.append(f"vocab_size_per_layer_input: got {rows}, expected {size}, as vocab_size")
        if values.get("use_bidirectional_attention") == "all":
            problems.append("use_bidirectional_attention: got 'all', expected none or 'vision'")
        if values.get("enable_moe_block"):
            problems += [f"{name}: missing" for name in _EXPERTS if values[name] is None]
        return found

    def to_hf(self) -> dict[str, Any]:
        """See `ModelConfig`; transformers would take `rope_scaling` for the RoPE of all layers."""
        values = super().to_hf()
        del values["rope_scaling"], values["rope_theta"], values["rope_local_base_freq"]
        rows = self.vocab_size if self.hidden_size_per_layer_input else 0
        return values | {"enable_moe_block": self.num_experts is not None, "vocab_size_per_layer_input": rows}

    @property
    def rope_dim(self) -> int:
        """See `ModelConfig`: of the layers of full attention."""
        return self.global_head_dim

    def heads(self, layer: int) -> tuple[int, int]:
        """Returns a layer's KV heads and the size of a head."""
        if layer in self.local_layers:
            return self.num_key_value_heads, self.head_dim
        return self.num_global_key_value_heads, self.global_head_dim

    def shares(self, layer: int) -> bool:
        """Tells whether a layer reads another layer's keys and values."""
        return layer >= self.num_hidden_layers - self.num_kv_shared_layers

    def lender(self, *, local: bool) -> int:
        """Returns the layer whose keys and values others of its kind read: the last that has its own."""
        own = self.num_hidden_layers - self.num_kv_shared_layers
        return max(layer for layer in range(own) if (layer in self.local_layers) == local)

    def projections(self, layer: int) -> tuple[str, ...]:
        """Names the projections of a layer's attention: keys that are values have one, shared ones none."""
        if self.shares(layer):
            return ("q",)
        return ("q", "k") if self.attention_k_eq_v and layer not in self.local_layers else ("q", "k", "v")

    def mlp_width(self, layer: int) -> int:
        return self.intermediate_size * (2 if self.use_double_wide_mlp and self.shares(layer) else 1)


class GeluExperts(Experts):
    activation: ClassVar[Any] = staticmethod(gelu)


class Mixture(nnx.Module):
    """Top experts by a softmax over all of them; `router` [hidden, experts], `router_scale` [hidden].

    `per_expert` [experts] multiplies an expert's weight.
    """

    def __init__(self, config: Gemma4Config, *, dtype: Any, rngs: nnx.Rngs) -> None:
        c: Any = config
        self.eps, self.chosen = c.rms_norm_eps, c.top_k_experts
        self.router = normal((c.hidden_size, c.num_experts), dtype, rngs)
        self.router_scale, self.per_expert = ones(c.hidden_size, dtype), ones(c.num_experts, dtype)
        self.experts = GeluExperts(c.hidden_size, c.moe_intermediate_size, c.num_experts, dtype=dtype, rngs=rngs)

    def __call__(self, routed: Float[Array, "b t h"], x: Float[Array, "b t h"]) -> Float[Array, "b t h"]:
        """Sums the outputs, from `x`, of the experts that `routed` chooses."""
        scaled = float32_norm(routed, None, self.eps) * self.router_scale[...][None, None]
        scores = linear(scaled * jnp.asarray(x.shape[-1] ** -0.5, x.dtype), self.router[...])
        weights, chosen = jax.lax.top_k(jax.nn.softmax(scores.astype(jnp.float32), axis=-1), self.chosen)
        weights = weights / weights.sum(axis=-1, keepdims=True) * self.per_expert[...][chosen].astype(jnp.float32)
        return self.experts(x, chosen, weights)


class PerLayer(nnx.Module):
    """norm(down(gelu(gate(x)) * a layer's own embedding)); `gate` [hidden, width], `down` [width, hidden]."""

    def __init__(self, config: Gemma4Config, *, dtype: Any, rngs: nnx.Rngs) -> None:
        h, width, self.eps = config.hidden_size, config.hidden_size_per_layer_input, config.rms_norm_eps
        self.gate, self.down = normal((h, width), dtype, rngs), normal((width, h), dtype, rngs)
        self.norm = ones(h, dtype)

    def __call__(self, x: Float[Array, "b t h"], own: Float[Array, "b t p"]) -> Float[Array, "b t h"]:
        gated = gelu(linear(x, self.gate[...])) * own
        return float32_norm(linear(gated, self.down[...]), self.norm[...], self.eps)


class Block(nnx.Module):
    """One decoder layer; the norms of queries and keys [head_dim] are shared by all heads."""

    def __init__(self, config: Gemma4Config, layer: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        c, h = config, config.hidden_size
        self.eps, self.local = c.rms_norm_eps, layer in c.local_layers
        self.window = c.sliding_window if self.local else None
        (self.kv_heads, d), own = c.heads(layer), c.projections(layer)[1:]
        self.group = c.num_attention_heads // self.kv_heads
        self.input_layernorm, self.post_attention_layernorm = ones(h, dtype), ones(h, dtype)
        self.attention = Attention(h, h, c.num_attention_heads, self.kv_heads, d, dtype=dtype, rngs=rngs)
        self.attention.qkv = normal((h, self.kv_heads * (self.group + len(own)) * d), dtype, rngs)
        self.q_norm, self.k_norm = ones(d, dtype), ones(d, dtype) if own else None
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = ones(h, dtype), ones(h, dtype)
        self.mlp = GeGLU(h, c.mlp_width(layer), dtype=dtype, rngs=rngs)
        self.mixture = Mixture(c, dtype=dtype, rngs=rngs) if c.num_experts else None
        if c.num_experts:
            self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = ones(h, dtype), ones(h, dtype)
            self.pre_feedforward_layernorm_2 = ones(h, dtype)
        self.per_layer = PerLayer(c, dtype=dtype, rngs=rngs) if c.hidden_size_per_layer_input else None
        self.scalar = ones(1, dtype)

    def __call__(self, x: Float[Array, "b t h"], given: tuple[Any, Any], attend: Any) -> Float[Array, "b t h"]:
        """Maps the residual stream, given RoPE tables of both kinds of layers and the layer's own embeddings."""
        ropes, own = given
        x = x + self._norm(self.attended(x, ropes, attend), self.post_attention_layernorm)
        fed = self.mlp(self._norm(x, self.pre_feedforward_layernorm))
        if self.mixture is not None:
            mixed = self.mixture(x, self._norm(x, self.pre_feedforward_layernorm_2))
            fed = self._norm(fed, self.post_feedforward_layernorm_1)
            fed += self._norm(mixed, self.post_feedforward_layernorm_2)
        x = x + self._norm(fed, self.post_feedforward_layernorm)
        if self.per_layer is not None:
            x = x + self.per_layer(x, own)
        return x * self.scalar[...][None, None]

    def attended(self, x: Float[Array, "b t h"], ropes: tuple[Any, Any], attend: Any) -> Float[Array, "b t h"]:
        """Computes attention's output, from the residual stream. Shared keys and values are `attend.entries`."""
        x, rope = self._norm(x, self.input_layernorm), ropes[self.local]
        heads = self.attention.fused(x).reshape(*x.shape[:2], self.kv_heads, -1, self.attention.head_dim)
        q, own = heads[:, :, :, : self.group], heads[:, :, :, self.group :]
        q = apply_rope(self._norm(q.reshape(*x.shape[:2], -1, q.shape[-1]), self.q_norm), rope)
        q = (q.astype(jnp.float32) * q.shape[-1] ** 0.5).astype(q.dtype)  # attention divides by it; here it does not
        if self.k_norm is None:
            k, v = attend.entries  # of the layer whose cache it reads, which came before
        else:  # the last projection has values: where there is one alone, it has keys too
            k, v = self._norm(own[:, :, :, 0], self.k_norm), float32_norm(own[:, :, :, -1], None, self.eps)
            k = apply_rope(k, rope)
        return self.attention.output(attend(q, k, v, window=self.window))

    def _norm(self, x: Float[Array, "*batch h"], weight: nnx.Param) -> Float[Array, "*batch h"]:
        return float32_norm(x, weight[...], self.eps)


class Gemma4(TargetModel):
    """Where layers have embeddings of their own, `embed_per_layer` [V, layers * width] holds those of each token.

    `project` [H, layers * width] and `project_norm` [width] make their other half from the token's embedding.
    """

    block = Block
    config: Any

    def __init__(self, config: Gemma4Config, *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
        super().__init__(config, dtype=dtype, rngs=rngs)
        c, width = config, config.num_hidden_layers * config.hidden_size_per_layer_input
        if width:
            self.embed_per_layer = normal((c.vocab_size, width), dtype, rngs)
            self.project = normal((c.hidden_size, width), dtype, rngs)
            self.project_norm = ones(c.hidden_size_per_layer_input, dtype)

    def embedded(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t h"]:
        return scaled_embeddings(self.embed[...], tokens)

    def beside(self, tokens: Int[Array, "b t"], x: Float[Array, "b t h"]) -> list[Any]:
        """See `TargetModel`: each layer's own embeddings; None where there are none."""
        c = self.config
        if not c.hidden_size_per_layer_input:
            return [None] * c.num_hidden_layers
        shape = *tokens.shape, c.num_hidden_layers, c.hidden_size_per_layer_input
        of_token = embeddings(self.embed_per_layer[...], tokens).astype(x.dtype).reshape(shape)
        of_context = linear(x, self.project[...]) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        normed = float32_norm(of_context.reshape(shape), self.project_norm[...], c.rms_norm_eps)
        both = (normed + of_token * jnp.asarray(shape[-1] ** 0.5, x.dtype)) * jnp.asarray(2**-0.5, x.dtype)
        return [both[:, :, layer] for layer in range(c.num_hidden_layers)]

    def rotary(self, positions: Int[Array, "b t"]) -> tuple[Any, Any]:
        """See `ropes`."""
        return ropes(self.config, positions)

    def final_norm(self, x: Float[Array, "b t h"]) -> Float[Array, "b t h"]:
        return float32_norm(x, self.norm[...], self.config.rms_norm_eps)

    def logits(self, hidden: Float[Array, "*batch h"]) -> Float[Array, "*batch v"]:
        """See `TargetModel`; capped."""
        return capped(super().logits(hidden), self.config.logit_cap)

    def layer_cache(self, layer: int, pages: int, page_size: int, dtype: Any, states: int, tail: int) -> LayerCache:
        """See `TargetModel`."""
        c = self.config
        if c.shares(layer):
            return BorrowedCache(c.lender(local=layer in c.local_layers))
        kv_heads, head_dim = c.heads(layer)
        return KVCache.pages(pages, kv_heads, page_size, head_dim, dtype)


def table(config: Gemma4Config) -> dict[str, Entry]:
    """Maps parameter paths to Hugging Face tensors."""
    c, h, width = config, config.hidden_size, config.hidden_size_per_layer_input
    entries = llama.ends(c)
    for i in range(c.num_hidden_layers):
        entries |= layer_table(c, i)
    if width:
        entries |= {
            "embed_per_layer": dataclasses.replace(
                plain("model.embed_tokens_per_layer.weight", c.vocab_size, c.num_hidden_layers * width), kept=True
            ),
            "project": kernel("model.per_layer_model_projection.weight", c.num_hidden_layers * width, h),
            "project_norm": plain("model.per_layer_projection_norm.weight", width),
        }
    return entries


def layer_table(config: Gemma4Config, layer: int) -> dict[str, Entry]:
    """Maps one layer's parameter paths to tensors."""
    c, h, path, source = config, config.hidden_size, f"blocks/{layer}", f"model.layers.{layer}"
    (kv_heads, d), f = c.heads(layer), c.mlp_width(layer)
    attention, mlp = f"{source}.self_attn", f"{source}.mlp"
    rows = {"q": c.num_attention_heads // kv_heads * d, "k": d, "v": d}
    projections = {f"{attention}.{name}_proj.weight": (rows[name],) for name in c.projections(layer)}
    entries = {
        f"{path}/attention/qkv": grouped(projections, kv_heads, h),
        f"{path}/attention/o": kernel(f"{attention}.o_proj.weight", h, c.num_attention_heads * d),
        f"{path}/mlp/gate": kernel(f"{mlp}.gate_proj.weight", f, h),
        f"{path}/mlp/up": kernel(f"{mlp}.up_proj.weight", f, h),
        f"{path}/mlp/down": kernel(f"{mlp}.down_proj.weight", h, f),
        f"{path}/scalar": plain(f"{source}.layer_scalar", 1),
    }
    for name in ("q", "k")[: len(projections)]:
        entries[f"{path}/{name}_norm"] = plain(f"{attention}.{name}_norm.weight", d)
    norms = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
    if c.num_experts:
        count, size, experts = c.num_experts, c.moe_intermediate_size or 0, f"{source}.experts"
        norms += [f"{norms[3]}_1", f"{norms[2]}_2", f"{norms[3]}_2"]
        entries |= {
            f"{path}/mixture/router": kernel(f"{source}.router.proj.weight", count, h),
            f"{path}/mixture/router_scale": plain(f"{source}.router.scale", h),
            f"{path}/mixture/per_expert": plain(f"{source}.router.per_expert_scale", count),
        }
        for name, shape, fused in (
            ("gate", (size, h), (f"{experts}.gate_up_proj", 0, 2)),
            ("up", (size, h), (f"{experts}.gate_up_proj", 1, 2)),
            ("down", (h, size), (f"{experts}.down_proj", 0, 1)),
        ):
            each = [f"{experts}.{expert}.{name}_proj.weight" for expert in range(count)]
            entries[f"{path}/mixture/experts/expert_{name}"] = stacked(each, *shape, fused=fused)
    if width := c.hidden_size_per_layer_input:
        entries[f"{path}/per_layer/gate"] = kernel(f"{source}.per_layer_input_gate.weight", width, h)
        entries[f"{path}/per_layer/down"] = kernel(f"{source}.per_layer_projection.weight", h, width)
        entries[f"{path}/per_layer/norm"] = plain(f"{source}.post_per_layer_input_norm.weight", h)
    return entries | {f"{path}/{name}": plain(f"{source}.{name}.weight", h) for name in norms}


def unused(config: Gemma4Config) -> tuple[str, ...]:
    """Prefixes of tensors that are not read: projections and norms of keys and values that another layer makes."""
    shared = [f"model.layers.{i}.self_attn." for i in range(config.num_hidden_layers) if config.shares(i)]
    return tuple(f"{source}{name}" for source in shared for name in ("k_proj.", "v_proj.", "k_norm.", "v_norm."))
