"""Qwen 3 with a mixture of experts in some or all layers; attention is Qwen 3's."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from eagle3_jax.kernels.linear.api import linear
from eagle3_jax.models.checkpoint.table import Entry, kernel, stacked
from eagle3_jax.models.experts import Experts
from eagle3_jax.models.families import qwen3
from eagle3_jax.models.layers import normal
from eagle3_jax.models.target import TargetModel
from eagle3_jax.models.target_config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(ModelConfig):
    """Fields of `ModelConfig`; layers outside `expert_layers` have the `intermediate_size`."""

    architecture: ClassVar[str] = "Qwen3MoeForCausalLM"
    model_type: ClassVar[str] = "qwen3_moe"
    supported: ClassVar[dict[str, Any]] = qwen3.Qwen3Config.supported | {"use_sliding_window": False}
    defaults: ClassVar[dict[str, Any]] = {"max_position_embeddings": 32768}

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    expert_layers: tuple[int, ...]

    @classmethod
    def own(cls, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        count = values.get("num_experts", values.get("num_local_experts"))  # spelling of transformers 4, and of 5
        found = {name: values.get(name) for name in ("num_experts_per_tok", "moe_intermediate_size")}
        found |= {"num_experts": count}
        problems += [f"{name}: missing" for name, value in found.items() if value is None]
        every, dense = values.get("decoder_sparse_step", 1), values.get("mlp_only_layers") or ()
        layers = [i for i in range(values.get("num_hidden_layers", 0)) if (i + 1) % every == 0 and i not in dense]
        return found | {"norm_topk_prob": values.get("norm_topk_prob", False), "expert_layers": tuple(layers)}

    def to_hf(self) -> dict[str, Any]:
        values = super().to_hf()
        have = values.pop("expert_layers")
        return values | {"mlp_only_layers": [i for i in range(self.num_hidden_layers) if i not in have]}


class SparseMLP(nnx.Module):
    """Top experts by a softmax over all of them; `router` [hidden, experts]."""

    def __init__(self, config: Any, *, dtype: Any, rngs: nnx.Rngs) -> None:
        c = config
        self.chosen, self.normalised = c.num_experts_per_tok, c.norm_topk_prob
        self.router = normal((c.hidden_size, c.num_experts), dtype, rngs)
        self.experts = Experts(c.hidden_size, c.moe_intermediate_size, c.num_experts, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b t h"]) -> Float[Array, "b t h"]:
        scores = jax.nn.softmax(linear(x, self.router[...]).astype(jnp.float32), axis=-1)
        weights, chosen = jax.lax.top_k(scores, self.chosen)
        if self.normalised:
            weights /= weights.sum(axis=-1, keepdims=True)
        return self.experts(x, chosen, weights.astype(x.dtype))


class Block(qwen3.Block):
    """One decoder layer: Qwen 3's, with experts in `expert_layers`."""

    def __init__(self, config: Qwen3MoeConfig, layer: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        if layer in config.expert_layers:
            self.mlp = SparseMLP(config, dtype=dtype, rngs=rngs)


class Qwen3Moe(TargetModel):
    block = Block


def table(config: Qwen3MoeConfig) -> dict[str, Entry]:
    """Maps parameter paths to Hugging Face tensors."""
    entries = qwen3.table(config)
    for i in config.expert_layers:
        for name in ("gate", "up", "down"):
            del entries[f"blocks/{i}/mlp/{name}"]
        experts = experts_table(config, f"model.layers.{i}.mlp", ("gate_proj", "up_proj", "down_proj"))
        entries |= {f"blocks/{i}/mlp/{path}": entry for path, entry in experts.items()}
    return entries


def experts_table(config: Any, source: str, names: tuple[str, str, str], *, fused: bool = False) -> dict[str, Entry]:
    """Maps parameter paths in `SparseMLP` to tensors whose names begin with `source`; `names` of gate, up and down.

    `fused`: a checkpoint may have one tensor for all experts, with gate and up in it, as Qwen 3.5's on the hub.
    """
    c, h, f = config, config.hidden_size, config.moe_intermediate_size
    entries = {"router": kernel(f"{source}.gate.weight", c.num_experts, h)}
    wholes: list[tuple[str, int, int]] = [("gate_up_proj", 0, 2), ("gate_up_proj", 1, 2), ("down_proj", 0, 1)]
    for ours, theirs, (whole, place, parts) in zip(("gate", "up", "down"), names, wholes, strict=True):
        each = [f"{source}.experts.{j}.{theirs}.weight" for j in range(c.num_experts)]
        other = (f"{source}.experts.{whole}", place, parts) if fused else None
        entries[f"experts/expert_{ours}"] = stacked(each, *((h, f) if ours == "down" else (f, h)), fused=other)
    return entries
