"""From a checkpoint to a folder that is whole, verified, and not made twice."""

import dataclasses
import json
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_families
from flax import nnx

from eagle3_jax.config import ConfigError, DraftConfig, RunConfig, run_file
from eagle3_jax.data import vocab
from eagle3_jax.export import __main__ as export
from eagle3_jax.formats.heads import load_draft
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.families import FAMILIES
from eagle3_jax.models.families.llama import Llama
from eagle3_jax.runs import disk, manifest
from eagle3_jax.training.checkpoint import Checkpoints
from eagle3_jax.training.kinds.kind import kind_of
from eagle3_jax.training.state import TrainState

TARGET = tiny.llama_config(num_hidden_layers=8, eos_token_ids=(1, 2), aux_layers=(2, 4, 5))
IDS = np.array([1, 2, 7, 30], np.int32)
IDENTITY = tiny.identity(TARGET.aux_layers)


@pytest.fixture(scope="module")
def target() -> Target:
    """Nothing but an architecture: no parameter is needed."""
    return Target(nnx.eval_shape(lambda: Llama(TARGET, rngs=nnx.Rngs(0))), None, IDENTITY, pathlib.Path())


def head(seed: int) -> DraftHead:
    config = DraftHeadConfig.for_target(DraftConfig(vocab_size=4), TARGET)
    return DraftHead(config, rngs=nnx.Rngs(seed))


def leaves(draft: Draft) -> list[np.ndarray]:
    return jax.tree.leaves((draft.head, draft.token_ids))


def save_checkpoint(config: RunConfig, step: int, tau: float | None = None, seed: int = 0) -> None:
    with Checkpoints(config.folder("train"), keep=2) as checkpoints:
        state = TrainState(jnp.array(step, jnp.int32), head(seed or step), {"count": jnp.zeros(())})
        checkpoints.save(state, tau)


@pytest.fixture
def config(tmp_path: pathlib.Path) -> RunConfig:
    """A run that was trained for 3 steps and is not finished."""
    values = {"run_dir": str(tmp_path / "run"), "draft": {"vocab_size": 4}, "export": {"dtype": "float32"}}
    config = run_file.from_dict(values)
    manifest.begin(config.folder("train"), {"verb": "train", "target": IDENTITY})
    vocab.save(config.folder("train"), IDS)
    save_checkpoint(config, 3)
    return config


