"""The train verb on random features of a tiny target: it learns, resumes bit-equally, and refuses what does not fit."""

import dataclasses
import json
import pathlib
import shutil
import sys
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from flax import nnx

from eagle3_jax.config import DraftConfig, RunConfig, TrainConfig, run_file
from eagle3_jax.data import features, vocab
from eagle3_jax.formats.heads import save_draft
from eagle3_jax.models.checkpoint.fetch import Target, TargetError
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.runs import command, disk, manifest
from eagle3_jax.train import __main__ as train
from eagle3_jax.training.checkpoint import CheckpointError, Checkpoints, load_head
from eagle3_jax.training.kinds import eagle3
from eagle3_jax.training.kinds.kind import kind_of

VOCAB, DRAFT_VOCAB = 60, 40


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.make_target(tiny.llama_config(vocab_size=VOCAB, aux_layers=(1, 2, 3)))


def record(target: Target, length: int, rng: np.random.Generator) -> features.Record:
    """A sequence that counts up: what comes next can be learned."""
    token_ids = ((rng.integers(VOCAB) + np.arange(length)) % VOCAB).astype(np.int32)
    loss_mask = np.ones(length, np.uint8)
    loss_mask[:3] = 0
    embed = np.asarray(target.model.embed[...])
    following = (token_ids + 1) % VOCAB
    last_hidden = 40 * embed[following] / np.linalg.norm(embed[following], axis=1, keepdims=True)
    return {
        "token_ids": token_ids,
        "loss_mask": loss_mask,
        "aux": (50 * np.tile(embed[token_ids], 3)).astype(ml_dtypes.bfloat16),
        "last_hidden": last_hidden.astype(ml_dtypes.bfloat16),
        "argmax": following,
    }


def prepared(folder: pathlib.Path, target: Target, **values) -> RunConfig:
    """A config whose features exist, as `extract` leaves them."""
    config = run_file.from_dict(
        {
            "run_dir": str(folder),
            "target": {"aux_layers": [1, 2, 3]},
            "draft": {"vocab_size": DRAFT_VOCAB},
            "mesh": {"data": 2, "model": 2},
            "train": {
                "ttt_steps": 2,
                "batch_size": 2,
                "row_length": 32,
                "loss_block": 16,
                "epochs": 40,
                "max_steps": 6,
                "learning_rate": 1e-2,
                "log_every": 2,
                "eval_every": 4,
                "checkpoint_every": 3,
            }
            | values,
        }
    )
    source = config.folder("extract")
    manifest.begin(source, {"target": target.identity})
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("held_out", 3)):
        (source / split).mkdir(parents=True)
        lengths = rng.integers(6, 40, count)
        features.write_shard(features.shard_path(source / split, 0, 1), (record(target, n, rng) for n in lengths))
    np.savez(source / "vocab.npz", token_ids=np.arange(DRAFT_VOCAB, dtype=np.int32))
    manifest.finish(source, files=("vocab.npz",))
    return config


def with_held_out_prompts(config: RunConfig) -> pathlib.Path:
    """The file that the engine reads in a training with `decode_every`."""
    config.folder("prepare").mkdir()
    return tiny.write_prompts(config.folder("prepare") / "held_out.jsonl", 2)


def leaves(config: RunConfig, target: Target) -> list[np.ndarray]:
    head = load_head(config.folder("train"), kind_of(config, target.model.config).abstract())
    return [np.asarray(x) for x in jax.tree.leaves(head)]


class Killed(Exception):
    pass


@pytest.fixture(scope="module")
def finished(tmp_path_factory, target):
    config = prepared(tmp_path_factory.mktemp("run"), target)
    return config, train.train(config, target)


@pytest.mark.slow
def test_a_run_writes_results_metrics_and_checkpoints(finished, target):
    config, results = finished
    folder = config.folder("train")
    assert results["steps"] == 6
    assert manifest.read(folder, made_by="train")["results"] == json.loads(json.dumps(results))
    assert len(results["held_out"]["accuracy"]) == 2
    first, second = results["held_out"]["alpha"]
    assert results["held_out"]["tau"] == pytest.approx(1 + first + first * second)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["kind"]) for line in lines] == [
        (2, "train"), (3, "train"), (4, "train"), (4, "held_out"), (6, "train"), (6, "held_out")
    ]  # fmt: skip
    assert all(np.isfinite(line["loss"]) for line in lines)
    assert lines[-2]["accuracy"][0] > lines[0]["accuracy"][0]  # it learns to count
    assert list((folder / "tensorboard").iterdir())
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.latest == 6
    assert all(np.isfinite(leaf).all() for leaf in leaves(config, target))


