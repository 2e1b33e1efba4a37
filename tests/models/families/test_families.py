"""Every family equals transformers (PyTorch) on random shapes; its weights come apart and together again."""

import dataclasses
import json
import math
import pathlib
import random
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig

from eagle3_jax.config import MeshConfig
from eagle3_jax.kernels.linear.layouts import dense
from eagle3_jax.kernels.tree_attention.chosen import best_slots
from eagle3_jax.mesh import make_mesh, parameter_path, shardings
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.checkpoint import fetch
from eagle3_jax.models.checkpoint.load import load_model
from eagle3_jax.models.drafts.mtp import DeepseekMtp
from eagle3_jax.models.families import FAMILIES, dense_configs, family_of, glm4_moe, read_shape
from eagle3_jax.models.layers import SHARDING_RULES
from eagle3_jax.models.quantisation import is_quantised
from eagle3_jax.models.states import target_states
from eagle3_jax.models.target import TargetModel
from eagle3_jax.sequence import Split

TOKENS = 24
VOCABULARY = 96
ARCHITECTURES = [family.config.architecture for family in FAMILIES]
# Of eight random shapes of a family, one every day; none where other families have every fact of its own.
DAILY: dict[str, int | None] = {"DeepseekV3ForCausalLM": 4, "Gemma4ForCausalLM": 1}
DAILY |= dict.fromkeys(("MistralForCausalLM", "SmolLM3ForCausalLM", "Olmo2ForCausalLM", "GraniteForCausalLM"))
DAILY |= {"SeedOssForCausalLM": None}
SHAPES = [
    pytest.param(name, seed, marks=() if seed == DAILY.get(name, 0) else pytest.mark.long, id=f"{name}-{seed}")
    for name in ARCHITECTURES
    for seed in range(8)
]
DENSE = {config.architecture for config in (*dense_configs.CONFIGS, *glm4_moe.CONFIGS)}
# Whose attention is Llama's, with biases or norms of heads at most: what of it no cache and no tree can upset.
AS_LLAMA = {"Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "MiMoForCausalLM"}
# Whose attention is that of the family without experts, or Qwen 3.5's.
AS_ANOTHER = {"Lfm2MoeForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"}

# What they have that Llama has not is summed, scaled and routed in its own ways.
BFLOAT16_DAILY = {"DeepseekV3ForCausalLM"}

INDEXED = {"DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"}
LATENT = {"DeepseekV3ForCausalLM", *INDEXED}

# Families that transformers has no class for, and whose layers they share.
SAME_AS = {"MiMoForCausalLM": "Qwen2ForCausalLM"}

forward = jax.jit(lambda model, *arguments: model(*arguments))


def is_delta(architecture: str) -> bool:
    return architecture.startswith(("Qwen3_5", "Qwen3Next"))


def shapes(architecture: str, seed: int) -> dict[str, Any]:
    """A random small config.json, as transformers takes it."""
    draw = random.Random(f"{architecture}/{seed}")
    kv_heads, group = draw.choice([1, 2, 3]), draw.choice([1, 2, 4])
    heads, head_dim = kv_heads * group, draw.choice([4, 8, 16])
    width = heads * draw.choice([4, 8])
    values: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": width if SAME_AS.get(architecture, architecture) != "Qwen2ForCausalLM" else heads * head_dim,
        "intermediate_size": draw.choice([24, 40, 56]),
        "num_hidden_layers": draw.choice([3, 4]),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": draw.choice([1e-6, 1e-5]),
        "rope_theta": draw.choice([1e4, 5e5, 1e6]),
        "tie_word_embeddings": draw.random() < 0.5,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "pad_token_id": None,
    }
    if SAME_AS.get(architecture, architecture) != "Qwen2ForCausalLM":
        values["head_dim"] = head_dim
    if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM") and seed % 2 == 0:
        window, first = draw.choice([3, 6, 11]), draw.choice([0, 1, 2])
        values |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": first}
    if architecture == "Qwen3MoeForCausalLM":
        count = draw.choice([4, 6, 8])
        values |= {"num_experts": count, "num_experts_per_tok": draw.choice([1, 2, count]), "moe_intermediate_size": 20}
        values |= {"norm_topk_prob": draw.random() < 0.5, "decoder_sparse_step": draw.choice([1, 2])}
        values |= {"mlp_only_layers": draw.choice([[], [0], [1]])}
    if architecture == "Gemma3ForCausalLM":
        kinds = [draw.choice(["sliding_attention", "full_attention"]) for _ in range(values["num_hidden_layers"])]
        values |= {"layer_types": kinds, "sliding_window": draw.choice([3, 6, 11]), "head_dim": width // heads * 2}
        values |= {"query_pre_attn_scalar": draw.choice([8, 24, 256])}
        theta = values.pop("rope_theta")
        full = draw.choice([{"rope_type": "default"}, {"rope_type": "linear", "factor": 8.0}])
        local = {"rope_type": "default", "rope_theta": draw.choice([1e4, 5e3])}
        values["rope_parameters"] = {"full_attention": full | {"rope_theta": theta}, "sliding_attention": local}
    if architecture == "Gemma4ForCausalLM":
        layers, shared = values["num_hidden_layers"], draw.choice([0, 1, 2])
        kinds = ["sliding_attention", "full_attention"] * 2
        values |= {"layer_types": kinds[4 - layers :], "num_kv_shared_layers": shared and layers - 2}
        values |= {"sliding_window": draw.choice([3, 6, 11]), "head_dim": head_dim, "global_head_dim": 2 * head_dim}
        values |= {"attention_k_eq_v": draw.random() < 0.5, "num_global_key_value_heads": draw.choice([None, 1])}
        values |= {"use_double_wide_mlp": draw.random() < 0.5, "final_logit_softcapping": draw.choice([None, 1.5])}
        values |= {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": draw.choice([0, 4, 8])}
        count = draw.choice([4, 6, 8])
        values |= {"enable_moe_block": draw.random() < 0.5, "num_experts": count, "moe_intermediate_size": 20}
        values |= {"top_k_experts": draw.choice([1, 2, count])}
        full = {"rope_type": "proportional", "partial_rotary_factor": draw.choice([0.25, 0.5])}
        full |= {"factor": draw.choice([1.0, 8.0]), "rope_theta": values.pop("rope_theta")}
        local = {"rope_type": "default", "rope_theta": draw.choice([1e4, 5e3])}
        values["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    if architecture == "Llama4ForCausalLM":
        layers, count = values["num_hidden_layers"], draw.choice([4, 6, 8])
        values |= {
            "num_local_experts": count,
            "num_experts_per_tok": draw.choice([1, 1, 2]),
            "intermediate_size_mlp": 36,
        }
        values |= {"interleave_moe_layer_step": draw.choice([1, 1, 2]), "use_qk_norm": draw.random() < 0.7}
        values |= {"no_rope_layers": [draw.choice([0, 1]) for _ in range(layers)]}
        values |= {"attention_chunk_size": draw.choice([5, 8, 11])}
        values |= {"attn_temperature_tuning": draw.random() < 0.7, "floor_scale": draw.choice([3, 8])}
        factors = draw.choice([(1.0, 1.0), (1.0, 4.0)])
        scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": factors[0], "high_freq_factor": factors[1]}
        rope = draw.choice([{"rope_type": "default"}, scaled | {"original_max_position_embeddings": 16}])
        values["rope_parameters"] = rope | {"rope_theta": values.pop("rope_theta")}
    if architecture == "GptOssForCausalLM":
        kinds = [draw.choice(["sliding_attention", "full_attention"]) for _ in range(values["num_hidden_layers"])]
        values |= {"layer_types": kinds, "sliding_window": draw.choice([3, 6, 11])}
        count = draw.choice([4, 6, 8])
        values |= {"num_local_experts": count, "num_experts_per_tok": draw.choice([1, 2, count])}
        values |= {"swiglu_limit": draw.choice([0.2, 7.0])}
        yarn = {"rope_type": "yarn", "factor": draw.choice([2.0, 32.0]), "beta_fast": 32.0, "beta_slow": 1.0}
        yarn |= {"truncate": draw.random() < 0.5, "original_max_position_embeddings": draw.choice([16, 4096])}
        values["rope_parameters"] = yarn | {"rope_theta": values.pop("rope_theta")}
    if architecture.startswith("Lfm2"):
        layers = values["num_hidden_layers"]
        kinds = ["full_attention", *(draw.choice(["conv", "conv", "full_attention"]) for _ in range(layers - 1))]
        draw.shuffle(kinds)
        values |= {"layer_types": kinds, "conv_L_cache": draw.choice([2, 3, 4]), "norm_eps": values.pop("rms_norm_eps")}
        count = draw.choice([4, 6, 8])
        values |= (
            {"block_auto_adjust_ff_dim": draw.random() < 0.5, "block_multiple_of": 8}
            if architecture == "Lfm2ForCausalLM"
            else {"num_dense_layers": draw.choice([0, 1, 2]), "num_experts": count, "moe_intermediate_size": 20}
            | {"num_experts_per_tok": draw.choice([1, 2, count]), "norm_topk_prob": draw.random() < 0.5}
            | {"routed_scaling_factor": draw.choice([1.0, 2.5])}
        )
    if is_delta(architecture):
        layers = values["num_hidden_layers"]
        kinds = [
            "full_attention",
            *(draw.choice(["linear_attention"] * 2 + ["full_attention"]) for _ in range(layers - 1)),
        ]
        draw.shuffle(kinds)
        key_heads, group = draw.choice([1, 2, 3]), draw.choice([1, 2])
        values |= {"layer_types": kinds, "linear_num_key_heads": key_heads, "linear_num_value_heads": key_heads * group}
        values |= {"linear_key_head_dim": draw.choice([4, 8]), "linear_value_head_dim": draw.choice([4, 12])}
        values |= {"linear_conv_kernel_dim": draw.choice([2, 3, 4]), "head_dim": draw.choice([8, 16])}
        values |= {"initializer_range": 0.1}  # keys of unit length multiply the rounding of smaller sums
        rope = {"rope_type": "default", "partial_rotary_factor": draw.choice([0.25, 0.5, 1.0])}
        values["rope_parameters"] = rope | {"rope_theta": values.pop("rope_theta")}
        if architecture != "Qwen3_5ForCausalLM":
            count = draw.choice([4, 6, 8])
            values |= {"num_experts": count, "num_experts_per_tok": draw.choice([1, 2, count])}
            values |= {"moe_intermediate_size": 20, "shared_expert_intermediate_size": draw.choice([12, 20])}
        if architecture == "Qwen3NextForCausalLM":
            values |= {"norm_topk_prob": draw.random() < 0.5, "mlp_only_layers": draw.choice([[], [0], [1]])}
    if architecture in DENSE:
        values |= of_dense(architecture, draw, values)
    if architecture in LATENT:
        groups, size = draw.choice([1, 2, 3, 4]), draw.choice([2, 3, 4])
        best = draw.randint(1, groups)
        values |= {"num_key_value_heads": heads, "q_lora_rank": draw.choice([None, 12])}
        del values["head_dim"]
        values |= {"kv_lora_rank": draw.choice([8, 12, 24]), "v_head_dim": draw.choice([4, 12])}
        values |= {"qk_nope_head_dim": draw.choice([4, 8]), "qk_rope_head_dim": draw.choice([4, 8])}
        values |= {"n_routed_experts": groups * size, "n_group": groups, "topk_group": best}
        values |= {"num_experts_per_tok": draw.randint(2, best * size), "n_shared_experts": draw.choice([1, 2])}
        values |= {"moe_intermediate_size": 20, "norm_topk_prob": draw.random() < 0.5}
        values |= {"routed_scaling_factor": draw.choice([1.0, 2.5]), "rope_interleave": draw.random() < 0.7}
        values |= {"first_k_dense_replace": draw.choice([0, 1, 2]), "num_nextn_predict_layers": 0}
        yarn = {"rope_type": "yarn", "factor": draw.choice([2.0, 40.0]), "beta_fast": 32.0, "beta_slow": 1.0}
        yarn |= draw.choice([{}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.7, "mscale_all_dim": 1.3}])
        yarn |= {"original_max_position_embeddings": draw.choice([16, 4096])}
        rope = draw.choice([{"rope_type": "default"}, yarn, yarn])
        values["rope_parameters"] = rope | {"rope_theta": values.pop("rope_theta")}
    if architecture in INDEXED:
        values |= {"q_lora_rank": 12, "rope_interleave": True, "index_topk": draw.choice([3, 5, 8])}
        # Many heads: a score of zero, of all of them, would be as good as another.
        values |= {"index_n_heads": draw.choice([12, 16]), "index_head_dim": draw.choice([8, 12])}
        if architecture == "GlmMoeDsaForCausalLM":
            others = [draw.choice(["full", "shared"]) for _ in range(values["num_hidden_layers"] - 1)]
            values |= {"indexer_types": ["full", *others]}
    return values


def of_dense(architecture: str, draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    """What a dense family adds; windows and original lengths are shorter than the texts of tests, or as long."""
    layers, dim = values["num_hidden_layers"], values["head_dim"]
    theta = {"rope_theta": values["rope_theta"]}
    window = draw.choice([None, 3, 6, 11])
    mixed = {"sliding_window": draw.choice([3, 6, 11])}
    mixed |= {"layer_types": [draw.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]}
    yarn = {"rope_type": "yarn", "factor": draw.choice([2.0, 16.0]), "original_max_position_embeddings": 8}
    match architecture:
        case "MistralForCausalLM":
            return {"sliding_window": window}
        case "Ministral3ForCausalLM":
            yarn |= draw.choice([{}, {"mscale": 1.0, "mscale_all_dim": 1.0}]) | theta
            return {"sliding_window": window, "rope_parameters": yarn | {"llama_4_scaling_beta": 0.1}}
        case "Phi3ForCausalLM":
            share = draw.choice([0.5, 0.75, 1.0]) if dim > 4 else 1.0
            # The length decides: longer than the original one here, or equal.
            original = draw.choice([8, values["max_position_embeddings"]])
            lists = [[1 + draw.random() for _ in range(int(dim * share) // 2)] for _ in range(2)]
            long = {"rope_type": "longrope", "short_factor": lists[0], "long_factor": lists[1]}
            rope = draw.choice([{"rope_type": "default"}, long, long | {"original_max_position_embeddings": original}])
            rope = rope | theta | {"partial_rotary_factor": share}
            # Its class takes no `head_dim`, and looks at the width of a head without it.
            wide = {"head_dim": dim, "hidden_size": values["num_attention_heads"] * dim, "initializer_range": 0.1}
            own = {"original_max_position_embeddings": original, "sliding_window": window, "rope_parameters": rope}
            return own | wide
        case "SmolLM3ForCausalLM":
            return {"no_rope_layers": [draw.choice([0, 1]) for _ in range(layers)]}
        case "Olmo3ForCausalLM":
            full = draw.choice([{"rope_type": "default"}, yarn | {"attention_factor": 1.2}]) | theta
            local = {"rope_type": "default"} | theta
            return mixed | {"rope_parameters": {"full_attention": full, "sliding_attention": local}}
        case "GraniteForCausalLM" | "GraniteMoeHybridForCausalLM":
            sizes = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4}
            hybrid = {"shared_intermediate_size": values["intermediate_size"], "num_local_experts": 0}
            hybrid |= {
                "layer_types": ["full_attention"] * layers,
                "position_embedding_type": draw.choice(["rope", None]),
            }
            hybrid |= {"mamba_n_heads": 2 * values["hidden_size"]}
            return sizes | {"logits_scaling": 10.0} | (hybrid if "Hybrid" in architecture else {})
        case "Glm4MoeForCausalLM":
            groups, size = draw.choice([1, 2, 4]), draw.choice([2, 3])
            own = {"n_routed_experts": groups * size, "n_group": groups, "topk_group": draw.randint(1, groups)}
            own |= {"num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_shared_experts": draw.choice([1, 2])}
            own |= {"first_k_dense_replace": draw.choice([0, 1]), "num_nextn_predict_layers": 0}
            own |= {"use_qk_norm": draw.random() < 0.5, "attention_bias": draw.random() < 0.5}
            rope = {"rope_type": "default", "partial_rotary_factor": draw.choice([0.5, 1.0])}
            return own | {"routed_scaling_factor": 2.5, "rope_parameters": rope | theta}
        case "MiniMaxM2ForCausalLM":
            rope = {"rope_type": "default", "partial_rotary_factor": draw.choice([0.5, 1.0])}
            experts = {"num_local_experts": 6, "num_experts_per_tok": draw.choice([1, 2])}
            return experts | {"rope_parameters": rope | theta}
        case "Ernie4_5_MoeForCausalLM":
            own = {"moe_num_experts": 6, "moe_k": draw.choice([1, 2]), "moe_intermediate_size": 20}
            own |= {"moe_num_shared_experts": draw.choice([0, 1, 2]), "moe_layer_start_index": draw.choice([0, 1])}
            return own
        case "MixtralForCausalLM":
            return {"num_local_experts": 6, "num_experts_per_tok": draw.choice([1, 2]), "sliding_window": window}
        case "SeedOssForCausalLM":
            return {"attention_bias": draw.random() < 0.7}
        case "Exaone4ForCausalLM":
            return draw.choice([mixed, mixed, {"sliding_window": None, "layer_types": ["full_attention"] * layers}])
        case "HunYuanDenseV1ForCausalLM":
            alpha = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0}
            return {"rope_parameters": draw.choice([{"rope_type": "default"}, alpha, alpha]) | theta}
    return {}


def make_reference(architecture: str, values: dict[str, Any], seed: int) -> Any:
    """A model of transformers with random weights, norms and biases among them."""
    torch = pytest.importorskip("torch")
    import transformers

    torch.manual_seed(seed)
    model_class = getattr(transformers, SAME_AS.get(architecture, architecture))
    model = model_class(model_class.config_class(**values)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("_bias"):  # ones, zeros: a mistake in them would not show
                around = 0 if is_delta(architecture) and "linear_attn" not in name else 1  # what adds one to itself
                parameter.copy_(around + 0.3 * torch.randn_like(parameter))
            if name.endswith(
                ("mlp.gate.weight", "mlp.router.weight", "feed_forward.gate.weight", "router.proj.weight")
            ):  # routers of zeros by default
                parameter.copy_(0.5 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
                buffer.copy_(name.endswith("layer_scalar") + 0.3 * torch.randn_like(buffer))
    return model


def write_reference(folder: pathlib.Path, architecture: str, seed: int) -> Any:
    """`make_reference` of a random shape, written to `folder`."""
    model = make_reference(architecture, shapes(architecture, seed), seed)
    model.save_pretrained(folder)
    if architecture in SAME_AS:
        as_its_own(folder, architecture)
    return model


def as_its_own(folder: pathlib.Path, architecture: str) -> None:
    """The files as the family's own, with tensors beside that are not read."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    own = {"architectures": [architecture], "attention_bias": True, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config | own))
    save_file(
        tensors | {"model.mtp_layers.0.input_proj.weight": np.zeros((4, 8), np.float32)}, folder / "model.safetensors"
    )


def cached(model: TargetModel, tokens: jax.Array, sizes: list[int]) -> tuple[jax.Array, jax.Array]:
    """Logits and aux states, the tokens split into calls of these sizes."""
    cache, found, start = model.empty_cache(len(tokens), TOKENS), [], 0
    for size in sizes:
        positions = jnp.broadcast_to(start + jnp.arange(size), (len(tokens), size))
        lengths = jnp.full(len(tokens), start, jnp.int32)
        this = Pass(positions, lengths, counts=jnp.full(len(tokens), size))
        hidden, aux, cache = forward(model, tokens[:, start : start + size], this, cache)
        found.append((model.logits(hidden), aux))
        start += size
    logits, aux = (jnp.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
    return logits, aux


def long_for(*names: str) -> list[Any]:
    """Every architecture, these only in `tools/test.sh long`."""
    return [pytest.param(name, marks=pytest.mark.long if name in names else ()) for name in ARCHITECTURES]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "seed"), SHAPES)
def test_it_equals_transformers(tmp_path, architecture, seed):
    """Logits and aux states at every boundary but the last, of which transformers says the final norm."""
    reference = write_reference(tmp_path, architecture, seed)
    import torch

    layers = reference.config.num_hidden_layers
    config = fetch.read_config(tmp_path, tuple(range(layers)))
    model = load_model(tmp_path, config, jnp.float32)
    assert type(model) is family_of(config).model
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, (2, TOKENS))
    with torch.no_grad():
        expected = reference(torch.tensor(tokens), output_hidden_states=True)
    expected_aux = np.concatenate([expected.hidden_states[b].numpy() for b in range(layers)], axis=-1)
    for sizes in ([TOKENS], [11, 1, 1, 11]):  # prefill, decode, and stretches of a prompt
        logits, aux = cached(model, jnp.asarray(tokens), sizes)
        np.testing.assert_allclose(aux, expected_aux, atol=1e-4, rtol=1e-4)
        np.testing.assert_allclose(logits, expected.logits.numpy(), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_experts_that_a_checkpoint_keeps_in_one_tensor(tmp_path):
    """Qwen 3.5's on the hub: gate and up of all experts behind one another."""
    write_reference(tmp_path, "Qwen3_5MoeForCausalLM", 0)
    config: Any = fetch.read_config(tmp_path, (0, 1))
    expected = load_model(tmp_path, config, jnp.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(config.num_hidden_layers):
        source = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([tensors.pop(f"{source}.{j}.{name}_proj.weight") for j in range(config.num_experts)])
            for name in ("gate", "up", "down")
        )
        fused = {f"{source}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{source}.down_proj": down}
        tensors |= fused
    save_file(tensors, tmp_path / "model.safetensors")
    mesh = make_mesh(MeshConfig(data=1, model=2), jax.devices()[:2])
    for got in (load_model(tmp_path, config, jnp.float32), load_model(tmp_path, config, jnp.float32, mesh)):
        jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    long_for("LlamaForCausalLM", *AS_LLAMA, *DENSE, *AS_ANOTHER),
)
def test_documents_of_a_packed_row_do_not_see_each_other(tmp_path, architecture):
    """Windows, chunks and latent attention included: each document's states are those of its own row."""
    write_reference(tmp_path, architecture, 0)
    model = load_model(tmp_path, fetch.read_config(tmp_path, (0, 1)), jnp.float32)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, (1, 2 * TOKENS)))
    first = TOKENS + 5  # behind a window and a chunk
    starts = jnp.where(jnp.arange(2 * TOKENS) < first, 0, first)[None]
    positions = jnp.arange(2 * TOKENS)[None] - starts
    lengths = jnp.zeros(1, jnp.int32)
    this = Pass(positions, lengths, starts=starts, counts=jnp.full(1, 2 * TOKENS))
    packed = model(tokens, this, model.empty_cache(1, 2 * TOKENS))
    for document in (slice(0, first), slice(first, None)):
        own, at = tokens[:, document], positions[:, document]
        alone = model(own, Pass(at, lengths, counts=jnp.full(1, own.shape[1])), model.empty_cache(1, own.shape[1]))
        for got, expected in zip(packed[:2], alone[:2], strict=True):
            within = 1e-4 if is_delta(architecture) else 1e-5
            np.testing.assert_allclose(got[:, document], expected, atol=within, rtol=within)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "seed"),
    [("Lfm2ForCausalLM", 0), ("Qwen3_5ForCausalLM", 0), ("Gemma4ForCausalLM", 1), ("GlmMoeDsaForCausalLM", 0)],
)
def test_a_state_reaches_from_piece_to_piece(tmp_path, architecture, seed):
    """Rows split along their length over two devices, a document across the cut and one behind it; shared keys too, and
    what an indexer chooses.
    """
    write_reference(tmp_path, architecture, seed)
    model = load_model(tmp_path, fetch.read_config(tmp_path, (0, 1)), jnp.float32)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, (2, 16)), jnp.int32)
    segments = jnp.asarray([[1] * 5 + [2] * 5 + [3] * 6, [1] * 16], jnp.int32)
    expected = target_states(model, tokens, segments)
    mesh = make_mesh(MeshConfig(data=2, model=1), jax.devices()[:2])
    split = Split.of(mesh, 2)
    with jax.set_mesh(mesh):
        placed = jax.device_put(model, shardings(model, mesh, SHARDING_RULES))
        got = jax.jit(lambda model: target_states(model, split.cut(tokens), split.cut(segments), split))(placed)
        whole = jax.jit(lambda x: jax.tree.map(split.joined, x))(got)
    for mine, other in zip(whole[:2], expected[:2], strict=True):
        np.testing.assert_allclose(mine.astype(jnp.float32), other.astype(jnp.float32), atol=2e-2, rtol=2e-2)
    np.testing.assert_array_equal(whole[2], expected[2])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", long_for(*(set(ARCHITECTURES) - BFLOAT16_DAILY)))
