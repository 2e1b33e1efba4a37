"""The target equals transformers (PyTorch) and itself, however its tokens are split into calls."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import llama_config, make_target, make_tokenizer

from eagle3_jax.export.write_target import write_target
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.checkpoint import fetch
from eagle3_jax.models.checkpoint.load import load_model
from eagle3_jax.models.families.llama import Block, Llama, LlamaConfig
from eagle3_jax.models.layers import RopeScaling
from eagle3_jax.models.target import TargetModel
from eagle3_jax.models.target_config import check_aux_layers

TINY = llama_config(
    vocab_size=97, hidden_size=32, head_dim=8, num_hidden_layers=4, tie_word_embeddings=False, aux_layers=(0, 2, 4)
)

LLAMA2 = {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False}
LLAMA3 = {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False}
LLAMA31 = LLAMA3 | {
    "tie_word_embeddings": True,
    "head_dim": 16,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


forward = jax.jit(lambda model, *arguments: model(*arguments))


def causal(model: TargetModel, tokens: jax.Array):
    """One call over whole sequences: hidden, aux."""
    b, t = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(t), (b, t))
    hidden, aux, _ = forward(model, tokens, Pass(positions, jnp.zeros(b, jnp.int32)), model.empty_cache(b, t))
    return hidden, aux


def compare_with_transformers(torch, folder, reference, aux_layers, tokens):
    config = fetch.read_config(folder, aux_layers)
    model = load_model(folder, config, jnp.float32)
    with torch.no_grad():
        expected = reference(torch.tensor(tokens), output_hidden_states=True)
    hidden, aux = causal(model, jnp.asarray(tokens))
    expected_aux = np.concatenate([expected.hidden_states[b].numpy() for b in aux_layers], axis=-1)
    np.testing.assert_allclose(model.logits(hidden), expected.logits.numpy(), atol=1e-4, rtol=1e-4)
    scale = np.maximum(1, np.sqrt(np.mean(expected_aux**2, axis=-1, keepdims=True)))  # real states reach 20,000
    np.testing.assert_allclose(aux / scale, expected_aux / scale, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", [LLAMA2, LLAMA3, LLAMA31], ids=["llama2", "llama3", "llama3.1"])
def test_equals_transformers(tmp_path, shape):
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig as TorchConfig
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    config = TorchConfig(
        vocab_size=128,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=5,
        num_attention_heads=4,
        initializer_range=0.2,
        max_position_embeddings=256,
        **shape,
    )
    reference = LlamaForCausalLM(config).eval()
    reference.save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 128, (2, 40))
    compare_with_transformers(torch, tmp_path, reference, (0, 2, 4), tokens)


@pytest.mark.slow
def test_equals_transformers_on_real_weights():
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    folder = fetch.fetch("smollm2-135m-instruct")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = (
        "The tide comes in twice a day because the Moon pulls on the ocean.\n\ndef area(r):\n    return 3.14159 * r * r"
    )
    tokens = np.array([fetch.load_tokenizer(folder).encode(text)])
    compare_with_transformers(torch, folder, reference, (2, 15, 27), tokens)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"tie_word_embeddings": False}, {"rope_scaling": RopeScaling(8.0, 1.0, 4.0, 32)}])
def test_transformers_reads_a_written_target(tmp_path, changes):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    config = llama_config(head_dim=8, rope_theta=5e5, aux_layers=(0, 1, 2), eos_token_ids=(2, 3), **changes)
    target = make_target(config, make_tokenizer())
    # Logits that differ by more than the tolerance.
    model = jax.tree.map(lambda leaf: 10 * leaf if leaf.ndim == 2 else leaf, target.model)
    write_target(dataclasses.replace(target, model=model), tmp_path / "target")
    assert fetch.read_config(tmp_path / "target", config.aux_layers) == config
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "target").eval()
    assert reference.dtype == torch.float32 and reference.config.eos_token_id == [2, 3]
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 40))
    compare_with_transformers(torch, tmp_path / "target", reference, config.aux_layers, tokens)


@pytest.fixture(scope="module")
def tiny() -> Llama:
    with jax.default_device(jax.devices("cpu")[0]):
        return Llama(TINY, rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_decoding_one_by_one_equals_prefill(tiny):
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 97, (2, 9)))
    expected_hidden, expected_aux = causal(tiny, tokens)
    cache = tiny.empty_cache(2, 16)
    for t in range(9):
        lengths = jnp.full(2, t, jnp.int32)
        hidden, aux, cache = forward(tiny, tokens[:, t : t + 1], Pass(lengths[:, None], lengths), cache)
        np.testing.assert_allclose(hidden[:, 0], expected_hidden[:, t], atol=1e-5)
        np.testing.assert_allclose(aux[:, 0], expected_aux[:, t], atol=1e-5)


@pytest.mark.slow
def test_tree_branches_equal_separate_sequences(tiny):
    """Each root-to-node path of a tree sees what it would see alone; ragged prefixes; siblings do not mix."""
    rng = np.random.default_rng(2)
    lengths = np.array([5, 3])
    prefix = rng.integers(0, 97, (2, 5))
    nodes = rng.integers(0, 97, (2, 6))
    parents = [-1, 0, 0, 1, 1, 2]
    mask = np.zeros((6, 6), bool)
    depth = np.zeros(6, int)
    for j, parent in enumerate(parents):
        mask[j, j] = True
        if parent >= 0:
            mask[j] |= mask[parent]
            depth[j] = depth[parent] + 1
    _, _, cache = forward(
        tiny,
        jnp.asarray(prefix),
        Pass(jnp.broadcast_to(jnp.arange(5), (2, 5)), jnp.zeros(2, jnp.int32)),
        tiny.empty_cache(2, 16),
    )
    seen = jnp.asarray(np.broadcast_to(mask, (2, 6, 6)))
    this = Pass(jnp.asarray(lengths[:, None] + depth), jnp.asarray(lengths), seen)
    hidden, aux, cache = forward(tiny, jnp.asarray(nodes), this, cache)
    for b in range(2):
        for node in range(6):
            path = np.flatnonzero(mask[node])
            alone = np.concatenate([prefix[b, : lengths[b]], nodes[b, path]])[None]
            expected_hidden, expected_aux = causal(tiny, jnp.asarray(alone))
            np.testing.assert_allclose(hidden[b, node], expected_hidden[0, -1], atol=1e-5)
            np.testing.assert_allclose(aux[b, node], expected_aux[0, -1], atol=1e-5)
    # Committing the path 0 -> 2 -> 5 leaves the cache as if only that path had ever been appended.
    committed = cache.commit(this, jnp.asarray([[0, 2, 5]] * 2), jnp.full(2, 3))
    after = jnp.asarray(rng.integers(0, 97, (2, 1)))
    new_lengths = jnp.asarray(lengths + 3)
    hidden, _, _ = forward(tiny, after, Pass(new_lengths[:, None], new_lengths), committed)
    for b in range(2):
        alone = np.concatenate([prefix[b, : lengths[b]], nodes[b, [0, 2, 5]], after[b]])[None]
        np.testing.assert_allclose(hidden[b, 0], causal(tiny, jnp.asarray(alone))[0][0, -1], atol=1e-5)


@pytest.mark.slow
def test_bfloat16_stays_close(tiny):
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 97, (1, 12)))
    half = Llama(TINY, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    hidden, aux = causal(half, tokens)
    assert hidden.dtype == aux.dtype == jnp.bfloat16
    assert half.logits(hidden).dtype == jnp.float32
    np.testing.assert_allclose(half.logits(hidden), tiny.logits(causal(tiny, tokens)[0]), atol=0.02)


def test_aux_layers_are_checked():
    assert check_aux_layers(None, 32) == (2, 16, 29)
    assert check_aux_layers((0, 4), 4) == (0, 4)
    assert check_aux_layers(None, 6) == ()  # the default collides: none, where nobody names them
    for bad, layers in [((2, 2, 5), 8), ((3, 1), 8), ((1, 9), 8), ((), 8)]:
        with pytest.raises(ValueError, match=r"target\.aux_layers"):
            check_aux_layers(bad, layers)


def test_config_reports_every_problem(tmp_path):
    values = {"mlp_bias": True, "hidden_act": "gelu", "rope_scaling": {"type": "dynamic"}}
    with pytest.raises(ValueError, match=r"hidden_act.*\n.*mlp_bias.*\n.*vocab_size: missing[\s\S]*'dynamic'"):
        LlamaConfig.from_hf(values)


def test_both_spellings_of_rope(tmp_path):
    base = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
    }
    scaling = {k: v for k, v in LLAMA31["rope_scaling"].items()}  # pyrefly: ignore
    old = LlamaConfig.from_hf(base | {"rope_theta": 5e5, "rope_scaling": scaling})
    new = LlamaConfig.from_hf(base | {"rope_parameters": scaling | {"rope_theta": 5e5}})
    assert old == new
    assert old.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 32)
    assert dataclasses.replace(old, rope_scaling=None) == LlamaConfig.from_hf(base | {"rope_theta": 5e5})
    (tmp_path / "config.json").write_text(json.dumps(base | {"eos_token_id": 1}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    assert fetch.read_config(tmp_path).eos_token_ids == (1, 5)


def test_layers_that_are_alike_are_traced_once(monkeypatch):
    traced, call = [], Block.__call__
    monkeypatch.setattr(Block, "__call__", lambda block, *arguments: traced.append(block) or call(block, *arguments))
    model = Llama(dataclasses.replace(TINY, num_hidden_layers=6), rngs=nnx.Rngs(0))
    tokens = jnp.zeros((1, 11), jnp.int32)  # a shape that no other test has traced
    forward(model, tokens, Pass(tokens, jnp.zeros(1, jnp.int32)), model.empty_cache(1, 11))
    assert len(traced) == 1