@pytest.mark.slow
def test_finished_work_is_not_done_again(finished, target, capsys):
    config, results = finished
    assert train.train(config, target) == json.loads(json.dumps(results))
    assert "finished already" in capsys.readouterr().err


def kill(config: RunConfig, target: Target, monkeypatch) -> None:
    """Trains up to the first checkpoint."""
    save = Checkpoints.save

    def save_and_die(self, *state):
        save(self, *state)
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Checkpoints, "save", save_and_die)
        train.train(config, target)


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_equally(finished, target, tmp_path, monkeypatch):
    """It is stopped first, which saves behind the step; then killed behind its next checkpoint."""
    whole, _ = finished
    config = prepared(tmp_path, target)
    with monkeypatch.context() as patch, pytest.raises(command.Stopped):
        patch.setattr(train, "_stop_asked", lambda step: step == 2)
        train.train(config, target)
    assert [row["step"] for row in rows_of(config)] == [2]
    for latest in (2, 3):
        with Checkpoints(config.folder("train")) as checkpoints:
            assert checkpoints.latest == latest
        if latest == 2:
            kill(config, target, monkeypatch)
    with pytest.raises(manifest.ManifestError, match="unfinished"):
        manifest.read(config.folder("train"), made_by="train")
    train.train(config, target)
    assert rows_of(config) == rows_of(whole), "what is written again is there once"
    for one, other in zip(leaves(whole, target), leaves(config, target), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_a_block_head_trains_replays_its_rounds_and_goes_on_bit_equally(target, tmp_path, monkeypatch):
    """Anchors are drawn by the step's number."""
    runs = []
    for name in ("whole", "killed"):
        config = prepared(tmp_path / name, target, max_steps=4, checkpoint_every=2, anchors=6)
        head = {"kind": "dspark", "vocab_size": DRAFT_VOCAB, "num_layers": 1, "block_size": 3, "mask_token_id": 59}
        runs.append(run_file.from_dict(run_file.to_dict(config) | {"draft": head}))
    results = train.train(runs[0], target)
    assert len(results["held_out"]["alpha"]) == len(results["train"]["accuracy"]) == 3
    assert 1 <= results["held_out"]["tau"] <= 4
    kill(runs[1], target, monkeypatch)
    train.train(runs[1], target)
    for one, other in zip(*(leaves(config, target) for config in runs), strict=True):
        np.testing.assert_array_equal(one, other)


def rows_of(config: RunConfig) -> list[dict]:
    """The rows of the metrics, without what a clock says."""
    clock = ("tokens_per_second", "data_wait", "teraflops")
    lines = (config.folder("train") / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) | dict.fromkeys(clock, 0) for line in lines]


@pytest.mark.slow
def test_no_row_waits_for_a_step_in_flight_and_all_rows_are_there_before_a_checkpoint(target, tmp_path, monkeypatch):
    """The same rows as where each step is waited for."""
    sizes = {"eval_every": 100, "checkpoint_every": 5, "max_steps": 8}
    config = prepared(tmp_path / "one", target, **sizes)
    steps: dict[int, int] = {}  # what a step returned -> its number
    held, waited = [], []  # what is held keeps its id
    begun, save = train._Pending, Checkpoints.save

    def begin(sums, *rest):
        held.append(sums["loss"])
        steps[id(sums["loss"])] = len(held)
        return begun(sums, *rest)

    def watched(of):
        def call(tree):
            newest = len(steps)
            asked = [steps[id(x)] for x in jax.tree.leaves(tree) if id(x) in steps]
            waited.extend(step <= newest - train.IN_FLIGHT for step in asked if newest not in (5, 8))
            return of(tree)

        return call

    def check_and_save(self, state, *tau):
        assert rows_of(config)[-1]["step"] == int(state.step)
        save(self, state, *tau)

    with monkeypatch.context() as patch:
        patch.setattr(train, "_Pending", begin)
        patch.setattr(jax, "block_until_ready", watched(jax.block_until_ready))
        patch.setattr(jax, "device_get", watched(jax.device_get))
        patch.setattr(Checkpoints, "save", check_and_save)
        train.train(config, target)
    assert waited and all(waited)
    assert [row["step"] for row in rows_of(config) if row["kind"] == "train"] == [2, 4, 5, 6, 8]
    monkeypatch.setattr(train, "IN_FLIGHT", 0)
    at_once = prepared(tmp_path / "two", target, **sizes)
    train.train(at_once, target)
    assert rows_of(at_once) == rows_of(config)