def test_in_bfloat16_it_is_as_near_to_float32_as_transformers(tmp_path, architecture):
    """The median token's error, since another expert for one token says nothing."""
    reference = write_reference(tmp_path, architecture, 0)
    import torch

    reference.config._experts_implementation = "eager"  # torch's grouped products want wider rows
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (4, TOKENS))
    with torch.no_grad():
        theirs = reference.to(torch.bfloat16)(torch.tensor(tokens)).logits.float().numpy()
        exact = reference.float()(torch.tensor(tokens)).logits.numpy()  # of the weights as bfloat16 has them
    model = load_model(tmp_path, fetch.read_config(tmp_path, (1,)), jnp.bfloat16)

    def error(logits: np.ndarray) -> Any:
        return np.median(np.linalg.norm(logits - exact, axis=-1) / np.linalg.norm(exact, axis=-1))

    for sizes in ([TOKENS], [11, 1, 1, 11]):
        logits, aux = cached(model, jnp.asarray(tokens), sizes)
        assert aux.dtype == jnp.bfloat16
        assert error(np.asarray(logits)) < 1.3 * error(theirs)


@pytest.mark.long
@pytest.mark.parametrize("architecture", long_for(*AS_LLAMA))
def test_greedy_tokens_are_those_of_generate(tmp_path, architecture):
    """Token by token from the cache, beyond windows and chunks, which transformers keeps caches of their own for."""
    reference = write_reference(tmp_path, architecture, seed=2)
    import torch

    model = load_model(tmp_path, fetch.read_config(tmp_path, (0, 1)), jnp.float32)
    prompts = np.random.default_rng(2).integers(0, VOCABULARY, (2, 9))
    reference.generation_config.eos_token_id = None
    with torch.no_grad():
        asked = torch.tensor(prompts)
        new, whole = TOKENS - prompts.shape[1], torch.ones_like(asked)
        expected = reference.generate(asked, attention_mask=whole, do_sample=False, max_new_tokens=new, pad_token_id=0)
    cache, tokens, read = model.empty_cache(2, TOKENS), jnp.asarray(prompts), 0
    while tokens.shape[1] < TOKENS:
        positions = jnp.broadcast_to(jnp.arange(read, tokens.shape[1]), (2, tokens.shape[1] - read))
        hidden, _, cache = forward(
            model,
            tokens[:, read:],
            Pass(positions, jnp.full(2, read, jnp.int32), counts=jnp.full(2, positions.shape[1])),
            cache,
        )
        read, best = tokens.shape[1], jnp.argmax(model.logits(hidden[:, -1:]), axis=-1)
        tokens = jnp.concatenate([tokens, best.astype(tokens.dtype)], axis=1)
    np.testing.assert_array_equal(tokens, expected)


