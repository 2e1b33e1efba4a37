"""MiMo's layer for further tokens: against transformers' layers put together, and as a draft that changes no token."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding import rounds
from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.formats import mtp
from eagle3_jax.models import registry
from eagle3_jax.models.registry import Target
from eagle3_jax.models.weights import WeightsError, load_model

VOCABULARY, HIDDEN = 40, 32


class Tokenizer:
    chat_template = None

    def decode(self, ids: list[int], **_: object) -> str:
        return " ".join(map(str, ids))


def qwen(layers: int, seed: int):
    torch = pytest.importorskip("torch")
    import transformers

    torch.manual_seed(seed)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        rms_norm_eps=1e-5,
    )
    model = transformers.Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
    return model


@pytest.fixture
def target(tmp_path) -> Target:
    """A MiMo with one such layer, whose file is written with the layer of another random model."""
    qwen(3, 0).save_pretrained(tmp_path)
    other = {name: x.numpy() for name, x in qwen(1, 1).state_dict().items()}
    rng = np.random.default_rng(2)
    layer = {
        "token_layernorm.weight": 1 + 0.3 * rng.normal(size=HIDDEN),
        "hidden_layernorm.weight": 1 + 0.3 * rng.normal(size=HIDDEN),
        "input_proj.weight": 0.3 * rng.normal(size=(HIDDEN, 2 * HIDDEN)),
        "final_layernorm.weight": other["model.norm.weight"],
    } | {name.removeprefix("model.layers.0."): x for name, x in other.items() if name.startswith("model.layers.0.")}
    layer = {f"model.mtp_layers.0.{name}": np.asarray(x, np.float32) for name, x in layer.items()}
    save_file(load_file(tmp_path / "model.safetensors") | layer, tmp_path / "model.safetensors")
    values = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["MiMoForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(values | {"num_nextn_predict_layers": 1}))
    config = registry.read_config(tmp_path, (0, 1, 2))
    return Target(load_model(tmp_path, config, jnp.float32), Tokenizer(), {"name": "mimo"}, tmp_path)


def test_it_is_transformers_layer_between_its_norms(target):
    import torch

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

    draft = mtp.load(target, jnp.float32)
    states, _ = draft.head.feed(
        target.model.embed[...],
        jnp.asarray(tokens),
        draft.head.fuse(jnp.asarray(features)),
        jnp.arange(7)[None],
        draft.head.empty_cache(1, 16),
        jnp.zeros(1, jnp.int32),
    )
    np.testing.assert_allclose(states, expected, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(draft.head.logits(states), expected @ tensors["lm_head.weight"].T, atol=1e-3, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tree", [DraftTree(num_steps=3, topk=1, num_draft_tokens=4), DraftTree(num_steps=2, topk=3, num_draft_tokens=7)]
)
def test_it_changes_no_token(target, tree):
    prompts, params = [[1, 2, 3], [9, 8, 7, 6, 5, 4], [11]], SamplingParams(max_tokens=12, ignore_eos=True)
    plain = Engine.load(target, None, batch_size=2, max_length=64).generate(prompts, params)
    drafting = Engine.load(target, "mtp", tree, batch_size=2, max_length=64)
    assert drafting.draft is not None
    assert [x.token_ids for x in drafting.generate(prompts, params)] == [x.token_ids for x in plain]


@pytest.mark.slow
@pytest.mark.parametrize("sample_drafts", [False, True])
def test_sampled_tokens_have_the_target_s_distribution(target, sample_drafts):
    """The second token of 4,096 answers against the exact distribution, by chi-square."""
    samples, prompt, draft = 4096, np.array([3, 14, 15, 9, 2, 6], np.int32), mtp.load(target, jnp.float32)
    state = rounds.generate(
        target.model.observed_at(draft.head.config.aux_layers),
        draft,
        jnp.asarray(np.tile(prompt, (samples, 1))),
        jnp.full(samples, 6, jnp.int32),
        jax.random.key(7),
        max_tokens=2,
        tree=DraftTree(num_steps=2, topk=3, num_draft_tokens=7, sample_drafts=sample_drafts),
        temperature=1.5,
    )
    assert int(state.accepted.sum()) > samples // 40  # of a layer with random weights
    tiny.assert_second_token_is_the_targets(target.model, prompt, np.asarray(state.output[:, 1]), temperature=1.5)


def test_a_layer_that_is_not_there_is_named(target):
    path = pathlib.Path(target.folder, "model.safetensors")
    tensors = load_file(path)
    del tensors["model.mtp_layers.0.input_proj.weight"]
    save_file(tensors, path)
    with pytest.raises(WeightsError, match=r"missing tensor model\.mtp_layers\.0\.input_proj\.weight \[32, 64\]"):
        mtp.load(target, jnp.float32)


def test_other_families_have_none(toy_llama):
    with pytest.raises(ValueError, match="draft: got 'mtp', expected a head's folder"):
        mtp.load(toy_llama, jnp.float32)


@pytest.fixture
def toy_llama(tmp_path) -> Target:
    return registry.load_target(registry.TargetConfig(name=str(tiny.write_target(tmp_path)), aux_layers=(1, 2, 3)))
