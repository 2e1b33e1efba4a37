"""GLM-4.5, 4.6 and 4.7: grouped-query attention that rotates half of each head, and DeepSeek-V3's experts.

The MTP layer of its checkpoints is in `drafts.mtp`. Source: transformers' models/glm4_moe.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from flax import nnx

from eagle3_jax.models.checkpoint.table import Entry
from eagle3_jax.models.families import deepseek_v3, dense, llama
from eagle3_jax.models.families.deepseek_v3 import GroupedExpertsConfig
from eagle3_jax.models.families.dense import DenseConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(GroupedExpertsConfig, DenseConfig):
    """Fields of both; `use_qk_norm`: each head of queries and keys is normed."""

    architecture: ClassVar[str] = "Glm4MoeForCausalLM"
    model_type: ClassVar[str] = "glm4_moe"
    rotary_share: ClassVar[float | None] = 0.5
    supported: ClassVar[dict[str, Any]] = {"hidden_act": "silu"}
    defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
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


class Block(dense.Block):
    """One decoder layer, with experts in all but the first ones."""

    def __init__(self, config: Glm4MoeConfig, layer: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        if layer >= config.first_k_dense_replace:
            self.mlp = deepseek_v3.SparseMLP(config, dtype=dtype, rngs=rngs)


class Glm4Moe(dense.Dense):
    block = Block


def table(config: Glm4MoeConfig) -> dict[str, Entry]:
    """Maps parameter paths to Hugging Face tensors."""
    return llama.by_layer(config, layer_table)


def layer_table(config: Glm4MoeConfig, layer: int) -> dict[str, Entry]:
    """Maps parameter paths in `Block` to the tensors of one layer."""
    return dense.attention_table(config, layer) | deepseek_v3.mlp_table(config, layer)