@pytest.mark.slow
def test_embeddings_of_layers_stay_as_they_are_stored(tmp_path):
    """In the checkpoint's dtype, or in 8 bits; the numbers are the same, whatever the model computes in."""
    reference = make_reference("Gemma4ForCausalLM", shapes("Gemma4ForCausalLM", 1), 1)
    import torch

    reference.to(torch.bfloat16).save_pretrained(tmp_path)
    config = fetch.read_config(tmp_path, (0, 1))
    model: Any = load_model(tmp_path, config, jnp.float32)
    assert (model.embed.dtype, model.embed_per_layer.dtype) == (jnp.float32, jnp.bfloat16)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, TOKENS))
    with torch.no_grad():
        whole = type(reference).from_pretrained(tmp_path, dtype=torch.float32)
        expected = whole(torch.tensor(tokens)).logits.numpy()
    logits, _ = cached(model, jnp.asarray(tokens), [TOKENS])
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=1e-4)
    small: Any = load_model(tmp_path, config, jnp.float32, weights="int8", quantise_vocabulary=True)
    assert is_quantised(small.embed_per_layer[...])
    near, _ = cached(small, jnp.asarray(tokens), [TOKENS])
    assert np.median(np.abs(near - expected)) < 0.1 * np.abs(expected).mean()


