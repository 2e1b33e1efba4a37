"""GLM-4.5, 4.6 and 4.7, MiniMax-M2 and ERNIE 4.5's mixtures: dense attention, and experts chosen as DeepSeek-V3's.

The MTP layer of GLM's checkpoints is in `drafts.mtp`. Sources: transformers' models/glm4_moe, minimax_m2 and
ernie4_5_moe.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
from flax import nnx

from eagle3_jax.models.checkpoint.table import Entry
from eagle3_jax.models.families import deepseek_v3, dense, llama
from eagle3_jax.models.families.deepseek_v3 import GroupedExpertsConfig
from eagle3_jax.models.families.dense import DenseConfig
from eagle3_jax.models.families.dense_configs import Ernie45Config
from eagle3_jax.models.target_config import ModelConfig

_ONE_GROUP = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(GroupedExpertsConfig, DenseConfig):
    """Fields of both; `use_qk_norm`: each head of queries and keys is normed."""

    architecture: ClassVar[str] = "Glm4MoeForCausalLM"
    model_type: ClassVar[str] = "glm4_moe"
    rotary_share: ClassVar[float | None] = 0.5
    supported: ClassVar[dict[str, Any]] = {"hidden_act": "silu"}
    defaults: ClassVar[dict[str, Any]] = _ONE_GROUP | {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
    }

    use_qk_norm: bool

    @classmethod
    def own(cls, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        return super().own(values, problems) | {"use_qk_norm": values.get("use_qk_norm", False)}

    @property
    def qk_norm(self) -> str:  # pyrefly: ignore
        return "heads" if self.use_qk_norm else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneGroupConfig(GroupedExpertsConfig, DenseConfig):
    """Fields of both, of which config.json has those of the experts by other names, and none of the groups."""

    renamed: ClassVar[dict[str, str]]  # ours -> config.json's
    router: ClassVar[dict[str, Any]] = _ONE_GROUP

    @classmethod
    def from_hf(cls, values: dict[str, Any], aux_layers: tuple[int, ...] | None = None) -> ModelConfig:
        ours = {name: values[theirs] for name, theirs in cls.renamed.items() if theirs in values}
        return super().from_hf(values | ours | cls.router, aux_layers)

    def to_hf(self) -> dict[str, Any]:
        values = super().to_hf()
        fields = {theirs: values[name] for name, theirs in self.renamed.items()}
        return {name: x for name, x in values.items() if name not in {*self.router, *self.renamed}} | fields


class MiniMaxM2Config(OneGroupConfig):
    """MiniMax-M2: experts in all layers, of `intermediate_size`; norms of queries and keys over all heads."""

    architecture, model_type, qk_norm, rotary_share = "MiniMaxM2ForCausalLM", "minimax_m2", "all", 1.0
    mixture, bias, matrices = "block_sparse_moe", "e_score_correction_bias", ("w1", "w3", "w2")
    router = _ONE_GROUP | {"n_shared_experts": 0, "first_k_dense_replace": 0}
    renamed: ClassVar[dict[str, str]] = {
        "n_routed_experts": "num_local_experts",
        "moe_intermediate_size": "intermediate_size",
        "num_nextn_predict_layers": "num_mtp_modules",
    }
    supported: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu",
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "shared_intermediate_size": 0,
    }
    defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "rope_theta": 5e6,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
    }

    @classmethod
    def from_hf(cls, values: dict[str, Any], aux_layers: tuple[int, ...] | None = None) -> ModelConfig:
        if turned := values.get("rotary_dim"):
            values = values | {"partial_rotary_factor": turned / values.get("head_dim", 128)}
        return super().from_hf(values, aux_layers)


class Ernie45MoeConfig(OneGroupConfig):
    """ERNIE 4.5's mixtures: softmax scores, and RoPE that rotates neighbours."""

    architecture, model_type, neighbours = "Ernie4_5_MoeForCausalLM", "ernie4_5_moe", True
    scores, bias, bias_rows = staticmethod(jax.nn.softmax), "moe_statics.e_score_correction_bias", (1,)
    renamed: ClassVar[dict[str, str]] = {
        "n_routed_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_k",
        "n_shared_experts": "moe_num_shared_experts",
        "first_k_dense_replace": "moe_layer_start_index",
    }
    supported: ClassVar[dict[str, Any]] = {"hidden_act": "silu", "use_bias": False, "moe_layer_interval": 1}
    defaults = Ernie45Config.defaults | {
        "num_key_value_heads": 4,
        "head_dim": None,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1536,
        "first_k_dense_replace": 1,
    }

    @classmethod
    def own(cls, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        last = values.get("num_hidden_layers", 0) - 1
        if (end := values.get("moe_layer_end_index", -1)) not in (-1, last):
            problems.append(f"moe_layer_end_index: got {end}, expected {last}, the last layer")
        return super().own(values, problems)


class Block(dense.Block):
    """One decoder layer, with experts in all but the first ones."""

    def __init__(self, config: Any, layer: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        if layer >= config.first_k_dense_replace:
            self.mlp = deepseek_v3.SparseMLP(config, dtype=dtype, rngs=rngs)


class Glm4Moe(dense.Dense):
    block = Block


def unused(config: GroupedExpertsConfig) -> tuple[str, ...]:
    """Prefixes of MTP layers, of which ERNIE's lie outside its layers."""
    return (*deepseek_v3.unused(config), "model.mtp_")


def table(config: GroupedExpertsConfig) -> dict[str, Entry]:
    """Maps parameter paths to Hugging Face tensors."""
    return llama.by_layer(config, layer_table)


def layer_table(config: Any, layer: int) -> dict[str, Entry]:
    """Maps parameter paths in `Block` to the tensors of one layer."""
    return dense.attention_table(config, layer) | deepseek_v3.mlp_table(config, layer)


CONFIGS = Glm4MoeConfig, MiniMaxM2Config, Ernie45MoeConfig
