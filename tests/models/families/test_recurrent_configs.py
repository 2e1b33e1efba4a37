"""Configs of recurrent targets: what is wrong is named by field, with what was found and what was expected."""

from typing import Any

import pytest
import tiny_families

from eagle3_jax.models.families import FAMILIES, family_of, read_shape

QWEN = next(family for family in FAMILIES if family.config.model_type == "qwen3_5_text")
LFM = next(family for family in FAMILIES if family.config.model_type == "lfm2")
EXPERTS = next(family for family in FAMILIES if family.config.model_type == "qwen3_5_moe_text")


def wrong(family: Any, **changes: Any) -> str:
    with pytest.raises(ValueError, match="unsupported target config") as error:
        tiny_families.config_of(family, **changes)
    return str(error.value)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (QWEN, {"layer_types": ["linear_attention", "sliding_attention"]}, "layer_types: got ['linear_attention', 's"),
        (
            QWEN,
            {"layer_types": ["linear_attention"] * 4},
            "or 'full_attention' for each of 4 layers",
        ),
        (QWEN, {"linear_num_value_heads": 3}, "linear_num_value_heads: got 3, expected a multiple of the 2 key heads"),
        (QWEN, {"linear_key_head_dim": 0}, "linear_key_head_dim: got 0, expected a positive whole number"),
        (QWEN, {"partial_rotary_factor": 1.5}, "partial_rotary_factor: got [1.5], expected one value in (0, 1]"),
        (
            QWEN,
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
            "got [0.25, 0.5]",
        ),
        (QWEN, {"attention_bias": True}, "attention_bias: got True, expected False"),
        (EXPERTS, {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size: missing"),
        (LFM, {"conv_bias": True}, "conv_bias: got True, expected False"),
        (LFM, {"conv_L_cache": 1}, "conv_L_cache: got 1, expected at least 2"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_a_wrong_field_is_named(family, changes, message):
    assert message in wrong(family, **changes)


def test_every_problem_is_told_at_once():
    told = wrong(QWEN, linear_conv_kernel_dim="4", hidden_act="gelu", layer_types=[])
    assert "linear_conv_kernel_dim: got '4'" in told and "hidden_act: got 'gelu', expected 'silu'" in told


@pytest.mark.parametrize("family", [QWEN, EXPERTS, LFM], ids=lambda family: family.config.model_type)
def test_a_config_is_written_as_it_is_read(family):
    config = tiny_families.config_of(family)
    assert read_shape(config.to_hf(), config.aux_layers) == config and family_of(config) == family
