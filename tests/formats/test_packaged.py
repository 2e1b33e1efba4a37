"""`draft="auto"`: the head that comes for a target, and none for another."""

import dataclasses
import logging
import pathlib
import types

import jax.numpy as jnp
import pytest
import tiny
from flax import nnx

from eagle3_jax import evaluate
from eagle3_jax.config import (
    DraftConfig,
    DraftTree,
    EvaluateConfig,
    MeshConfig,
    RunConfig,
    TargetConfig,
)
from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.export import check
from eagle3_jax.formats import draft_models, packaged
from eagle3_jax.formats.heads import save_draft
from eagle3_jax.models.checkpoint.fetch import Target, load_target
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.runs import manifest
from eagle3_jax.runs.manifest import ManifestError
from eagle3_jax.serve import __main__ as serve

CHAIN = DraftTree(num_steps=2, num_draft_tokens=3)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    folder = tiny.write_target(tmp_path_factory.mktemp("target"))
    return load_target(TargetConfig(name=str(folder), aux_layers=(1, 2, 3)))


@pytest.fixture
def heads(target, tmp_path, monkeypatch) -> pathlib.Path:
    """A package with one head, for the target."""
    config = DraftHeadConfig.for_target(DraftConfig(vocab_size=64), target.model.config)
    draft = Draft(DraftHead(config, rngs=nnx.Rngs(0)), jnp.arange(64))
    save_draft(tmp_path / "heads" / "tiny", draft, target=target.model.config, dtype="bfloat16")
    manifest.begin(tmp_path / "heads" / "tiny", {"verb": "export", "target": target.identity})
    manifest.finish(tmp_path / "heads" / "tiny")
    monkeypatch.setattr(draft_models, "HEADS", tmp_path / "heads")
    return tmp_path / "heads"


def but(target: Target, **identity: object) -> Target:
    return dataclasses.replace(target, identity=target.identity | identity)


@pytest.mark.slow
def test_auto_is_the_default_and_drafts_with_the_head(heads, target, caplog):
    caplog.set_level(logging.WARNING)
    engine, plain = Engine.load(target, tree=CHAIN, max_length=64), Engine.load(target, None, max_length=64)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    (drafted,), (vanilla,) = engine.generate([[5, 6, 7]], params), plain.generate([[5, 6, 7]], params)
    assert drafted.token_ids == vanilla.token_ids
    assert engine.draft is not None and engine.draft.head.config.draft_vocab_size == 64
    assert not caplog.records


def test_other_weights_of_the_model_take_it_too_and_it_is_logged(heads, target, caplog):
    other = but(target, weights="0" * 64, name="org/original")
    engine = Engine.load(other, tree=CHAIN, max_length=64)
    assert engine.draft is not None
    (record,) = caplog.records
    assert f"trained with other weights than those of {other.identity['name']}" in record.getMessage()


@pytest.mark.parametrize("field", ["tokenizer", "chat_template", "aux_layers"])
def test_another_target_gets_none(heads, target, field):
    other = but(target, **{field: [1, 2, 4] if field == "aux_layers" else "0" * 64})
    assert packaged.packaged_head(other) is None
    assert Engine.load(other, max_length=64).draft is None
    with pytest.raises(ValueError, match="draft: got None, expected a draft head"):
        Engine.load(other, tree=CHAIN, max_length=64)
    with pytest.raises(
        ValueError, match="draft: got 'auto', expected a head's folder or 'lookup': no packaged head for"
    ):
        packaged.chosen_draft("auto", pathlib.Path("runs/x/export"), other)


def test_what_a_verb_names(heads, target, tmp_path, capsys):
    own = tmp_path / "run" / "export"
    assert packaged.chosen_draft("lookup", own, target) == ("lookup", None)
    assert packaged.chosen_draft("auto", own, target) == ("auto", heads / "tiny")
    assert packaged.chosen_draft(str(tmp_path), own, target) == (str(tmp_path), tmp_path)
    assert not capsys.readouterr().err
    manifest.begin(own, {"verb": "export", "target": target.identity})
    with pytest.raises(ManifestError, match="unfinished"):  # what the run has of its own, nothing stands for
        packaged.chosen_draft(None, own, target)
    manifest.finish(own)
    assert packaged.chosen_draft(None, own, target) == (str(own), own)


class Loaded(Exception):
    """An engine was about to draft."""


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["evaluate", "check", "serve"])
def test_the_verbs_of_a_run_without_an_export_draft_with_the_head_of_the_package(
    heads, target, tmp_path, monkeypatch, capsys, verb
):
    def load(target, draft, *_, **__):
        if draft is not None:
            raise Loaded(draft)
        return types.SimpleNamespace(generate=lambda *_: None)

    monkeypatch.setattr(Engine, "load", load)
    monkeypatch.setattr(check, "timed", lambda *_: ([], 1.0))
    config = RunConfig(
        run_dir=str(tmp_path / "run"),
        target=TargetConfig(name=str(target.folder), aux_layers=(1, 2, 3)),
        mesh=MeshConfig(data=1),
        evaluate=EvaluateConfig(max_tokens=8),
    )
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a b"}\n')
    run = {
        "evaluate": lambda target: evaluate.run(config, prompts, tmp_path / "report.json", target),
        "check": lambda target: check.run(config, prompts, "numbers", target=target),
        "serve": lambda target: serve.load(config),
    }[verb]
    with pytest.raises(Loaded, match="auto" if verb != "check" else "tiny"):
        run(target)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "no head there" in line]
    assert line.startswith(str(config.folder("export")))
    monkeypatch.setattr(draft_models, "HEADS", tmp_path / "none")
    with pytest.raises(ManifestError, match="export"):
        run(target)


def test_a_measurement_notes_the_token_map_by_its_content(heads, tmp_path):
    (tmp_path / "map.json").write_text("[1, 2]")
    noted = packaged.draft_identity("x", heads / "tiny", str(tmp_path / "map.json"))
    assert sorted(noted["files"]) == ["config.json", "model.safetensors"]
    assert packaged.draft_identity("x", heads / "tiny", None) == {"folder": "x", "files": noted["files"]}
    (tmp_path / "map.json").write_text("[1, 3]")
    assert packaged.draft_identity("x", heads / "tiny", str(tmp_path / "map.json")) != noted
    assert packaged.draft_identity("lookup", None, None) == {"folder": "lookup", "files": None}
