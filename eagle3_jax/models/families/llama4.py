"""Llama 4's text model: routed experts and a shared one; layers with RoPE attend to a chunk of the text.

Layers without RoPE attend to the whole text. Llama 4's RoPE rotates neighbouring dimensions, the one here halves:
queries and keys are permuted first, which leaves their products unchanged.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import P
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.linear.api import linear
from eagle3_jax.models.checkpoint.table import Entry, functions_of, kernel, plain, swiglu
from eagle3_jax.models.experts import Product, mixture
from eagle3_jax.models.families import llama
from eagle3_jax.models.families.gemma3 import float32_norm
from eagle3_jax.models.layers import SwiGLU, apply_rope, halves, normal, rms_norm
from eagle3_jax.models.target import Attend, Rope, TargetModel
from eagle3_jax.models.target_config import ModelConfig

_CHUNKED, _GLOBAL = "chunked_attention", "full_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama4Config(ModelConfig):
    """Fields of `ModelConfig`, with an expert's `intermediate_size`.

    Attributes:
        intermediate_size_mlp: intermediate size of the layers without experts.
        expert_layers: the layers with experts.
        rope_layers: layers with RoPE.
        chunked_layers: layers that attend to their chunk of `attention_chunk_size` positions.
        use_qk_norm: norm queries and keys after RoPE.
        attn_temperature_tuning: scale queries of the layers without RoPE by 1 + `attn_scale` * log1p((position + 1) //
            `floor_scale`).
    """

    architecture: ClassVar[str] = "Llama4ForCausalLM"
    model_type: ClassVar[str] = "llama4_text"
    supported: ClassVar[dict[str, Any]] = {"hidden_act": "silu", "attention_bias": False}
    defaults: ClassVar[dict[str, Any]] = {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
    }

    num_experts: int
    num_experts_per_tok: int
    intermediate_size_mlp: int
    expert_layers: tuple[int, ...]
    rope_layers: tuple[int, ...]
    chunked_layers: tuple[int, ...]
    attention_chunk_size: int
    use_qk_norm: bool
    attn_temperature_tuning: bool
    floor_scale: int
    attn_scale: float

    @classmethod
    def own(cls, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        layers = range(values.get("num_hidden_layers", 0))
        every, without = values.get("interleave_moe_layer_step", 1), values.get("no_rope_layer_interval", 4)
        experts = values.get("moe_layers")
        turned = values.get("no_rope_layers") or [int((i + 1) % without != 0) for i in layers]  # 1: has RoPE
        kinds = values.get("layer_types") or [_CHUNKED if turned[i] else _GLOBAL for i in layers]
        if len(kinds) != len(layers) or not set(kinds) <= {_CHUNKED, _GLOBAL}:
            problems.append(f"layer_types: got {kinds!r}, expected {_CHUNKED!r} or {_GLOBAL!r} for each layer")
        return {
            "num_experts": values.get("num_local_experts", 16),
            "num_experts_per_tok": values.get("num_experts_per_tok", 1),
            "intermediate_size_mlp": values.get("intermediate_size_mlp", 16384),
            "expert_layers": tuple(layers[every - 1 :: every] if experts is None else experts),
            "rope_layers": tuple(i for i in layers if turned[i]),
            "chunked_layers": tuple(i for i, kind in enumerate(kinds) if kind == _CHUNKED),
            "attention_chunk_size": values.get("attention_chunk_size", 8192),
            "use_qk_norm": values.get("use_qk_norm", True),
            "attn_temperature_tuning": bool(values.get("attn_temperature_tuning", True)),
            "floor_scale": values.get("floor_scale", 8192),
            "attn_scale": float(values.get("attn_scale", 0.1)),
        }

    def to_hf(self) -> dict[str, Any]:
        values = super().to_hf()
        layers = range(self.num_hidden_layers)
        chunked, turned = values.pop("chunked_layers"), values.pop("rope_layers")
        return values | {
            "num_local_experts": values.pop("num_experts"),
            "moe_layers": list(values.pop("expert_layers")),
            "no_rope_layers": [int(i in turned) for i in layers],
            "layer_types": [_CHUNKED if i in chunked else _GLOBAL for i in layers],
        }


class SparseMLP(nnx.Module):
    """Top experts by the router's logits, whose sigmoid scales their inputs, and a shared expert.

    `expert_gate_up` [experts, hidden, 2 * intermediate] interleaves gate and up, `expert_down` [experts, intermediate,
    hidden].
    """

    def __init__(self, config: Llama4Config, *, dtype: Any, rngs: nnx.Rngs) -> None:
        c = config
        h, f, count = c.hidden_size, c.intermediate_size, c.num_experts
        self.chosen = c.num_experts_per_tok
        self.router = normal((h, count), dtype, rngs)
        self.expert_gate_up = normal((count, h, 2 * f), dtype, rngs)
        self.expert_down = normal((count, f, h), dtype, rngs)
        self.shared = SwiGLU(h, f, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b t h"]) -> Float[Array, "b t h"]:
        b, t, h = x.shape
        scores, chosen = jax.lax.top_k(linear(x, self.router[...]), self.chosen)
        scales = jax.nn.sigmoid(scores.astype(jnp.float32)).astype(x.dtype)
        scaled = x[:, :, None] * scales[..., None]  # one row per choice of a token

        def feed(rows: Array, product: Product, expert: Array, gate_up: Any, down: Any) -> Array:
            both = product(rows, gate_up)
            return product((jax.nn.silu(both[:, ::2]) * both[:, 1::2]).astype(x.dtype), down)

        routed = mixture(
            scaled.reshape(b, t * self.chosen, h),
            chosen.reshape(b, t * self.chosen, 1),
            jnp.ones((b, t * self.chosen, 1), jnp.float32),
            feed,
            (self.expert_gate_up[...], self.expert_down[...]),
            (P(None, None, "model"), P(None, "model")),
        )
        return self.shared(x) + routed.reshape(b, t, self.chosen, h).sum(axis=2).astype(x.dtype)


class Block(llama.Block):
    """One decoder layer."""

    def __init__(self, config: Llama4Config, layer: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        self.turned = layer in config.rope_layers
        self.normed = config.use_qk_norm and self.turned
        self.chunk = config.attention_chunk_size if layer in config.chunked_layers else None

    def feed_forward(self, config: Llama4Config, layer: int, *, dtype: Any, rngs: nnx.Rngs) -> nnx.Module:
        if layer in config.expert_layers:
            return SparseMLP(config, dtype=dtype, rngs=rngs)
        return SwiGLU(config.hidden_size, config.intermediate_size_mlp, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b t h"], given: tuple[Rope, Array], attend: Attend) -> Float[Array, "b t h"]:
        rope, temperature = given
        q, k, v = self.heads(self.attention.fused(rms_norm(x, self.input_norm[...], self.eps)))
        if self.turned:
            q, k = apply_rope(halves(q), rope), apply_rope(halves(k), rope)
        else:
            q = (q.astype(jnp.float32) * temperature).astype(q.dtype)
        if self.normed:
            q, k = float32_norm(q, None, self.eps), float32_norm(k, None, self.eps)
        x = x + self.attention.output(attend(q, k, v, chunk=self.chunk))
        return x + self.mlp(rms_norm(x, self.post_norm[...], self.eps))


class Llama4(TargetModel):
    block = Block

    def rotary(self, positions: Int[Array, "b t"]) -> tuple[Rope, Float[Array, "b t 1 1"]]:
        """Computes RoPE tables, and the scale of queries in layers without RoPE."""
        c: Any = self.config
        temperature = jnp.ones(positions.shape, jnp.float32)
        if c.attn_temperature_tuning:
            temperature += jnp.log1p(((positions + 1) // c.floor_scale).astype(jnp.float32)) * c.attn_scale
        return super().rotary(positions), temperature[..., None, None]


def table(config: Llama4Config) -> dict[str, Entry]:
    """Maps parameter paths to Hugging Face tensors."""
    c = config
    h, f, count = c.hidden_size, c.intermediate_size, c.num_experts
    entries = llama.table(c)
    for i in range(c.num_hidden_layers):
        path, source = f"blocks/{i}/mlp", f"model.layers.{i}.feed_forward"
        for name in ("gate", "up", "down"):
            del entries[f"{path}/{name}"]
        width = c.intermediate_size_mlp
        if i in c.expert_layers:
            experts = f"{source}.experts"
            entries |= {
                f"{path}/router": kernel(f"{source}.router.weight", count, h),
                f"{path}/expert_gate_up": _in_turn(f"{experts}.gate_up_proj", count, h, f),
                f"{path}/expert_down": plain(f"{experts}.down_proj", count, f, h),
            }
            path, source, width = f"{path}/shared", f"{source}.shared_expert", f
        entries |= {f"{path}/{name}": entry for name, entry in swiglu(source, h, width).items()}
    return entries


def _in_turn(name: str, experts: int, rows: int, columns: int) -> Entry:
    """Interleaves [experts, rows, 2 * columns], gate before up on disk, so that a mesh splits the columns in pairs."""

    def part(index: tuple[slice, slice, slice], both: Any) -> Any:
        expert, row, column = index
        start, stop, _ = column.indices(2 * columns)
        first, end = start // 2, -(-stop // 2)
        gate, up = both[expert, row, first:end], both[expert, row, columns + first : columns + end]
        in_turn = functions_of(gate).stack([gate, up], axis=-1).reshape(*gate.shape[:2], -1)
        return in_turn[..., start - 2 * first : stop - 2 * first]

    def split(x: np.ndarray) -> tuple[np.ndarray, ...]:
        return (np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1),)

    return Entry({name: (experts, rows, 2 * columns)}, part, split, 3)
