"""Files of EAGLE-2 heads: read, cut by a token map, or refused by name."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_heads
from safetensors.numpy import load_file, save_file

from eagle3_jax.config import DraftTree, TargetConfig
from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.formats.heads import load_draft
from eagle3_jax.formats.stored import DraftFormatError
from eagle3_jax.models.checkpoint.fetch import Target, load_target
from eagle3_jax.models.drafts.eagle2 import Eagle2Head


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    folder = tiny.write_target(tmp_path_factory.mktemp("target"))
    return load_target(TargetConfig(name=str(folder), aux_layers=(1, 2, 3)))


@pytest.fixture
def folder(target, tmp_path) -> pathlib.Path:
    return tiny_heads.write_eagle2(tmp_path, target.model)


def test_what_lies_on_disk_is_what_is_loaded(target, folder):
    draft = load_draft(folder, target=target)
    head, tensors = draft.head, load_file(folder / "model.safetensors")
    assert isinstance(head, Eagle2Head) and head.config.fc_bias
    np.testing.assert_array_equal(head.fc[...], tensors["fc.weight"].T)
    np.testing.assert_array_equal(head.fc_bias[...], tensors["fc.bias"])
    np.testing.assert_array_equal(head.mlp.down[...], tensors["layers.0.mlp.down_proj.weight"].T)
    np.testing.assert_array_equal(head.lm_head[...], target.model.output_rows)
    assert draft.token_ids.tolist() == list(range(target.model.config.vocab_size))


@pytest.mark.slow
def test_it_drafts_and_changes_no_token(target, folder):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    tree = DraftTree(num_steps=2, topk=2, num_draft_tokens=5)
    plain = Engine.load(target, None, max_length=64).generate([[5, 6, 7]], params)
    drafted = Engine.load(target, folder, tree, max_length=64).generate([[5, 6, 7]], params)
    assert drafted[0].token_ids == plain[0].token_ids


@pytest.mark.slow
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


def test_what_does_not_fit_is_refused_by_name(target, folder):
    with pytest.raises(DraftFormatError, match="expected a loaded target"):
        load_draft(folder, target=target.model.config)
    values = json.loads((folder / "config.json").read_text())
    for key, wrong, message in (
        ("hidden_size", 48, r"hidden_size: got 48, expected \d+, the target's"),
        ("num_hidden_layers", 2, "num_hidden_layers: got 2, expected 1"),
        ("hidden_act", "gelu", "hidden_act: got 'gelu', expected 'silu'"),
    ):
        (folder / "config.json").write_text(json.dumps(values | {key: wrong}))
        with pytest.raises(DraftFormatError, match=message):
            load_draft(folder, target=target)
    (folder / "config.json").write_text(json.dumps(values))
    tensors = load_file(folder / "model.safetensors")
    del tensors["layers.0.mlp.up_proj.weight"]
    tensors["fc.bias"][0] = np.nan
    save_file(tensors | {"layers.1.mlp.up_proj.weight": np.zeros(3)}, folder / "model.safetensors")
    found = r"missing tensor midlayer\.mlp\.up_proj[\s\S]*surplus tensor layers\.1[\s\S]*fc\.bias: got NaN or infinity"
    with pytest.raises(DraftFormatError, match=found):
        load_draft(folder, target=target)
