"""Shapes of draft heads: what a config leaves open is the target's, where that makes a head."""

import dataclasses

import pytest
import tiny
import tiny_families

from eagle3_jax.config import DraftConfig
from eagle3_jax.models.drafts.eagle3 import DraftHeadConfig
from eagle3_jax.models.families import read_shape
from eagle3_jax.models.families.deepseek_v3 import DeepseekV3Config
from eagle3_jax.models.target_config import ModelConfig


def deepseek() -> ModelConfig:
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    own = tiny_families.OWN[DeepseekV3Config.architecture] | {"num_attention_heads": 4}
    return read_shape(sizes | own | {"architectures": [DeepseekV3Config.architecture]}, (1, 2, 3))


def test_sizes_are_the_targets() -> None:
    target = tiny.llama_config()
    head = DraftHeadConfig.for_target(DraftConfig(vocab_size=16), target)
    assert (head.num_attention_heads, head.head_dim) == (target.num_attention_heads, target.head_dim)


def test_a_latent_cache_gives_a_head_no_sizes() -> None:
    with pytest.raises(
        ValueError, match=r"draft.num_attention_heads, draft.num_key_value_heads, draft.head_dim: got none"
    ):
        DraftHeadConfig.for_target(DraftConfig(vocab_size=40), deepseek())
    with pytest.raises(
        ValueError, match=r"^draft.head_dim: got none, expected sizes for the head: DeepseekV3ForCausalLM"
    ):
        DraftHeadConfig.for_target(DraftConfig(vocab_size=40, num_attention_heads=4, num_key_value_heads=2), deepseek())
    draft = DraftConfig(vocab_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    without = dataclasses.replace(deepseek(), intermediate_size=0)  # as where all layers have experts
    with pytest.raises(ValueError, match=r"^draft.intermediate_size: got none, expected sizes for the head"):
        DraftHeadConfig.for_target(draft, without)
    head = DraftHeadConfig.for_target(draft, deepseek())
    assert (head.num_attention_heads, head.num_key_value_heads, head.head_dim) == (4, 2, 8)