def test_the_newest_checkpoint_becomes_a_serving_checkpoint(
    config: RunConfig, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(config, 5)
    export.run(config, target)
    assert "its last checkpoint is of step 5" in capsys.readouterr().err
    folder = config.folder("export")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "manifest.json", "model.safetensors"]
    assert not [path for path in folder.parent.iterdir() if path.name.endswith(".partial")]
    draft = load_draft(folder, target=TARGET)
    assert draft.token_ids.tolist() == IDS.tolist()
    for got, expected in zip(jax.tree.leaves(draft.head), jax.tree.leaves(head(5)), strict=True):
        np.testing.assert_array_equal(got, expected)
    made = manifest.read(folder, made_by="export")
    assert made["identity"]["target"] == IDENTITY and made["identity"]["step"] == 5
    assert made["files"]["model.safetensors"] == disk.digest(folder / "model.safetensors")
    assert made["results"]["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(head(5)))
    config_json = json.loads((folder / "config.json").read_text())
    assert config_json["eos_token_id"] == [1, 2]
    assert config_json["max_position_embeddings"] == TARGET.max_position_embeddings  # served without an override


@pytest.mark.slow
def test_the_checkpoint_that_the_engine_accepted_most_of_goes_first(
    config: RunConfig, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(config, 4, tau=2.5)
    save_checkpoint(config, 5, tau=2.25)
    save_checkpoint(config, 6)
    export.run(config, target)
    assert "exporting step 4, acceptance length 2.50" in capsys.readouterr().err
    draft = load_draft(config.folder("export"), target=TARGET)
    for got, expected in zip(jax.tree.leaves(draft.head), jax.tree.leaves(head(4)), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.slow
def test_a_second_run_does_nothing_and_a_later_step_is_not_mixed_in(
    config: RunConfig, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    export.run(config, target)
    before = (config.folder("export") / "model.safetensors").stat().st_mtime_ns
    manifest.finish(config.folder("train"))
    export.run(config, target)
    assert "nothing to do" in capsys.readouterr().err
    assert (config.folder("export") / "model.safetensors").stat().st_mtime_ns == before
    save_checkpoint(config, 4)
    with pytest.raises(
        manifest.ManifestError, match=r"(?s)step: found 3, expected 4.*another form: --from .* --to FORM"
    ):
        export.run(config, target)


def test_what_lies_there_is_left_alone_and_a_run_without_a_checkpoint_is_refused(config, target, tmp_path) -> None:
    config.folder("export").mkdir()
    (config.folder("export") / "notes.txt").write_text("mine")
    with pytest.raises(manifest.ManifestError, match="something else than an export"):
        export.run(config, target)
    assert [path.name for path in config.folder("export").iterdir()] == ["notes.txt"]
    config = RunConfig(run_dir=str(tmp_path / "empty"))
    with pytest.raises(manifest.ManifestError, match=r"expected the output of `python -m eagle3_jax.train`"):
        export.run(config, target)
    manifest.begin(config.folder("train"), {"verb": "train", "target": IDENTITY})
    with pytest.raises(ValueError, match="no checkpoint yet"):
        export.run(config, target)


@pytest.mark.slow
def test_the_head_of_another_training_is_not_taken_for_this_one(config: RunConfig, target: Target) -> None:
    """Trained again in the same folder from the same identity: nothing but the weights would tell."""
    export.run(config, target)
    shutil.rmtree(config.folder("train") / "3")
    save_checkpoint(config, 3, seed=4)
    with pytest.raises(manifest.ManifestError, match=r"\n  head\.[\w.]+: found \d+, expected \d+"):
        export.run(config, target)


def test_another_vocabulary_is_not_mixed_in(config: RunConfig, target: Target) -> None:
    """It is as long as the head's: nothing else would tell."""
    folder = config.folder("train")
    manifest.finish(folder, files=("vocab.npz",))
    vocab.save(folder, IDS + 1)
    with pytest.raises(manifest.ManifestError, match=r"vocab.npz"):
        export.run(config, target)
    (folder / "vocab.npz").write_bytes(b"PK")
    manifest.finish(folder)
    with pytest.raises(ValueError, match=r"vocab.npz: damaged or unreadable"):
        export.run(config, target)
    assert not config.folder("export").exists()


@pytest.mark.slow
def test_the_form_that_names_the_target_names_it_as_engines_do(config: RunConfig, target: Target, capsys: Any) -> None:
    """The hub's id, without the commit; a warning names the packaged target, which no engine knows."""
    own = dataclasses.replace(config.export, format="speculators")
    for name, warned in (("org/model", False), ("smollm2-135m-instruct", True)):
        export.run(
            dataclasses.replace(config, export=own), dataclasses.replace(target, identity=IDENTITY | {"name": name})
        )
        written = json.loads((config.folder("export") / "config.json").read_text())
        assert written["speculators_config"]["verifier"]["name_or_path"] == name
        words = "'smollm2-135m-instruct', which vLLM cannot find: `vllm serve` needs"
        assert (words in capsys.readouterr().err) == warned
        shutil.rmtree(config.folder("export"))
    with pytest.raises(ConfigError, match=r"export.format"):
        run_file.from_dict(run_file.to_dict(config) | {"export": {"format": "gguf"}})


@pytest.mark.slow
def test_an_mtp_layer_is_exported_as_its_target_s_own(config: RunConfig) -> None:
    family = next(x for x in FAMILIES if x.config.architecture == "MiMoForCausalLM")
    target = Target(tiny_families.make(family), None, IDENTITY, pathlib.Path())
    run = dataclasses.replace(config, draft=DraftConfig(kind="mtp"))
    layer = kind_of(run, target.model.config).build(nnx.Rngs(5))
    with Checkpoints(config.folder("train"), keep=2) as checkpoints:
        checkpoints.save(TrainState(jnp.array(7, jnp.int32), layer, {"count": jnp.zeros(())}), None)
    export.run(run, target)
    made = manifest.read(run.folder("export"), made_by="export")
    assert made["identity"]["step"] == 7 and made["results"]["parameters"] == sum(
        x.size for x in jax.tree.leaves(layer)
    )
    draft = load_draft(run.folder("export"), target=target)
    np.testing.assert_array_equal(draft.head.fc[...], layer.fc[...])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "form"), [("eagle3", "sglang"), ("dspark", "vllm"), ("dflash", "speculators")])
def test_a_head_has_rope_of_its_own_and_none_of_a_target_s_that_rotates_a_part(
    config: RunConfig, capsys: Any, kind: str, form: Any
) -> None:
    family = next(x for x in FAMILIES if x.config.architecture == "Qwen3_5ForCausalLM")
    target = Target(tiny_families.make(family), None, IDENTITY, pathlib.Path())
    draft = DraftConfig(kind=kind, vocab_size=4, head_dim=16, rope_theta=5e4, mask_token_id=59)
    run = dataclasses.replace(config, draft=draft, export=dataclasses.replace(config.export, format=form))
    head = kind_of(run, target.model.config).build(nnx.Rngs(5))
    with Checkpoints(config.folder("train"), keep=2) as checkpoints:
        checkpoints.save(TrainState(jnp.array(7, jnp.int32), head, {"count": jnp.zeros(())}), None)
    export.run(run, target)
    expected = "the draft rotates whole heads, by base 50000; the target rotates 0.5 of each of its own"
    assert expected in capsys.readouterr().err
    text = (run.folder("export") / "config.json").read_text()
    assert not any(word in text for word in ("partial_rotary_factor", "mrope", "proportional"))
    values = json.loads(text)
    layer = values.get("transformer_layer_config", values)
    assert (layer["head_dim"], layer["rope_theta"]) == (16, 5e4)


@pytest.mark.slow
def test_a_head_is_converted_without_its_target_and_keeps_to_it(
    config: RunConfig, target: Target, tmp_path: pathlib.Path, capsys: Any
) -> None:
    named = dataclasses.replace(target, identity=IDENTITY | {"name": "org/target"})
    export.run(config, named)
    source, folder = config.folder("export"), tmp_path / "speculators"
    export.main(["--from", str(source), "--to", "speculators", str(folder)])
    assert "served by vLLM" in capsys.readouterr().err.splitlines()[-1]
    for one, other in zip(
        leaves(load_draft(source, target=TARGET)), leaves(load_draft(folder, target=TARGET)), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    written = json.loads((folder / "config.json").read_text())
    assert written["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    other = dataclasses.replace(target, identity=IDENTITY | {"tokenizer": "0" * 64})
    with pytest.raises(manifest.ManifestError, match=r"target\.tokenizer: found"):
        load_draft(folder, target=other)
    (source / "manifest.json").unlink()  # as a head from elsewhere
    export.main([f"--from={source}", "--to", "vllm", str(tmp_path / "vllm")])
    assert sorted(path.name for path in (tmp_path / "vllm").iterdir()) == ["config.json", "model.safetensors"]


def test_a_conversion_that_cannot_be_is_one_sentence_and_leaves_nothing(
    config: RunConfig, target: Target, tmp_path: pathlib.Path, capsys: Any
) -> None:
    export.run(config, target)
    source = str(config.folder("export"))
    for to, message in (
        (["gguf", str(tmp_path / "new")], r"--to: got 'gguf', expected one of sglang, vllm, speculators, eagle"),
        (["vllm"], r"--to"),
    ):
        with pytest.raises(SystemExit):
            export.main(["--from", source, "--to", *to])
        assert message in capsys.readouterr().err
    with pytest.raises(
        SystemExit, match=r"eagle3_jax.export: .*: exists already, expected a new folder: remove it, or"
    ):
        export.main(["--from", source, "--to", "vllm", source])
    with pytest.raises(SystemExit, match=r"eagle3_jax.export: .*nothing.*: expected model.safetensors"):
        export.main(["--from", str(tmp_path / "nothing"), "--to", "vllm", str(tmp_path / "new")])
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("way", "flags"),
    [
        (["--check", "vllm"], ["--vllm", "--sglang", "--expect", "--prompts", "--config"]),
        (["--push-to-hub", "me/head"], ["--upload", "--config"]),
        (["--write-target", "out"], ["--config"]),
        (["--from", "head"], ["--to"]),
        ([], ["--from", "--check", "--write-target", "--push-to-hub"]),
    ],
)
def test_help_behind_another_way_names_its_flags(capsys, way, flags):
    with pytest.raises(SystemExit):
        export.main([*way, "--help"])
    printed = capsys.readouterr().out
    assert all(flag in printed for flag in [*way[:1], *flags])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--check vllm", "--check: got it without --prompts, expected both"),
        ("--expect x", "--expect: got it without --check, expected both"),
        ("--upload", "--upload: got it without --push-to-hub, expected both"),
        ("--to vllm x", "--to: got it without --from, expected both"),
        ("--push-to-hub me/x --write-target y", "--push-to-hub: got it with --write-target, expected one of them"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(tmp_path, words, message):
    (tmp_path / "x.yaml").write_text("run_dir: x\n")
    with pytest.raises(SystemExit, match=f"^eagle3_jax.export: {message}$"):
        export.main(["--config", str(tmp_path / "x.yaml"), *words.split()])
