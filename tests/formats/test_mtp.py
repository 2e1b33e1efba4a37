"""Layers for further tokens: against transformers, and as drafts that change no token."""

import dataclasses
import json
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_families
from safetensors.numpy import load_file, save_file

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.formats import heads, kinds, mtp
from eagle3_jax.formats.files import DraftFormatError
from eagle3_jax.formats.mtp import MTP
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.checkpoint import fetch
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.models.checkpoint.load import WeightsError, load_model
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.families import FAMILIES
from eagle3_jax.models.target_config import ModelConfig

VOCABULARY, HIDDEN = 40, 32
WIDTHS = "moe_intermediate_size", "shared_expert_intermediate_size"


class Tokenizer:
    chat_template = None

    def convert_tokens_to_ids(self, _: str) -> None:
        return None

    def decode(self, ids: list[int], **_: object) -> str:
        return " ".join(map(str, ids))


SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=48, max_position_embeddings=128
)
SIZES |= dict(num_attention_heads=4, initializer_range=0.3, rms_norm_eps=1e-5)


def qwen(layers: int, seed: int):
    torch = pytest.importorskip("torch")
    import transformers

    torch.manual_seed(seed)
    config = transformers.Qwen2Config(**SIZES, num_hidden_layers=layers, num_key_value_heads=2)
    return noisy(transformers.Qwen2ForCausalLM(config))


