"""Whole models as drafts, from their folders: which are taken, by name too, and which are refused by what differs."""

import json
import pathlib

import jax.numpy as jnp
import pytest
import tiny
import tiny_heads
from safetensors.numpy import load_file, save_file

from eagle3_jax.config import DraftConfig, DraftTree, MeshConfig, TargetConfig
from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.formats import draft_models, packaged
from eagle3_jax.formats.heads import load_draft, save_draft
from eagle3_jax.formats.stored import DraftFormatError
from eagle3_jax.models.checkpoint.fetch import Target, TargetError, load_target, read_config
from eagle3_jax.models.drafts.eagle3 import DraftHeadConfig
from eagle3_jax.models.drafts.model import DraftModel

CHAIN = DraftTree(num_steps=3, num_draft_tokens=4)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    folder = tiny.write_target(tmp_path_factory.mktemp("target"))
    return load_target(TargetConfig(name=str(folder), aux_layers=(1, 2, 3)))


@pytest.fixture
def small(tmp_path, target) -> pathlib.Path:
    """The target's first two layers; the rule of a head's aux layers collides on so few."""
    folder = tiny.write_target(tmp_path / "small")
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    gone = ("model.layers.2.", "model.layers.3.")
    save_file({name: x for name, x in tensors.items() if not name.startswith(gone)}, folder / "model.safetensors")
    return folder


def alter(folder: pathlib.Path, name: str, **changes: object) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.long
@pytest.mark.parametrize("mesh", [None, MeshConfig(data=1, model=2)])
def test_a_model_in_a_folder_drafts(target, small, mesh):
    params, prompts = SamplingParams(max_tokens=16, ignore_eos=True), ["apple bird", "moon night orange"]
    plain = Engine.load(target, None, batch_size=2, max_length=128).generate(prompts, params)
    given = target if mesh is None else TargetConfig(name=str(target.folder), aux_layers=(1, 2, 3))
    engine = Engine.load(given, str(small), CHAIN, batch_size=2, max_length=128, mesh=mesh)
    assert engine.draft is not None and isinstance(engine.draft.head, DraftModel)
    assert len(engine.draft.head.model.blocks) == 2
    assert engine.target.config.aux_layers == ()
    answers = engine.generate(prompts, params)
    assert [x.token_ids for x in answers] == [x.token_ids for x in plain]
    assert sum(sum(x.stats.accepted_per_position) for x in answers) > 5


@pytest.mark.parametrize("draft", [None, "lookup", "auto"])
def test_a_shallow_model_decodes_where_nothing_reads_its_aux_layers(small, draft):
    engine = Engine.load(str(small), draft, max_length=64)
    assert engine.target.config.aux_layers == ()


def test_who_reads_aux_layers_needs_them_named(small):
    shape = read_config(small)
    expected = (
        r"target\.aux_layers: got none, expected boundaries within 0..2: .* collides on shallow targets, name them"
    )
    with pytest.raises(ValueError, match=expected):
        DraftHeadConfig.for_target(DraftConfig(vocab_size=8), shape)
    with pytest.raises(DraftFormatError, match=expected):
        save_draft(small / "head", tiny_heads.make_draft(), target=shape, dtype="float32")


def test_a_model_by_its_name(target, small, tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_JAX_CACHE", str(tmp_path / "cache"))
    cached = tmp_path / "cache" / "smollm2-135m-instruct"
    cached.parent.mkdir()
    small.rename(cached)
    (cached / "manifest.json").write_text("{}")
    assert packaged.chosen_draft("SmolLM2-135M-Instruct", tmp_path, target) == ("SmolLM2-135M-Instruct", cached)
    draft = load_draft("SmolLM2-135M-Instruct", target=target, dtype=jnp.bfloat16)
    assert isinstance(draft.head, DraftModel) and draft.head.dtype == jnp.bfloat16
    for missing in ("no/such/name", pathlib.Path("no/such")):
        with pytest.raises(
            TargetError, match=rf"draft: got '{missing}', no such folder.*; expected .* 'lookup', 'mtp'"
        ):
            load_draft(missing, target=target)


def test_another_vocabulary_is_refused(target, small):
    alter(small, "config.json", vocab_size=512)
    tokenizer = json.loads((small / "tokenizer.json").read_text())
    alter(small, "tokenizer.json", model=tokenizer["model"] | {"merges": tokenizer["model"]["merges"][:-1]})
    with pytest.raises(DraftFormatError, match=r"vocab_size: got 512, expected 448, the target's\n  tokenizer: got "):
        load_draft(small, target=target)


def test_what_a_model_has_no_use_for_is_refused(target, small):
    with pytest.raises(DraftFormatError, match=r"token_map: got map\.json, expected none: .*small is a draft of a"):
        load_draft(small, target=target, token_map="map.json")
    with pytest.raises(DraftFormatError, match="expected a loaded target"):
        load_draft(small, target=target.model.config)


def test_heads_are_no_models(tmp_path, target, small):
    """EAGLE's call themselves LlamaForCausalLM too."""
    assert draft_models.is_model(small)
    for form in ("sglang", "vllm", "speculators", "eagle"):
        save_draft(
            tmp_path / form, tiny_heads.make_draft(head_dim=4), target=tiny_heads.TARGET, dtype="float32", form=form
        )
        assert not draft_models.is_model(tmp_path / form)
    bare = tmp_path / "eagle"
    tensors, values = tiny_heads.read(bare)
    save_file({f"model.{name}": x for name, x in tensors.items()}, bare / "model.safetensors")
    assert values.pop("draft_vocab_size") == 6 and values["architectures"] == ["LlamaForCausalLM"]
    (bare / "config.json").write_text(json.dumps(values))
    assert not draft_models.is_model(bare)
    (small / "model.safetensors").unlink()
    assert not draft_models.is_model(small)
    with pytest.raises(DraftFormatError, match=r"small: expected model\.safetensors"):
        load_draft(small, target=target)