@pytest.mark.slow
def test_experts_in_mxfp4(tmp_path):
    """gpt-oss as it is published: what transformers unpacks of the same bytes says the same logits."""
    values = shapes("GptOssForCausalLM", 0) | {"hidden_size": 64, "intermediate_size": 32}
    reference = make_reference("GptOssForCausalLM", values, 0)
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = {name: tensor.numpy() for name, tensor in reference.state_dict().items()}
    rng = np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, rows, columns = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (experts, columns, rows // 32, 16), np.uint8)
        scales = rng.integers(120, 126, blocks.shape[:3], np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        unpacked = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
        reference.get_parameter(name).data.copy_(unpacked)
    save_file(tensors, tmp_path / "model.safetensors")
    quantised = {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(reference.config.to_dict() | quantised))
    config = fetch.read_config(tmp_path, (0, 1))
    assert read_shape(config.to_hf(), config.aux_layers) == config
    tokens = rng.integers(0, VOCABULARY, (2, TOKENS))
    with torch.no_grad():
        expected = reference(torch.tensor(tokens)).logits.numpy()
    model = load_model(tmp_path, config, jnp.float32)
    logits, _ = cached(model, jnp.asarray(tokens), [TOKENS])
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=1e-4)
    kept = load_model(tmp_path, config, jnp.float32, weights="stored")
    assert kept.blocks[0].mlp.expert_down[...].values.dtype == jnp.float4_e2m1fn
    assert_equal(kept, model)


def assert_equal(kept: Any, expected: Any) -> None:
    """Multiplied out, the stored numbers are those that were read as floats."""
    out = jax.tree.map(dense, kept, is_leaf=is_quantised)
    jax.tree.map(np.testing.assert_array_equal, out, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", ["DeepseekV3ForCausalLM", pytest.param("DeepseekV32ForCausalLM", marks=pytest.mark.long)]
)
def test_weights_in_fp8(tmp_path, architecture):
    """DeepSeek-V3 as it is published: what the factors make of the same bytes says the same logits."""
    values = shapes(architecture, 0) | {"hidden_size": 136, "intermediate_size": 264}
    values |= {"q_lora_rank": 130, "kv_lora_rank": 132, "moe_intermediate_size": 140, "first_k_dense_replace": 1}
    reference = make_reference(architecture, values, 0)
    import torch

    reference.save_pretrained(tmp_path / "whole")
    tensors, rng = load_file(tmp_path / "whole/model.safetensors"), np.random.default_rng(0)
    names = [name for name in tensors if name.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight", "wq_b.weight"))]
    names = [name.replace("weights_proj", "wk") for name in names]  # an indexer's weights of heads are not quantised
    assert len(names) == (7 if architecture in INDEXED else 5) * values["num_hidden_layers"] + 3 + (
        values["num_hidden_layers"] - 1
    ) * (3 + 3 * values["n_routed_experts"])
    quantised = dict(tensors)
    for name in names:
        rows, columns = tensors[name].shape
        factors = rng.uniform(0.01, 0.02, (-(-rows // 128), -(-columns // 128))).astype(np.float32)
        spread = np.repeat(np.repeat(factors, 128, axis=0)[:rows], 128, axis=1)[:, :columns]
        quantised[name] = (tensors[name] / spread).astype(jnp.float8_e4m3fn)
        quantised[f"{name}_scale_inv"] = factors
        tensors[name] = quantised[name].astype(np.float32) * spread
    save_file(tensors, tmp_path / "whole/model.safetensors", metadata={"format": "pt"})
    save_file(quantised, tmp_path / "model.safetensors")
    method = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(json.loads((tmp_path / "whole/config.json").read_text()) | method))
    config = fetch.read_config(tmp_path, (0, 1))
    assert read_shape(config.to_hf(), config.aux_layers) == config
    tokens = rng.integers(0, VOCABULARY, (2, TOKENS))
    with torch.no_grad():
        expected = type(reference).from_pretrained(tmp_path / "whole")(torch.tensor(tokens)).logits.numpy()
    model = load_model(tmp_path, config, jnp.float32)
    logits, _ = cached(model, jnp.asarray(tokens), [TOKENS])
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=1e-4)
    mesh = make_mesh(MeshConfig(data=1, model=2), jax.devices()[:2])
    split = load_model(tmp_path, config, jnp.float32, mesh)
    for whole, part in zip(jax.tree.leaves(model), jax.tree.leaves(split), strict=True):
        np.testing.assert_array_equal(whole, part)
    kept = load_model(tmp_path, config, jnp.float32, mesh, weights="stored")
    assert kept.blocks[1].mlp.experts.expert_up[...].values.dtype == jnp.float8_e4m3fn
    assert_equal(kept, model)


def test_the_layers_that_share_a_choice_are_those_of_the_published_patterns():
    """Of GLM-5.2's ways to say so; transformers reads a list and writes it."""
    values = shapes("GlmMoeDsaForCausalLM", 0) | {"architectures": ["GlmMoeDsaForCausalLM"], "num_hidden_layers": 4}
    del values["indexer_types"]
    for given, expected in (
        ({}, "FFFF"),
        ({"index_topk_pattern": "FSFS"}, "FSFS"),
        ({"index_topk_freq": 2}, "FFSF"),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, "FSSF"),
    ):
        config: Any = read_shape(values | given, (0, 1))
        reference = AutoConfig.for_model("glm_moe_dsa", **values, **given)
        assert "".join(kind[0].upper() for kind in config.indexer_types) == expected
        assert list(config.indexer_types) == reference.indexer_types
        assert [config.chooser(i) for i in range(5)][-1] == 4  # an MTP layer has an indexer of its own


@pytest.mark.slow
def test_a_cache_of_no_more_slots_than_are_chosen_scores_none(tmp_path, monkeypatch):
    """Each token then attends to all that it sees, which a larger cache chooses too."""
    write_reference(tmp_path, "GlmMoeDsaForCausalLM", 0)
    values = json.loads((tmp_path / "config.json").read_text()) | {"index_topk": 128}
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = load_model(tmp_path, fetch.read_config(tmp_path, (0, 1)), jnp.float32)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, (2, TOKENS)))
    this = Pass(jnp.broadcast_to(jnp.arange(TOKENS), (2, TOKENS)), jnp.zeros(2, jnp.int32))
    scored = []
    chooses = "eagle3_jax.models.cache.best_slots"
    monkeypatch.setattr(chooses, lambda *given: scored.append(given[-1]) or best_slots(*given))
    hidden, _, _ = forward(model, tokens, this, model.empty_cache(2, 128))
    assert not scored
    other, _, _ = forward(model, tokens, this, model.empty_cache(2, 256))
    assert {*scored} == {128}
    np.testing.assert_allclose(hidden, other, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_deepseek_v3_reads_all_of_what_is_published():
    """Numbers from https://github.com/simpx/model-inspect, README.md, which lists deepseek-ai/DeepSeek-V3."""
    config: Any = fetch.read_config(tiny.REPOSITORY / "configs/targets/deepseek_v3")
    layers = config.num_hidden_layers
    assert family_of(config).unused(config) == (f"model.layers.{layers}.",)
    head = config.vocab_size, config.hidden_size
    copies = {f"model.layers.{layers}.{name}.weight": head for name in ("embed_tokens", "shared_head.head")}
    tensors = {name: (shape, "BF16") for name, shape in copies.items()}
    for table in (family_of(config).table(config), DeepseekMtp.table(config)):
        for entry in table.values():
            tensors |= {name: (shape, entry.dtypes[0]) for name, shape in entry.tensors.items()}

    def size(name: str, dtype: str) -> int:
        return 4 if name.endswith(("_scale_inv", "correction_bias")) else 1 if dtype == "F8_E4M3" else 2

    assert len(tensors) == 91_991
    assert sum(math.prod(shape) * size(name, dtype) for name, (shape, dtype) in tensors.items()) == 688_574_839_360
    assert tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"][0] == (5, 56)
    assert tensors["model.layers.61.eh_proj.weight"][0] == (7168, 14336)


@pytest.mark.long
@pytest.mark.parametrize(
    "architecture", long_for(*AS_LLAMA, "LlamaForCausalLM", "GptOssForCausalLM", "Gemma3ForCausalLM")
)
def test_a_tree_is_read_as_its_paths_are(tmp_path, architecture):
    """Two branches behind a prefix, verified in one call, say what each says alone; so they do in a call after another,
    as a draft model reads them, of which the later sees what the one before left in the tail.
    """
    write_reference(tmp_path, architecture, seed=1)
    model = load_model(tmp_path, fetch.read_config(tmp_path, (0, 1)), jnp.float32)
    rng = np.random.default_rng(0)
    prefix, a, b = (rng.integers(0, VOCABULARY, size) for size in (9, 3, 12))  # the last is longer than any window
    cache = model.empty_cache(1, TOKENS, 16)
    _, _, cache = forward(
        model,
        jnp.asarray(prefix)[None, :-1],
        Pass(jnp.arange(8)[None], jnp.zeros(1, jnp.int32), counts=jnp.full(1, 8)),
        cache,
    )
    tree = jnp.asarray([prefix[-1], *a, *b])[None]  # the root, then both branches
    positions = jnp.asarray([*range(8, 12), *range(9, 21)])[None]
    mask = np.tril(np.ones((16, 16), bool))
    mask[4:, 1:4] = False
    seen, lengths = jnp.asarray(mask)[None], jnp.full(1, 8, jnp.int32)
    hidden, _, _ = forward(model, tree, Pass(positions, lengths, seen), cache)
    logits = model.logits(hidden)[0]
    _, _, cache = forward(model, tree[:, :3], Pass(positions[:, :3], lengths, seen[:, :3, :3]), cache)
    later, _, _ = forward(model, tree[:, 3:], Pass(positions[:, 3:], lengths, seen[:, 3:]), cache)
    np.testing.assert_allclose(model.logits(later)[0], logits[3:], atol=1e-4, rtol=1e-4)
    for branch, rows in ((a, range(1, 4)), (b, range(4, 16))):
        alone, _ = cached(model, jnp.asarray([*prefix, *branch])[None], [9 + len(branch)])
        np.testing.assert_allclose(logits[np.asarray(rows)], alone[0, 9:], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", long_for(*(set(ARCHITECTURES) - {"DeepseekV3ForCausalLM"})))
def test_two_devices_say_what_one_says(tmp_path, architecture):
    write_reference(tmp_path, architecture, seed=4)
    config = fetch.read_config(tmp_path, (0, 1))
    mesh = make_mesh(MeshConfig(data=1, model=2), jax.devices()[:2])
    whole, split = load_model(tmp_path, config, jnp.float32), load_model(tmp_path, config, jnp.float32, mesh)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, (2, TOKENS)))
    expected = cached(whole, tokens, [TOKENS])
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        got = cached(split, tokens, [15, 9])
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.config.model_type)
def test_its_table_has_every_parameter_once_and_back(family):
    values = shapes(family.config.architecture, 0) | {"architectures": [family.config.architecture]}
    config = read_shape(values, (0, 1))
    model = family.model(config, rngs=nnx.Rngs(0))
    leaves = {parameter_path(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(model)}
    table = family.table(config)
    assert table.keys() == leaves.keys()
    rng = np.random.default_rng(0)
    for name, entry in table.items():
        value = rng.normal(size=leaves[name].shape)
        parts = entry.split(value)
        assert {t: x.shape for t, x in zip(entry.tensors, parts, strict=True)} == entry.tensors
        np.testing.assert_array_equal(entry.whole(*parts), value)
    assert json.loads(json.dumps(config.to_hf())).keys() >= {"architectures", "model_type", "vocab_size"}
    assert read_shape(config.to_hf(), config.aux_layers) == config


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.config.model_type)
def test_transformers_reads_the_config_that_is_written(family, tmp_path):
    """Its fields have types, and one of another type is refused, by the tokenizer of a written target too."""
    import transformers

    architecture = family.config.architecture
    written = read_shape(shapes(architecture, 0) | {"architectures": [architecture]}, (0, 1)).to_hf()
    written |= {"model_type": "qwen2"} if architecture in SAME_AS else {}
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (config.vocab_size, config.num_hidden_layers) == (VOCABULARY, written["num_hidden_layers"])