def deepseek(layers: int, dense: int, seed: int):
    torch = pytest.importorskip("torch")
    import transformers

    torch.manual_seed(seed)
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
    sizes: dict[str, Any] = dict(q_lora_rank=12, kv_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
    sizes |= dict(n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3, moe_intermediate_size=20)
    config = transformers.DeepseekV3Config(
        **SIZES | sizes,
        num_hidden_layers=layers,
        num_key_value_heads=4,
        first_k_dense_replace=dense,
        rope_parameters=scaled | {"mscale": 1.0, "mscale_all_dim": 1.0},
        eos_token_id=None,  # else 1 ends an answer, and what is sampled behind it is padding
    )
    config.num_nextn_predict_layers = 1  # no field of its class
    return noisy(transformers.DeepseekV3ForCausalLM(config))


def deepseek_v32_model(layers: int, dense: int, seed: int, architecture: str = "DeepseekV32ForCausalLM"):
    torch = pytest.importorskip("torch")
    import transformers

    torch.manual_seed(seed)
    sizes: dict[str, Any] = dict(q_lora_rank=12, kv_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
    sizes |= dict(n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3, moe_intermediate_size=20)
    family = getattr(transformers, architecture)
    config = family.config_class(
        **SIZES | sizes,
        num_hidden_layers=layers,
        num_key_value_heads=4,
        first_k_dense_replace=dense,
        index_topk=3,
        index_n_heads=12,
        index_head_dim=12,
        eos_token_id=None,
    )
    config.num_nextn_predict_layers = 1
    return noisy(family(config))


def glm5(layers: int, dense: int, seed: int):
    return deepseek_v32_model(layers, dense, seed, "GlmMoeDsaForCausalLM")


def glm(layers: int, dense: int, seed: int):
    torch = pytest.importorskip("torch")
    import transformers

    torch.manual_seed(seed)
    sizes: dict[str, Any] = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, head_dim=8)
    config = transformers.Glm4MoeConfig(
        **SIZES | sizes,
        num_hidden_layers=layers,
        num_key_value_heads=2,
        first_k_dense_replace=dense,
        use_qk_norm=True,
        attention_bias=True,
        eos_token_id=None,
    )
    return noisy(transformers.Glm4MoeForCausalLM(config))


def qwen_delta(architecture: str, layer_types: list[str], seed: int):
    torch = pytest.importorskip("torch")
    import transformers

    torch.manual_seed(seed)
    family = getattr(transformers, architecture)
    experts = {"num_experts": 4, "num_experts_per_tok": 2} | dict.fromkeys(WIDTHS, 20)
    config = family.config_class(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=len(layer_types),
        layer_types=layer_types,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=False,
        eos_token_id=None,
        **({} if architecture == "Qwen3_5ForCausalLM" else experts),
    )
    return noisy(family(config), around=0)


def noisy(model, around=1):
    """With norms, biases and routers that show; norms `around` what they are in a new model."""
    import torch

    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if parameter.ndim == 1 and "rotary" not in name:
                mean = 1 if "linear_attn" in name else around
                parameter.copy_(("e_score" not in name) * mean + 0.3 * torch.randn_like(parameter))
            if name.endswith("mlp.gate.weight"):
                parameter.copy_(0.5 * torch.randn_like(parameter))
    return model.eval()


def loaded(folder: pathlib.Path) -> Target:
    model = load_model(folder, fetch.read_config(folder, (0, 1, 2)), jnp.float32)
    return Target(model, Tokenizer(), {"name": folder.name}, folder)


def add_layer(folder: pathlib.Path, prefix: str, other: dict[str, Any], names: str, **more: np.ndarray) -> None:
    """Writes a further layer into a model's file: that of another random model, behind norms and a projection."""
    rng, (one, two, projection) = np.random.default_rng(2), names.split()
    layer = {f"{name}.weight": 1 + 0.3 * rng.normal(size=HIDDEN) for name in (one, two)}
    layer |= {f"{projection}.weight": 0.3 * rng.normal(size=(HIDDEN, 2 * HIDDEN)), **more}
    first = "model.layers.0."
    layer |= {name.removeprefix(first): x for name, x in other.items() if name.startswith(first)}
    layer = {f"{prefix}{name}": np.asarray(x, np.float32) for name, x in layer.items()}
    path = folder / "model.safetensors"
    save_file(load_file(path) | layer, path, metadata={"format": "pt"})


@pytest.fixture
def mimo(tmp_path) -> Target:
    qwen(3, 0).save_pretrained(tmp_path)
    other = {name: x.numpy() for name, x in qwen(1, 1).state_dict().items()}
    norm = {"final_layernorm.weight": other["model.norm.weight"]}
    add_layer(tmp_path, "model.mtp_layers.0.", other, "token_layernorm hidden_layernorm input_proj", **norm)
    values = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["MiMoForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(values | {"num_nextn_predict_layers": 1}))
    return loaded(tmp_path)


@pytest.fixture
def deepseek_v3(tmp_path) -> Target:
    return with_layer(tmp_path, deepseek)


@pytest.fixture
def glm4_moe(tmp_path) -> Target:
    return with_layer(tmp_path, glm)


@pytest.fixture
def deepseek_v32(tmp_path) -> Target:
    return with_layer(tmp_path, deepseek_v32_model)


@pytest.fixture
def glm_moe_dsa(tmp_path) -> Target:
    return with_layer(tmp_path, glm5)


def with_layer(tmp_path: pathlib.Path, family: Any) -> Target:
    family(3, 1, 0).save_pretrained(tmp_path)
    family(1, 0, 1).save_pretrained(tmp_path / "other")
    own, other = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "other/model.safetensors")
    shared = {"shared_head.norm.weight": other["model.norm.weight"], "shared_head.head.weight": own["lm_head.weight"]}
    shared["embed_tokens.weight"] = own["model.embed_tokens.weight"]
    add_layer(tmp_path, "model.layers.3.", other, "enorm hnorm eh_proj", **shared)
    return loaded(tmp_path)


def delta(folder: pathlib.Path, architecture: str) -> tuple[Target, Any, dict[str, np.ndarray]]:
    """A Qwen with Gated DeltaNet and such a layer, the model that the layer is taken of, and all tensors."""
    model = qwen_delta(architecture, ["linear_attention", "full_attention", "linear_attention"], 0)
    model.save_pretrained(folder)
    other = qwen_delta(architecture, ["full_attention"], 1)
    other.save_pretrained(folder / "other")
    rng, prefix = np.random.default_rng(2), "model.layers.0."
    found = load_file(folder / "other/model.safetensors")
    layer = {
        "pre_fc_norm_embedding.weight": 0.3 * rng.normal(size=HIDDEN),
        "pre_fc_norm_hidden.weight": 0.3 * rng.normal(size=HIDDEN),
        "fc.weight": 0.3 * rng.normal(size=(HIDDEN, 2 * HIDDEN)),
        "norm.weight": found["model.norm.weight"],
    } | {f"layers.0.{name.removeprefix(prefix)}": x for name, x in found.items() if name.startswith(prefix)}
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"mtp.{name}": np.asarray(x, np.float32) for name, x in layer.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return loaded(folder), other, tensors


@pytest.fixture
def qwen3_5(tmp_path) -> Target:
    return delta(tmp_path, "Qwen3_5ForCausalLM")[0]


@pytest.fixture
def qwen3_next(tmp_path) -> Target:
    return delta(tmp_path, "Qwen3NextForCausalLM")[0]


LONG = [
    pytest.param(name, marks=pytest.mark.long) for name in ("deepseek_v3", "glm4_moe", "deepseek_v32", "qwen3_next")
]


@pytest.fixture(params=["mimo", "qwen3_5", "glm_moe_dsa", *LONG])
def target(request) -> Target:
    return request.getfixturevalue(request.param)


@pytest.mark.slow
def test_it_is_transformers_layer_between_its_norms(mimo):
    import torch

    target = mimo
    tensors = load_file(target.folder / "model.safetensors")
    rng = np.random.default_rng(0)
    tokens, features = rng.integers(0, VOCABULARY, (1, 7)), rng.normal(size=(1, 7, HIDDEN)).astype(np.float32)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        weight = tensors[f"model.mtp_layers.0.{name}_layernorm.weight"]
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight

    embeds = tensors["model.embed_tokens.weight"][tokens]
    embeds[:, 0] = 0
    joined = np.concatenate([norm(features, "hidden"), norm(embeds, "token")], axis=-1)
    with torch.no_grad():
        entering = torch.tensor(joined @ tensors["model.mtp_layers.0.input_proj.weight"].T)
        expected = qwen(1, 1).model(inputs_embeds=entering).last_hidden_state.numpy()

    draft = MTP.load(None, target, jnp.float32)
    states, _ = draft.head.feed(
        target.model.embed[...],
        jnp.asarray(tokens),
        draft.head.fuse(jnp.asarray(features)),
        Pass(jnp.arange(7)[None], jnp.zeros(1, jnp.int32)),
        draft.head.empty_cache(1, 16),
    )
    np.testing.assert_allclose(states, expected, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(draft.head.logits(states), expected @ tensors["lm_head.weight"].T, atol=1e-3, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    [
        "Qwen3_5ForCausalLM",
        pytest.param("Qwen3_5MoeForCausalLM", marks=pytest.mark.long),
        pytest.param("Qwen3NextForCausalLM", marks=pytest.mark.long),
    ],
)
def test_qwen_3_5_s_is_transformers_layer_between_its_norms(tmp_path, architecture):
    """Two passes; the normed output of the first one recurs. Experts are as transformers writes them."""
    import torch

    target, other, tensors = delta(tmp_path, architecture)
    rng = np.random.default_rng(0)
    tokens, features = rng.integers(0, VOCABULARY, (1, 9)), rng.normal(size=(1, 7, HIDDEN)).astype(np.float32)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (1 + tensors[f"mtp.pre_fc_norm_{name}.weight"])

    def expected(features: np.ndarray) -> np.ndarray:
        embeds = tensors["model.embed_tokens.weight"][tokens[:, : features.shape[1]]]
        joined = np.concatenate([norm(embeds, "embedding"), norm(features, "hidden")], axis=-1)
        with torch.no_grad():
            entering = torch.tensor(joined @ tensors["mtp.fc.weight"].T)
            return other.model(inputs_embeds=entering).last_hidden_state.numpy()

    head = MTP.load(None, target, jnp.float32).head
    embed, none = target.model.embed[...], jnp.zeros(1, jnp.int32)
    first = Pass(jnp.arange(7)[None], none)
    states, cache = head.feed(embed, jnp.asarray(tokens[:, :7]), jnp.asarray(features), first, head.empty_cache(1, 16))
    np.testing.assert_allclose(states, expected(features), atol=1e-4, rtol=1e-4)
    both, second = np.concatenate([features, states[:, -2:]], axis=1), Pass(jnp.arange(7, 9)[None], none + 7)
    states, _ = head.feed(embed, jnp.asarray(tokens[:, 7:]), states[:, -2:], second, cache)
    np.testing.assert_allclose(states, wanted := expected(both)[:, 7:], atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(head.logits(states), wanted @ tensors["lm_head.weight"].T, atol=1e-3, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name, family", [("deepseek_v32", deepseek_v32_model), ("glm_moe_dsa", glm5)])
def test_with_an_indexer_it_is_transformers_layer_between_its_norms(request, name, family):
    """Two passes, whose later tokens attend to three of those before them; the normed output of the first one recurs.

    transformers' MTP model has no masks for these layers.
    """
    torch = pytest.importorskip("torch")
    target, other = request.getfixturevalue(name), family(1, 0, 1)
    tensors = load_file(target.folder / "model.safetensors")
    rng = np.random.default_rng(0)
    tokens, features = rng.integers(0, VOCABULARY, (1, 9)), rng.normal(size=(1, 7, HIDDEN)).astype(np.float32)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * tensors[f"model.layers.3.{name}.weight"]

    def expected(features: np.ndarray) -> np.ndarray:
        embeds = tensors["model.embed_tokens.weight"][tokens[:, : features.shape[1]]]
        joined = np.concatenate([norm(embeds, "enorm"), norm(features, "hnorm")], axis=-1)
        with torch.no_grad():
            entering = torch.tensor(joined @ tensors["model.layers.3.eh_proj.weight"].T)
            return other.model(inputs_embeds=entering).last_hidden_state.numpy()

    head = MTP.load(None, target, jnp.float32).head
    embed, none = target.model.embed[...], jnp.zeros(1, jnp.int32)
    first = Pass(jnp.arange(7)[None], none)
    states, cache = head.feed(embed, jnp.asarray(tokens[:, :7]), jnp.asarray(features), first, head.empty_cache(1, 16))
    np.testing.assert_allclose(states, expected(features), atol=1e-4, rtol=1e-4)
    both, second = np.concatenate([features, states[:, -2:]], axis=1), Pass(jnp.arange(7, 9)[None], none + 7)
    states, _ = head.feed(embed, jnp.asarray(tokens[:, 7:]), states[:, -2:], second, cache)
    np.testing.assert_allclose(states, expected(both)[:, 7:], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("deepseek_v3", marks=pytest.mark.long), "glm4_moe"])
def test_deepseek_s_and_glm_s_are_transformers_own(request, name):
    """Its names, its layer and what of its output recurs: two passes of the class that transformers drafts with."""
    torch = pytest.importorskip("torch")
    import transformers
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    target = request.getfixturevalue(name)
    whole = transformers.AutoModelForCausalLM.from_pretrained(target.folder)
    whole._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3\."]  # says 61, and is where it looks for the layer
    reference, cache = MtpModel.from_pretrained(whole).eval(), MtpCache(config=whole.config.get_mtp_config())
    rng = np.random.default_rng(0)
    tokens, more = rng.integers(0, VOCABULARY, (1, 7)), rng.integers(0, VOCABULARY, (1, 2))
    features = rng.normal(size=(1, 7, HIDDEN)).astype(np.float32)
    with torch.no_grad():
        passed = torch.tensor(features), torch.arange(7)[None], cache
        first = reference.forward_layer(0, *passed, input_ids=torch.tensor(tokens))
        passed = first[:, -2:], torch.arange(7, 9)[None], cache
        second = reference.forward_layer(0, *passed, input_ids=torch.tensor(more))
        logits = whole.lm_head(second).numpy()

    head = MTP.load(None, target, jnp.float32).head
    features, embed = head.fuse(jnp.asarray(features)), target.model.embed[...]
    none, cache = jnp.zeros(1, jnp.int32), head.empty_cache(1, 16)
    states, cache = head.feed(embed, jnp.asarray(tokens), features, Pass(jnp.arange(7)[None], none), cache)
    np.testing.assert_allclose(states, first, atol=1e-4, rtol=1e-4)
    states, _ = head.feed(embed, jnp.asarray(more), states[:, -2:], Pass(jnp.arange(7, 9)[None], none + 7), cache)
    np.testing.assert_allclose(states, second, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(head.logits(states), logits, atol=1e-3, rtol=1e-4)


@pytest.mark.slow
def test_it_changes_no_token(target):
    tree = DraftTree(num_steps=2, topk=3, num_draft_tokens=7)
    prompts, params = [[1, 2, 3], [9, 8, 7, 6, 5, 4], [11]], SamplingParams(max_tokens=12, ignore_eos=True)
    plain = Engine.load(target, None, batch_size=2, max_length=64).generate(prompts, params)
    drafting = Engine.load(target, "mtp", tree, batch_size=2, max_length=64)
    assert drafting.draft is not None
    assert [x.token_ids for x in drafting.generate(prompts, params)] == [x.token_ids for x in plain]


def test_a_layer_that_is_not_there_is_named(target):
    path = pathlib.Path(target.folder, "model.safetensors")
    tensors = load_file(path)
    (name,) = (name for name in tensors if name.endswith(("input_proj.weight", "eh_proj.weight", "mtp.fc.weight")))
    del tensors[name]
    save_file(tensors, path)
    with pytest.raises(WeightsError, match=rf"missing tensor {re.escape(name)} \[32, 64\]"):
        MTP.load(None, target, jnp.float32)


PREFIXES = {
    "MiMoForCausalLM": ("model.mtp_layers.0.", "model.mtp_layers.0."),
    "DeepseekV3ForCausalLM": ("model.layers.4.", "model.layers.4."),
    "Glm4MoeForCausalLM": ("model.layers.4.", "model.layers.4."),
    "GlmMoeDsaForCausalLM": ("model.layers.4.", "model.layers.4."),
    "Qwen3_5ForCausalLM": ("mtp.", "mtp.layers.0."),
    "Qwen3_5MoeForCausalLM": ("mtp.", "mtp.layers.0."),
}


@pytest.fixture(params=PREFIXES)
def alone(request, tmp_path):
    """A target without such layers in its folder, a trained layer for it, and the layer's folder."""
    family = next(x for x in FAMILIES if x.config.architecture == request.param)
    model = tiny_families.make(family)
    if request.param == "DeepseekV3ForCausalLM":  # the layer of a quantised target is written unquantised
        model.config = dataclasses.replace(model.config, fp8=True)  # pyrefly: ignore
    target = Target(model, Tokenizer(), {"name": "target"}, tmp_path)
    rng = np.random.default_rng(3)
    head = mtp.abstract(model.config, jnp.float32)
    del head.lm_head
    head = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), head)
    return target, head, tmp_path / "layer"


def write(folder: pathlib.Path, head: Any, shape: ModelConfig, dtype: str, form: str) -> None:
    MTP.write(folder, MTP.stored(Draft(head, jnp.arange(shape.vocab_size)), shape, dtype, None), form)


@pytest.mark.slow
def test_a_trained_layer_has_the_names_of_the_checkpoint_s_own(alone):
    target, head, folder = alone
    shape = target.model.config
    write(folder, head, shape, "float32", "sglang")
    prefix, layer = PREFIXES[shape.architecture]
    tensors, values = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    assert {name for name in tensors if not name.startswith(prefix)} == set()
    assert {f"{layer}{name}.weight" for name in ("input_layernorm", "self_attn.o_proj")} < tensors.keys()
    if shape.architecture == "Qwen3_5MoeForCausalLM":
        assert {f"{layer}mlp.{name}.weight" for name in ("experts.3.up_proj", "shared_expert_gate")} < tensors.keys()
    count = "mtp_num_hidden_layers" if prefix == "mtp." else "num_nextn_predict_layers"
    assert (values["architectures"], values[count]) == ([shape.architecture], 1)
    assert "quantization_config" not in values
    kind = kinds.of_folder(folder)
    assert (kind, kind.method, kind.algorithm, kind.block(folder)) == (MTP, "mtp", "NEXTN", None)
    draft = heads.load_draft(folder, target=target)
    np.testing.assert_array_equal(draft.head.output_rows, target.model.output_rows)
    del draft.head.lm_head
    jax.tree.map(np.testing.assert_array_equal, head, draft.head)


def test_a_layer_that_no_engine_of_the_form_or_another_target_reads_is_refused(alone):
    target, head, folder = alone
    shape = target.model.config
    mimo = shape.architecture == "MiMoForCausalLM"
    with pytest.raises(DraftFormatError, match=r"export.format: got 'eagle', expected .*: the form has no MTP layers"):
        write(folder, head, shape, "float32", "eagle")
    if mimo:
        with pytest.raises(DraftFormatError, match=r"got 'vllm', expected 'sglang': vLLM feeds MiMo's layer the state"):
            write(folder, head, shape, "float32", "vllm")
    with pytest.raises(ValueError, match="draft: got 'mtp', expected a head's folder"):
        mtp.head_of(tiny.llama_config())
    write(folder, head, shape, "bfloat16", "sglang" if mimo else "vllm")
    target.model.config = dataclasses.replace(shape, rope_theta=5.0)
    with pytest.raises(
        DraftFormatError, match=r"the MTP layer of another target:\n  rope_theta: got \S+, expected 5.0"
    ):
        heads.load_draft(folder, target=target)
