"""Every verb as a user starts it, each on what the one before wrote, and the trainer's promise kept in decoding."""

import json
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from matplotlib.image import imread

from eagle3_jax.config import run_file
from eagle3_jax.data.features import FeatureSource
from eagle3_jax.formats.heads import load_draft
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.checkpoint.fetch import load_target
from eagle3_jax.models.drafts.eagle3 import DraftHead
from eagle3_jax.sequence import WHOLE
from eagle3_jax.train import __main__ as train
from eagle3_jax.training.batch import Batch, Teacher
from eagle3_jax.training.replay import replay_rounds
from eagle3_jax.training.ttt import training_time_test

pytestmark = pytest.mark.slow


def results(run: pathlib.Path, folder: str) -> dict[str, Any]:
    manifest = json.loads((run / folder / "manifest.json").read_text())
    assert manifest["finished"]
    return manifest["results"]


@pytest.mark.smoke
def test_no_verb_warns(whole_run: tiny.Run) -> None:
    assert list(whole_run.stderr) == list(tiny.VERBS)
    for verb, printed in whole_run.stderr.items():
        assert "Traceback" not in printed and "Warning" not in printed, f"{verb}: {printed}"


@pytest.mark.smoke
def test_each_verb_takes_all_that_the_one_before_made(whole_run: tiny.Run) -> None:
    run = whole_run.folder
    prompts = results(run, "prompts")["prompts"]
    conversations, features = results(run, "conversations"), results(run, "features")
    written = (run.parent / "prompts.jsonl").read_text().splitlines()
    assert prompts["train"] + prompts["held_out"] == len(written) > 90
    for split in ("train", "held_out"):
        assert conversations[split]["conversations"] == features[split]["records"] == prompts[split]
        # Every token of an answer counts in the loss, the end of the turn included; and no other.
        assert features[split]["loss_tokens"] == conversations[split]["tokens"]
    assert set(conversations["train"]["ended"]) == {"complete", "truncated"}
    report = json.loads((run / "report.json").read_text())
    assert report["drafts"]["chain"]["prompts"] == prompts["held_out"]
    assert set(report["drafts"]["chain"]["categories"]) == {"even", "odd"}
    assert min(imread(run / "report.png").shape[:2]) > 300


@pytest.mark.smoke
def test_the_trainer_s_acceptance_length_is_the_decoder_s(whole_run: tiny.Run) -> None:
    """The same rounds counted twice: by the training-time test on features, and by decoding.

    What may differ: features are stored in bfloat16, which turns near-ties of the head; and a draft that is accepted
    behind the last token that the limit allows counts in decoding, but is in no conversation.
    """
    run = whole_run.folder
    trained = results(run, "checkpoints")["held_out"]
    decoded = json.loads((run / "evaluation/chain.json").read_text())
    assert decoded["identical"] == decoded["prompts"]
    assert decoded["rounds"] > 300
    assert 1.5 < decoded["tau"] < 3.5  # far from a head that knows nothing, and from one that always hits
    assert trained["tau"] == pytest.approx(decoded["tau"], rel=0.02)
    assert trained["rounds"] == pytest.approx(decoded["rounds"], rel=0.02)
    assert trained["alpha"] == pytest.approx(decoded["alpha"], abs=0.04)


@pytest.mark.long
def test_the_engine_measures_a_training(whole_run: tiny.Run, tmp_path: pathlib.Path, monkeypatch) -> None:
    """On the very prompts that the trainer replays: what both count is the same, but for rounded features."""
    shutil.copytree(whole_run.folder.parent, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy/run/checkpoints")
    monkeypatch.chdir(tmp_path / "copy")
    asked = ["--train.decode-every", "20", "--train.max-steps", "30", "--train.decode-prompts", "1000"]
    config = run_file.load(tmp_path / "copy" / whole_run.config.name, asked)
    found = train.train(config)
    assert found["served"]["rounds"] > 200
    assert found["served"]["tau"] == pytest.approx(found["held_out"]["tau"], rel=0.03)
    assert found["served"]["alpha"] == pytest.approx(found["held_out"]["alpha"], abs=0.05)
    lines = [json.loads(line) for line in (config.folder("train") / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "served"] == [20, 30]


def test_with_features_in_float32_both_count_the_very_same_rounds(
    whole_run: tiny.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of the difference above when features are not rounded: nothing, but for the limit's last round."""
    run = whole_run.folder
    monkeypatch.chdir(run.parent)
    config = run_file.load(whole_run.config)
    target = load_target(config.target).model
    draft = load_draft(config.folder("export"), target=target.config, dtype=jnp.float32)
    head = draft.head
    assert isinstance(head, DraftHead)
    teacher = Teacher.of(target.embed[...], target.lm_head[...], draft.token_ids)
    steps, size = config.train.ttt_steps, config.extract.max_length

    @jax.jit
    def replay(rows: dict[str, jax.Array]) -> dict[str, jax.Array]:
        none = jnp.zeros(1, jnp.int32)
        hidden, aux, _ = target(rows["token_ids"], Pass(rows["positions"], none), target.empty_cache(1, size))
        batch = Batch(**rows, aux=aux, last_hidden=hidden, split=WHOLE)
        states = training_time_test(head, teacher.embed, batch, steps)
        return replay_rounds(head.lm_head[...], states, teacher, batch, size)

    rounds, accepted = 0, np.zeros(steps, int)
    source = FeatureSource(config.folder("extract") / "held_out")
    for number in range(len(source)):
        record = source[number]
        length = len(record["token_ids"])
        fields = {name: np.asarray(record[name], np.int32) for name in ("token_ids", "loss_mask", "argmax")}
        fields |= {"segment_ids": np.ones(length, np.int32), "positions": np.arange(length, dtype=np.int32)}
        sums = replay({name: jnp.asarray(np.pad(x, (0, size - length)))[None] for name, x in fields.items()})
        rounds, accepted = rounds + int(sums["rounds"]), accepted + np.asarray(sums["accepted"])
    decoded = json.loads((run / "evaluation/chain.json").read_text())
    assert rounds == decoded["rounds"]
    beyond = decoded["accepted_per_position"] - accepted
    assert ((beyond >= 0) & (beyond <= decoded["prompts"])).all(), beyond
    # Each round gives its accepted drafts and the bonus, the prefill one token; the rest is beyond the limit.
    assert decoded["tokens"] <= decoded["prompts"] + rounds + accepted.sum() <= decoded["tokens"] + decoded["prompts"]
