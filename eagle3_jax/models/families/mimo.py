"""MiMo-7B: Qwen 2's layers; the MTP layers in its checkpoint are in `mimo_mtp`."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from eagle3_jax.models.families import qwen2
from eagle3_jax.models.target import TargetModel
from eagle3_jax.models.target_config import ModelConfig


@dataclasses.dataclass(frozen=True)
class MimoConfig(ModelConfig):
    architecture: ClassVar[str] = "MiMoForCausalLM"
    model_type: ClassVar[str] = "mimo"
    supported: ClassVar[dict[str, Any]] = qwen2.Qwen2Config.supported | {"attention_bias": True}
    defaults: ClassVar[dict[str, Any]] = qwen2.Qwen2Config.defaults


class Mimo(TargetModel):
    block = qwen2.Block


MTP = "model.mtp_layers."


def unused(config: MimoConfig) -> tuple[str, ...]:
    return (MTP,)