def test_an_architecture_that_is_not_known_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match=r"architectures: got \['BertModel'\], expected one of \[.*'LlamaForCausalLM'"):
        read_shape({"architectures": ["BertModel"]})
    for other in ([["LlamaForCausalLM"]], [{}], "LlamaForCausalLM", None):
        with pytest.raises(ValueError, match=rf"architectures: got {re.escape(repr(other))}, expected one of"):
            read_shape({"architectures": other})


@pytest.mark.parametrize(
    ("architecture", "field", "value", "message"),
    [
        ("Qwen3MoeForCausalLM", "use_sliding_window", True, "use_sliding_window: got True, expected False"),
        (
            "Qwen3ForCausalLM",
            "layer_types",
            ["sliding_attention"],
            r"layer_types: .* \(with a sliding_window\) or .* for each",
        ),
        ("MiniMaxM2ForCausalLM", "scoring_func", "softmax", "scoring_func: got 'softmax', expected 'sigmoid'"),
        (
            "Ernie4_5_MoeForCausalLM",
            "moe_layer_end_index",
            1,
            "moe_layer_end_index: got 1, expected [23], the last layer",
        ),
        ("DeepseekV3ForCausalLM", "scoring_func", "softmax", "scoring_func: got 'softmax', expected 'sigmoid'"),
        ("DeepseekV3ForCausalLM", "num_key_value_heads", 99, "num_key_value_heads: got 99, expected"),
        (
            "Gemma3ForCausalLM",
            "rope_parameters",
            {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_type": "linear", "factor": 8.0}},
            "rope_parameters.sliding_attention.rope_type: got 'linear', expected 'default'",
        ),
        (
            "Gemma4ForCausalLM",
            "num_kv_shared_layers",
            3,
            "num_kv_shared_layers: got 3, expected fewer than 3, behind a",
        ),
        (
            "Gemma4ForCausalLM",
            "use_bidirectional_attention",
            "all",
            "bidirectional_attention: got 'all', expected none",
        ),
        ("Gemma4ForCausalLM", "vocab_size_per_layer_input", 9, "vocab_size_per_layer_input: got 9, expected 96"),
        (
            "Olmo3ForCausalLM",
            "rope_parameters",
            {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
            "rope_parameters.sliding_attention: got .'rope_theta': 10000.0., expected",
        ),
        (
            "Phi3ForCausalLM",
            "rope_parameters",
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
            "got .'short_factor': 1, 'long_factor': 1., expected . numbers",
        ),
        ("SmolLM3ForCausalLM", "no_rope_layers", [1], "no_rope_layers: got .1., expected 0 or 1 for each of"),
        (
            "Exaone4ForCausalLM",
            "layer_types",
            ["chunked"],
            "layer_types: got .'chunked'., expected 'sliding_",
        ),
        ("GraniteMoeHybridForCausalLM", "layer_types", ["mamba"], "layer_types: .*; Mamba is not computed"),
        ("GraniteMoeHybridForCausalLM", "num_local_experts", 8, "num_local_experts: got 8, expected 0"),
        ("Glm4MoeForCausalLM", "n_group", 5, "n_group: got 5, expected to divide"),
        ("DeepseekV32ForCausalLM", "q_lora_rank", None, "q_lora_rank: got None, expected a width: the indexer reads"),
        ("DeepseekV32ForCausalLM", "indexer_rope_interleave", True, "indexer_rope_interleave: got True, expected F"),
        ("GlmMoeDsaForCausalLM", "indexer_rope_interleave", False, "indexer_rope_interleave: got False, expected T"),
        ("GlmMoeDsaForCausalLM", "indexer_types", ["full"], "indexer_types: got .'full',., expected 'full' or 'sha"),
        ("GlmMoeDsaForCausalLM", "indexer_types", ["shared"] * 4, "indexer_types: .*, the first 'full'"),
        ("LlamaForCausalLM", "partial_rotary_factor", 0.5, "partial_rotary_factor: got 0.5, expected none or 1"),
        ("DeepseekV3ForCausalLM", "n_group", 5, "n_group: got 5, expected to divide"),
        ("DeepseekV3ForCausalLM", "topk_group", 9, "topk_group: got 9, expected 1 to n_group"),
        ("DeepseekV3ForCausalLM", "num_experts_per_tok", 17, "num_experts_per_tok: got 17, expected 1 to"),
        (
            "DeepseekV3ForCausalLM",
            "quantization_config",
            {"quant_method": "awq"},
            "quantization_config.quant_method: got 'awq', expected 'fp8'",
        ),
        (
            "DeepseekV3ForCausalLM",
            "quantization_config",
            {"quant_method": "fp8", "weight_block_size": [64, 64]},
            r"quantization_config.weight_block_size: got \[64, 64\], expected \[128, 128\]",
        ),
    ],
)
def test_what_a_family_does_not_have_is_refused_by_field(architecture, field, value, message):
    values = shapes(architecture, 0) | {"architectures": [architecture], field: value}
    with pytest.raises(ValueError, match=message):
        read_shape(values, (0, 1))


# Families whose classes know no linear scaling.
SCALED: dict[str, dict[str, Any]] = {
    "Phi3ForCausalLM": {"rope_type": "default"},
    "Ministral3ForCausalLM": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=ARCHITECTURES)
@pytest.mark.parametrize("section", ["none", "rope_scaling", "rope_parameters"])
def test_the_base_of_rope_that_is_left_out_is_transformers(family, section):
    architecture = family.config.architecture
    values = shapes(architecture, 0) | {"architectures": [architecture]}
    values = {name: x for name, x in values.items() if name not in ("rope_theta", "rope_scaling", "rope_parameters")}
    flat = section != "none" and architecture != "Gemma4ForCausalLM"  # whose section has one for each kind of layer
    given = {} if not flat else {section: SCALED.get(architecture, {"rope_type": "linear", "factor": 2.0})}
    model_type = "qwen2" if architecture in SAME_AS else family.config.model_type
    rope = AutoConfig.for_model(model_type, **values, **given).rope_parameters
    assert read_shape(values | given, (0, 1)).rope_theta == rope.get("full_attention", rope)["rope_theta"]


def test_mscale_of_another_family_is_refused():
    """The field changes more than RoPE, and only DeepSeek's attention applies it."""
    scaled = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "mscale_all_dim": 1.0}
    values = shapes("Qwen3ForCausalLM", 0) | {"architectures": ["Qwen3ForCausalLM"], "rope_scaling": scaled}
    with pytest.raises(ValueError, match=r"rope_scaling\.mscale_all_dim: got 1\.0, expected none"):
        read_shape(values, (0, 1))


def test_fingerprints_of_llama_do_not_move():
    """Stored heads name their target by this digest: a new field of a shape would orphan them."""
    fields = [field.name for field in dataclasses.fields(tiny.llama_config())]
    assert fields == [
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings"),
        *("max_position_embeddings", "eos_token_ids", "aux_layers", "bos_token_id", "rope_scaling"),
        "scales",  # the digest leaves it out
    ]
