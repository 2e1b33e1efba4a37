"""Files of EAGLE-2 heads, and token maps: read, equal to a vocabulary that was cut beforehand, or refused by name."""

import io
import json
import pathlib
import pickle
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

from eagle3_jax.config import DraftTree, TargetConfig
from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.formats import token_maps
from eagle3_jax.formats.heads import load_draft
from eagle3_jax.formats.stored import DraftFormatError
from eagle3_jax.models.eagle2 import Eagle2Head
from eagle3_jax.models.registry import Target, load_target


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    folder = tiny.write_target(tmp_path_factory.mktemp("target"))
    return load_target(TargetConfig(name=str(folder), aux_layers=(1, 2, 3)))


@pytest.fixture
def folder(target, tmp_path) -> pathlib.Path:
    """As SafeAILab's: a plain Llama config, a copy of the embeddings, no norm in front of attention, no LM head."""
    shape, rng = target.model.config, np.random.default_rng(0)
    h, f, heads, kv = shape.hidden_size, 40, 4, 2
    d = h // heads

    def matrix(*size: int) -> np.ndarray:
        return (rng.normal(size=size) * 0.05).astype(np.float32)

    tensors = {
        "embed_tokens.weight": matrix(shape.vocab_size, h),
        "fc.weight": matrix(h, 2 * h),
        "fc.bias": matrix(h),
        "layers.0.self_attn.q_proj.weight": matrix(heads * d, h),
        "layers.0.self_attn.k_proj.weight": matrix(kv * d, h),
        "layers.0.self_attn.v_proj.weight": matrix(kv * d, h),
        "layers.0.self_attn.o_proj.weight": matrix(h, heads * d),
        "layers.0.post_attention_layernorm.weight": 1 + matrix(h),
        "layers.0.mlp.gate_proj.weight": matrix(f, h),
        "layers.0.mlp.up_proj.weight": matrix(f, h),
        "layers.0.mlp.down_proj.weight": matrix(h, f),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    values = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": h,
        "intermediate_size": f,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": shape.vocab_size,
        "bias": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


def test_what_lies_on_disk_is_what_is_loaded(target, folder):
    draft = load_draft(folder, target=target)
    head, tensors = draft.head, load_file(folder / "model.safetensors")
    assert isinstance(head, Eagle2Head) and head.config.fc_bias
    np.testing.assert_array_equal(head.fc[...], tensors["fc.weight"].T)
    np.testing.assert_array_equal(head.fc_bias[...], tensors["fc.bias"])
    np.testing.assert_array_equal(head.mlp.down[...], tensors["layers.0.mlp.down_proj.weight"].T)
    np.testing.assert_array_equal(head.lm_head[...], target.model.output_rows)
    assert draft.token_ids.tolist() == list(range(target.model.config.vocab_size))


def test_it_drafts_and_changes_no_token(target, folder):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    tree = DraftTree(num_steps=2, topk=2, num_draft_tokens=5)
    plain = Engine.load(target, None, max_length=64).generate([[5, 6, 7]], params)
    drafted = Engine.load(target, folder, tree, max_length=64).generate([[5, 6, 7]], params)
    assert drafted[0].token_ids == plain[0].token_ids


def test_a_token_map_is_a_vocabulary_cut_beforehand(target, folder, tmp_path):
    (tmp_path / "map.json").write_text(json.dumps([40, 7, 33, 5, 60, 21]))
    mapped, whole = (load_draft(folder, target=target, token_map=x) for x in (tmp_path / "map.json", None))
    ids = [5, 7, 21, 33, 40, 60]
    assert mapped.token_ids.tolist() == ids
    states = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, target.model.config.hidden_size)), jnp.float32)
    cut = whole.head.logits(states)[..., np.asarray(ids)]
    np.testing.assert_allclose(mapped.head.logits(states), cut, atol=1e-6)
    best = np.asarray(ids)[np.asarray(mapped.head.top_k(states, 1)[1])[..., 0]]
    np.testing.assert_array_equal(best, np.asarray(ids)[np.argmax(cut, axis=-1)])
    engine = Engine.load(
        target, folder, DraftTree(num_steps=2, num_draft_tokens=3), max_length=64, token_map=tmp_path / "map.json"
    )
    assert engine.draft is not None and engine.draft.head.config.draft_vocab_size == 6


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", 48, r"hidden_size: got 48, expected \d+, the target's"),
        ("num_hidden_layers", 2, "num_hidden_layers: got 2, expected 1"),
        ("hidden_act", "gelu", "hidden_act: got 'gelu', expected 'silu'"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_field(target, folder, key, value, message):
    values = json.loads((folder / "config.json").read_text()) | {key: value}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(DraftFormatError, match=message):
        load_draft(folder, target=target)


def test_tensors_that_are_missing_or_too_many_are_named(target, folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["layers.0.mlp.up_proj.weight"]
    tensors["fc.bias"][0] = np.nan
    save_file(tensors | {"layers.1.mlp.up_proj.weight": np.zeros(3)}, folder / "model.safetensors")
    found = r"missing tensor midlayer\.mlp\.up_proj[\s\S]*surplus tensor layers\.1[\s\S]*fc\.bias: got NaN or infinity"
    with pytest.raises(DraftFormatError, match=found):
        load_draft(folder, target=target)


def test_it_needs_the_target_s_lm_head(target, folder):
    with pytest.raises(DraftFormatError, match="expected a loaded target"):
        load_draft(folder, target=target.model.config)


def saved_by_torch(path: pathlib.Path, value: object) -> pathlib.Path:
    """As torch.save writes it: a pickle inside an archive."""
    held = io.BytesIO()
    pickle.dump(value, held, protocol=2)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("freq/data.pkl", held.getvalue())
        archive.writestr("freq/version", "3\n")
    return path


def test_token_maps_in_every_form(tmp_path):
    ids = [70000, 3, 12, 255, 256, 65536]
    (tmp_path / "a.json").write_text(json.dumps(ids))
    save_file({"token_map": np.asarray(ids)}, tmp_path / "b.safetensors")
    saved_by_torch(tmp_path / "c.pt", ids)
    for path in sorted(tmp_path.iterdir()):
        assert token_maps.read(path, 100_000).tolist() == sorted(ids)


class Evil:
    def __reduce__(self):
        return (pathlib.Path.touch, (pathlib.Path("/nowhere"),))


@pytest.mark.parametrize("value", [[1, 2, Evil()], {"a": 1}, ["1", 2], [1.5]])
def test_a_pickle_of_anything_else_is_refused_and_not_run(tmp_path, value):
    with pytest.raises(ValueError, match="got a pickle with"):
        token_maps.read(saved_by_torch(tmp_path / "x.pt", value), 100)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2, 1], "got 1 twice"),
        ([5, 100], "got 100, expected ids from 0 to 99"),
        ([], "expected a list of integers"),
        ({}, "expected a list of integers"),
    ],
)
def test_ids_that_make_no_map_are_refused(tmp_path, ids, message):
    (tmp_path / "map.json").write_text(json.dumps(ids))
    with pytest.raises(ValueError, match=message):
        token_maps.read(tmp_path / "map.json", 100)


def test_other_files_are_refused(tmp_path):
    for name, text in (("map.txt", "1 2"), ("map.json", "{"), ("map.pt", "no archive"), ("map.safetensors", "x")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match="token_map"):
            token_maps.read(tmp_path / name, 10)


def test_a_head_with_a_vocabulary_of_its_own_takes_no_map(target, tmp_path):
    from flax import nnx

    from eagle3_jax.config import DraftConfig
    from eagle3_jax.formats.heads import save_draft
    from eagle3_jax.models.draft import DraftHead, DraftHeadConfig
    from eagle3_jax.models.head import Draft

    config = DraftHeadConfig.for_target(DraftConfig(vocab_size=16), target.model.config)
    draft = Draft(DraftHead(config, rngs=nnx.Rngs(0)), jnp.arange(16))
    save_draft(tmp_path / "head", draft, target=target.model.config, dtype="float32")
    with pytest.raises(DraftFormatError, match="has a draft vocabulary of its own"):
        load_draft(tmp_path / "head", target=target, token_map=tmp_path / "map.json")