@pytest.mark.long
def test_killed_before_the_last_word_it_still_knows_its_results(target, tmp_path, monkeypatch):
    config = prepared(tmp_path, target)
    finish = manifest.finish
    monkeypatch.setattr(manifest, "finish", lambda *_, **results: (_ for _ in ()).throw(Killed(results)))
    with pytest.raises(Killed) as killed:
        train.train(config, target)
    monkeypatch.setattr(manifest, "finish", finish)
    results = train.train(config, target)
    expected = killed.value.args[0]
    assert results["train"] == expected["train"] and results["held_out"] == expected["held_out"]


@pytest.mark.long
@pytest.mark.parametrize("split", ["train", "held_out"])
def test_a_nan_stops_with_the_records_named_and_the_last_checkpoint_stays(tmp_path, target, split, capsys):
    """One record holds a NaN: of its batch all records are named; the checkpoint before it is kept as it was."""
    config = prepared(tmp_path, target, max_steps=None, epochs=1, checkpoint_every=1, log_every=100, eval_every=100)
    folder = config.folder("extract") / split
    source = features.FeatureSource(folder)
    records = [dict(source[i]) for i in range(len(source))]
    records[1]["aux"] = np.full_like(records[1]["aux"], np.nan)
    ids = {"ids": [f"chat-{i}" for i in range(len(records))]}
    features.write_shard(features.shard_path(folder, 0, 1), records, ids)
    with pytest.raises(ValueError, match=rf"{split}, batch \d+: loss nan.*chat-1, {split}/00000-of-00001") as stopped:
        train.train(config, target)
    assert capsys.readouterr().err.endswith("\n")  # the progress bar is closed: the next message has a line of its own
    with Checkpoints(config.folder("train")) as checkpoints:
        step = checkpoints.latest
    batch = int(str(stopped.value).split("batch ")[1].split(":")[0])
    total = json.loads((config.folder("train") / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert step == (batch - 1 or None) if split == "train" else step == total - 1
    if step:
        assert all(np.isfinite(leaf).all() for leaf in leaves(config, target))


@pytest.mark.slow
def test_what_trains_nothing_is_refused(tmp_path, target):
    """A loss of exactly 0 would look like a head that knows all."""
    config = prepared(tmp_path, target)
    folder = config.folder("extract") / "train"
    records = [dict(record) for record in features.FeatureSource(folder)]
    for record in records:
        record["argmax"] = np.full_like(record["argmax"], DRAFT_VOCAB)  # the first that is not in it
    features.write_shard(features.shard_path(folder, 0, 1), records)
    with pytest.raises(ValueError, match=rf"first 2 batches: got no position that trains.*{DRAFT_VOCAB} of the draft"):
        train.train(config, target)
    with Checkpoints(config.folder("train")) as checkpoints:
        assert checkpoints.latest is None
    other = dataclasses.replace(config, run_dir=str(tmp_path / "unmasked"))
    other = dataclasses.replace(other, train=dataclasses.replace(config.train, argmax_mask=False, max_steps=2))
    shutil.copytree(config.folder("extract"), other.folder("extract"))
    assert train.train(other, target)["train"]["positions"] > 0


@pytest.mark.slow
def test_a_run_without_held_out_records(tmp_path, target):
    config = prepared(tmp_path, target, max_steps=2)
    folder = config.folder("extract") / "held_out"
    features.write_shard(features.shard_path(folder, 0, 1), [])
    assert train.train(config, target)["held_out"] == {}
    kinds = {json.loads(line)["kind"] for line in (config.folder("train") / "metrics.jsonl").read_text().splitlines()}
    assert kinds == {"train"}


@pytest.mark.long
def test_the_lk_loss_begins_at_its_step_and_is_still_there_after_a_stop(finished, target, tmp_path, monkeypatch):
    """Up to step 3 of 6 a run with `lk` is the one without; stopped behind step 4, it goes on with another loss."""
    plain, _ = finished
    config = prepared(tmp_path, target, loss="lk", lk_from=0.5)
    monkeypatch.setattr(train, "_stop_asked", lambda step: step == 4)
    with pytest.raises(command.Stopped):
        train.train(config, target)
    monkeypatch.undo()
    train.train(config, target)

    def losses(config):
        lines = map(json.loads, (config.folder("train") / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}

    ours, without = losses(config), losses(plain)
    np.testing.assert_allclose([ours[2], ours[3]], [without[2], without[3]], rtol=1e-5)
    assert ours[6] < 0.9 * without[6]


@pytest.mark.slow
def test_a_warm_start_begins_with_the_head_and_its_vocabulary(tmp_path):
    target = tiny.make_target(tiny.llama_config(vocab_size=VOCAB, num_hidden_layers=8, aux_layers=(2, 4, 5)))
    head_config = DraftHeadConfig.for_target(DraftConfig(vocab_size=DRAFT_VOCAB), target.model.config)
    head = DraftHead(head_config, rngs=nnx.Rngs(7))
    token_ids = np.arange(20, 20 + DRAFT_VOCAB, dtype=np.int32)  # not the features'
    draft = Draft(head, jnp.asarray(token_ids))
    save_draft(tmp_path / "head", draft, target=target.model.config, dtype="float32")
    still = {"max_steps": 1, "learning_rate": 1e-12, "warm_start": str(tmp_path / "head")}
    config = prepared(tmp_path / "run", target, **still)
    train.train(config, target)
    for one, other in zip(jax.tree.leaves(head), leaves(config, target), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-9)
    np.testing.assert_array_equal(vocab.load(config.folder("train")), token_ids)
    begun_with = manifest.load(config.folder("train") / manifest.NAME)["identity"]["warm_start"]
    assert begun_with.keys() == {"config.json", "model.safetensors"}
    other = prepared(tmp_path / "other", target, **still)
    other = run_file.from_dict(run_file.to_dict(other) | {"draft": {"vocab_size": DRAFT_VOCAB, "norm_output": True}})
    with pytest.raises(ValueError, match=r"train.warm_start .*another shape:\n  norm_output: got False, expected True"):
        train.train(other, target)
    missing = prepared(tmp_path / "missing", target, **still | {"warm_start": str(tmp_path / "none")})
    with pytest.raises(
        TargetError, match=r"train\.warm_start: got '.*none', no such folder, and no hub id; expected t"
    ):
        train.train(missing, target)
    for refused in (other, missing):
        assert not refused.folder("train").exists(), "refused before the folder is claimed: a corrected run may use it"


def test_a_training_is_told_by_the_files_of_a_named_head_and_by_what_its_taus_are_of(tmp_path, target, monkeypatch):
    """Another head under the name, or other prompts to measure with, is another training."""

    class Claimed(Exception):
        pass

    def claim(folder, identity, **_):
        raise Claimed(identity)

    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text("{}")
    config = prepared(tmp_path, target, warm_start="org/head", decode_every=2, decode_prompts=5)
    held_out = with_held_out_prompts(config)
    monkeypatch.setattr(train.draft_models, "fetch", lambda name, **_: head)
    monkeypatch.setattr(eagle3.Eagle3, "warm", lambda *_: None)
    monkeypatch.setattr(train.manifest, "claim", claim)

    def identity_of(config):
        with pytest.raises(Claimed) as claimed:
            train.train(config, target)
        return claimed.value.args[0]

    identity = identity_of(config)
    assert list(identity["warm_start"]) == ["config.json"]
    assert identity["train"]["decode_prompts"] == 5 and "decode_every" not in identity["train"]
    assert identity["served_prompts"] == disk.digest(held_out)
    unserved = dataclasses.replace(config, train=dataclasses.replace(config.train, decode_every=None))
    assert identity_of(unserved) == {name: x for name, x in identity.items() if name != "served_prompts"}
    held_out.unlink()
    with pytest.raises(manifest.ManifestError, match=r"prompts/held_out.jsonl: not found, expected .*prepare"):
        train.train(config, target)


def test_another_training_on_the_same_features_takes_them_by_a_link(tmp_path, target, monkeypatch):
    config = prepared(tmp_path / "run", target)
    manifest.begin(config.folder("train"), {"verb": "train"})
    message = rf"made from something else.*seed.*ln -s {config.folder('extract')} RUN_DIR/features"
    with pytest.raises(manifest.ManifestError, match=f"(?s){message}"):
        train.train(config, target)
    other = dataclasses.replace(config, run_dir=str(tmp_path / "other"))
    (tmp_path / "other").mkdir()
    other.folder("extract").symlink_to(config.folder("extract"))
    monkeypatch.setattr(train, "_train", lambda config, *_: {"of": config.run_dir})
    assert train.train(other, target) == {"of": other.run_dir}


def test_a_warm_start_is_a_head_of_eagle3(target, monkeypatch):
    monkeypatch.setattr(eagle3.heads, "load_draft", lambda *_, **__: types.SimpleNamespace(head=target.model))
    head_config = DraftHeadConfig.for_target(DraftConfig(vocab_size=DRAFT_VOCAB), target.model.config)
    with pytest.raises(ValueError, match=r"train.warm_start org/head: got Llama, expected a head of EAGLE-3"):
        eagle3.Eagle3(head_config, TrainConfig()).warm("org/head", target)


@pytest.mark.slow
def test_the_checkpoint_that_the_engine_accepts_most_of_is_kept_and_exported(tmp_path, target, monkeypatch):
    class Engine:
        taus = iter([1.5, 2.5, 2.0])

        def __init__(self, *_) -> None:
            pass

        def measure(self, head) -> dict:
            return {"tau": next(self.taus), "alpha": [0.5, 0.5], "rounds": 9}

    monkeypatch.setattr(train, "Served", Engine)
    monkeypatch.setattr(train, "KEPT_CHECKPOINTS", 1)
    config = prepared(tmp_path, target, decode_every=2, checkpoint_every=6)
    with_held_out_prompts(config)
    assert train.train(config, target)["served"]["tau"] == 2.0
    folder = config.folder("train")
    with Checkpoints(folder) as checkpoints:
        assert (checkpoints.best, checkpoints.latest) == ((4, 2.5), 6)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["tau"]) for line in lines if line["kind"] == "served"] == [(2, 1.5), (4, 2.5), (6, 2.0)]
    shapes = kind_of(config, target.model.config).abstract()
    best, latest = (jax.tree.leaves(load_head(folder, shapes, step)) for step in (4, None))
    assert any((np.asarray(one) != np.asarray(other)).any() for one, other in zip(best, latest, strict=True))


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (
            "draft",
            {"kind": "dflash", "mask_token_id": 1},
            "train.accumulate: got 2, expected 1 for draft.kind 'dflash'",
        ),
        ("train", {"batch_size": 3}, "train.batch_size: got 3, expected a multiple of 4"),
        ("train", {"sequence": 4}, "train.sequence: got 4, expected a divisor of the mesh's data axis, 2"),
        ("train", {"sequence": 2, "batch_size": 3}, r"a multiple of 2 \(the mesh's data axis by train.sequence, train"),
        ("train", {"wandb": "heads"}, "train.wandb: got 'heads', expected the package: pip install wandb"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_the_folder_is_claimed(
    tmp_path, target, monkeypatch, section, values, message
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = run_file.to_dict(prepared(tmp_path, target, batch_size=4, accumulate=2))
    config[section] |= values
    config = run_file.from_dict(config)
    with pytest.raises(ValueError, match=message):
        train.train(config, target)
    assert not config.folder("train").exists()


def test_no_checkpoint_is_an_error_with_the_verb_in_it(tmp_path, target):
    shapes = kind_of(prepared(tmp_path, target), target.model.config).abstract()
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match=r"eagle3_jax.train"):
            load_head(folder, shapes)


def test_the_command_line_says_what_is_wrong(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(f"run_dir: {tmp_path}\n")
    with pytest.raises(SystemExit) as error:
        train.main(["--config", str(path)])
    assert "python -m eagle3_jax.extract" in str(error.value)
