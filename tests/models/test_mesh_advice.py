"""Which model axes a start advises against, by operations, links, memory and KV heads."""

import dataclasses
import re

import pytest

from eagle3_jax.models.families.llama import LlamaConfig
from eagle3_jax.models.families.qwen3_moe import Qwen3MoeConfig
from eagle3_jax.models.mesh_advice import better, uneven_heads

GIB = 2**30
LLAMA_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
    tie_word_embeddings=False,
    max_position_embeddings=8192,
    eos_token_ids=(),
    aux_layers=(2, 16, 29),
)
LLAMA_70B = dataclasses.replace(LLAMA_8B, hidden_size=8192, intermediate_size=28672)
V6E, V5P = ("TPU v6 lite", 31 * GIB), ("TPU v5", 95 * GIB)


@pytest.mark.parametrize(
    ("shape", "model", "chip", "weights", "fits", "most"),
    [
        (LLAMA_8B, 8, V6E, 15 * GIB, 1, "2.8"),
        (LLAMA_8B, 4, V6E, 15 * GIB, 1, "2.8"),
        (LLAMA_8B, 8, ("TPU v5 lite", 16 * GIB), 15 * GIB, 2, "6.5"),
        (LLAMA_70B, 16, V5P, 131 * GIB, 4, "11.2"),
        (LLAMA_8B, 8, V6E, 0, 1, "2.8"),  # stored features: no target passes over tokens
    ],
)
def test_a_finer_split_than_links_feed_names_the_one_that_fits(shape, model, chip, weights, fits, most):
    note = better(shape, model, chip[0], weights, chip[1], "train.mesh")
    expected = f"train.mesh.model: got {model}, but links of .* keep up with {most} devices .* fit model: {fits},"
    assert note is not None and re.match(expected, note)


@pytest.mark.parametrize(
    ("shape", "model", "chip", "weights"),
    [
        (LLAMA_8B, 2, V6E, 15 * GIB),
        (LLAMA_8B, 1, V6E, 15 * GIB),
        (LLAMA_70B, 8, V6E, 131 * GIB),  # no smaller one fits
        (LLAMA_70B, 8, V5P, 131 * GIB),  # its links keep up
        (LLAMA_8B, 8, ("cpu", 31 * GIB), 15 * GIB),
        (LLAMA_8B, 8, (V6E[0], 0), 15 * GIB),
    ],
)
def test_no_word_where_links_keep_up_or_nothing_else_fits(shape, model, chip, weights):
    assert better(shape, model, chip[0], weights, chip[1], "mesh") is None


def test_a_mixture_computes_with_its_chosen_experts():
    values = {f.name: getattr(LLAMA_8B, f.name) for f in dataclasses.fields(LLAMA_8B)}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
    shape = Qwen3MoeConfig(**values, expert_layers=(0,), **experts)
    assert "keep up with 1.2 devices at 6144 columns" in str(better(shape, 4, V6E[0], 15 * GIB, V6E[1], "mesh"))


def test_kv_heads_that_do_not_divide_are_named():
    note = uneven_heads(LLAMA_8B, 16)
    assert note is not None and "got 16, which does not divide 8 KV heads" in note and "8 divides them" in note
    assert uneven_heads(LLAMA_8B, 8) is None
