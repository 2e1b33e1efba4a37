"""The families of targets: a modelling file and a table of weights for each architecture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from eagle3_jax.models.checkpoint.table import Entry
from eagle3_jax.models.families import (
    deepseek_v3,
    deepseek_v32,
    dense,
    dense_configs,
    gemma3,
    gemma4,
    glm4_moe,
    gpt_oss,
    lfm2,
    llama,
    llama4,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
)
from eagle3_jax.models.families.vision import TEXT_OF, architecture, text_values
from eagle3_jax.models.target import TargetModel
from eagle3_jax.models.target_config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Family:
    """An architecture: its config, model and table of weights, and the prefixes of tensors that are not read."""

    config: type[ModelConfig]
    model: type[TargetModel]
    table: Callable[[Any], dict[str, Entry]]
    unused: Callable[[Any], tuple[str, ...]] = lambda config: ()


FAMILIES = (
    Family(llama.LlamaConfig, llama.Llama, llama.table),
    Family(qwen2.Qwen2Config, qwen2.Qwen2, qwen2.table),
    Family(qwen3.Qwen3Config, qwen3.Qwen3, qwen3.table),
    Family(qwen3_moe.Qwen3MoeConfig, qwen3_moe.Qwen3Moe, qwen3_moe.table),
    Family(gemma3.Gemma3Config, gemma3.Gemma3, gemma3.table),
    Family(gemma4.Gemma4Config, gemma4.Gemma4, gemma4.table, gemma4.unused),
    Family(gpt_oss.GptOssConfig, gpt_oss.GptOss, gpt_oss.table),
    Family(llama4.Llama4Config, llama4.Llama4, llama4.table),
    Family(deepseek_v3.DeepseekV3Config, deepseek_v3.DeepseekV3, deepseek_v3.table, deepseek_v3.unused),
    Family(deepseek_v32.DeepseekV32Config, deepseek_v32.DeepseekV32, deepseek_v32.table, deepseek_v32.unused),
    Family(deepseek_v32.GlmMoeDsaConfig, deepseek_v32.DeepseekV32, deepseek_v32.table, deepseek_v32.unused),
    Family(lfm2.Lfm2Config, lfm2.Lfm2, lfm2.table),
    Family(lfm2.Lfm2MoeConfig, lfm2.Lfm2, lfm2.table),
    Family(qwen3_5.Qwen35Config, qwen3_5.Qwen35, qwen3_5.table, qwen3_5.unused),
    Family(qwen3_5.Qwen35MoeConfig, qwen3_5.Qwen35, qwen3_5.table, qwen3_5.unused),
    Family(qwen3_5.Qwen3NextConfig, qwen3_5.Qwen35, qwen3_5.table, qwen3_5.unused),
    Family(qwen2.MimoConfig, qwen2.Qwen2, qwen2.table, qwen2.unused),
    *(Family(config, glm4_moe.Glm4Moe, glm4_moe.table, glm4_moe.unused) for config in glm4_moe.CONFIGS),
    *(Family(config, dense.Dense, dense.table) for config in dense_configs.CONFIGS),
)


def read_shape(values: dict[str, Any], aux_layers: tuple[int, ...] | None = None) -> ModelConfig:
    """Reads the shape from a config.json, or that of its text model. Raises ValueError with every problem."""
    values = text_values(values)
    known = {family.config.architecture: family for family in FAMILIES}
    family = known.get(architecture(values) or "")
    if family is None:
        expected = sorted([*known, *TEXT_OF])
        raise ValueError(f"architectures: got {values.get('architectures')!r}, expected one of {expected}")
    return family.config.from_hf(values, aux_layers)


def family_of(config: ModelConfig) -> Family:
    return next(family for family in FAMILIES if family.config is type(config))
