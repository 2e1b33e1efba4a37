"""Training without stored features: the losses of stored ones, the same results after a kill, and what is refused."""

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

from eagle3_jax.config import DraftTree, MeshConfig, RunConfig, TargetConfig, run_file
from eagle3_jax.data import features
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.export import __main__ as export
from eagle3_jax.extract import __main__ as extract
from eagle3_jax.formats.heads import load_draft
from eagle3_jax.mesh import make_mesh, shardings
from eagle3_jax.models.checkpoint.fetch import Target, load_target
from eagle3_jax.models.layers import SHARDING_RULES
from eagle3_jax.runs import manifest
from eagle3_jax.train import __main__ as train
from eagle3_jax.train import in_engine
from eagle3_jax.training.checkpoint import load_head
from eagle3_jax.training.kinds.kind import kind_of


@pytest.fixture(scope="module")
def target() -> Target:
    tokenizer = tiny.make_byte_tokenizer(
        tiny.CHAT_TEMPLATE, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    return tiny.make_target(tiny.llama_config(vocab_size=len(tokenizer) + 6, max_position_embeddings=512), tokenizer)


def run_of(
    folder: pathlib.Path, target: Target, mode: str, data: int = 2, model: int = 2, **values: object
) -> RunConfig:
    """A run whose conversations are extracted for `train.features: mode`, on a mesh of data x model devices."""
    config = run_file.from_dict(
        {
            "run_dir": str(folder),
            "target": {"aux_layers": list(target.model.config.aux_layers)},
            "draft": {"vocab_size": 20},
            "mesh": {"data": data, "model": model},
            "extract": {"max_length": 64, "batch_tokens": 512, "states": "none" if mode == "online" else "bfloat16"},
            "train": {
                "features": mode,
                "ttt_steps": 2,
                "batch_size": 4,
                "row_length": 96,
                "loss_block": 32,
                "epochs": 40,
                "max_steps": 6,
                "learning_rate": 1e-3,
                "log_every": 1,
                "eval_every": 3,
                "checkpoint_every": 3,
            }
            | values,
        }
    )
    conversations = config.folder("regenerate")
    manifest.begin(conversations, {"target": target.identity})
    rng = np.random.default_rng(0)
    for split, count in (("train", 24), ("held_out", 4)):
        lines = []
        for number in range(count):
            text = ["".join(rng.choice(list("abcd e"), rng.integers(3, 20))) for _ in range(2)]
            messages = [{"role": role, "content": x} for role, x in zip(("user", "assistant"), text, strict=True)]
            line = {"id": f"{split}-{number}", "category": "chat", "messages": messages}
            lines.append(json.dumps(line | {"truncated": False, "answer_ids": None}) + "\n")
        (conversations / f"{split}.jsonl").write_text("".join(lines))
    manifest.finish(conversations, files=["train.jsonl", "held_out.jsonl"])
    extract.extract(config, target)
    return config


def metrics(config: RunConfig) -> list[dict]:
    return [json.loads(line) for line in (config.folder("train") / "metrics.jsonl").read_text().splitlines()]


def leaves(config: RunConfig, target: Target) -> list[np.ndarray]:
    head = load_head(config.folder("train"), kind_of(config, target.model.config).abstract())
    return [np.asarray(x) for x in jax.tree.leaves(head)]


@pytest.fixture(scope="module")
def online(tmp_path_factory: pytest.TempPathFactory, target: Target) -> RunConfig:
    config = run_of(tmp_path_factory.mktemp("online"), target, "online")
    train.train(config, target)
    return config


@pytest.mark.slow
def test_losses_are_those_of_stored_features(tmp_path, target, online):
    """The target in float32, on a mesh of 2 x 2; a token takes at most 10 bytes on disk beside its record's header."""
    stored = run_of(tmp_path, target, "stored")
    train.train(stored, target)
    assert len(metrics(online)) == len(metrics(stored)) == 8
    for got, expected in zip(metrics(online), metrics(stored), strict=True):
        assert (got["step"], got["kind"]) == (expected["step"], expected["kind"])
        for name in ("loss", "tau") if got["kind"] == "held_out" else ("loss",):
            assert got[name] == pytest.approx(expected[name], rel=1e-6)
    assert features.token_bytes(3, 16, "none") <= 10
    record = features.FeatureSource(online.folder("extract") / "train")[0]
    assert set(record) == {"token_ids", "loss_mask"}
    vocabularies = [(config.folder("extract") / "vocab.npz").read_bytes() for config in (online, stored)]
    assert vocabularies[0] == vocabularies[1]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param("online", marks=pytest.mark.long), "stored"])
def test_losses_of_rows_in_pieces_are_those_of_whole_rows(tmp_path, target, online, mode):
    """Rows of several conversations, in two pieces; the target's forward pass sees the pieces too."""
    config = run_of(tmp_path, target, mode, sequence=2, loss_block=16)
    train.train(config, target)
    for got, expected in zip(metrics(config), metrics(online), strict=True):
        for name in ("loss", "tau") if got["kind"] == "held_out" else ("loss", "gradient_norm"):
            assert got[name] == pytest.approx(expected[name], rel=1e-5), (name, got["step"])


@pytest.mark.long
def test_training_has_a_mesh_of_its_own(tmp_path):
    """Extracted on 2 x 2 devices, trained on 4 x 1, where the target is loaded anew: the losses of one device."""
    folder, losses = tiny.write_target(tmp_path / "target"), []
    named = TargetConfig(name=str(folder), aux_layers=(1, 2, 3))
    for data, model, own in ((1, 1, None), (2, 2, {"data": 4, "model": 1})):
        target = load_target(named, make_mesh(MeshConfig(data=data, model=model)))
        run = tmp_path / f"{data}x{model}"
        # AdamW turns a gradient's last bits into steps of the learning rate where the gradient is nearly 0.
        steps = {"max_steps": 3, "eval_every": 3, "learning_rate": 1e-4, "argmax_mask": False}
        config = run_of(run, target, "online", data, model, mesh=own, **steps)
        train.train(dataclasses.replace(config, target=named))
        losses.append([(line["kind"], line["loss"]) for line in metrics(config)])
    assert [kind for kind, _ in losses[0]] == [kind for kind, _ in losses[1]] == ["train"] * 3 + ["held_out"]
    np.testing.assert_allclose(*([loss for _, loss in of_run] for of_run in losses), rtol=1e-6)


@pytest.mark.slow
def test_stored_states_that_are_not_there_are_refused(tmp_path, target, online):
    shutil.copytree(online.folder("extract"), tmp_path / "features")
    config = run_file.from_dict(run_file.to_dict(online) | {"run_dir": str(tmp_path)})
    values = run_file.to_dict(config)
    values["train"]["features"] = "stored"
    with pytest.raises(ValueError, match="train.features: got stored, expected online: .* holds no hidden states"):
        train.train(run_file.from_dict(values), target)


@pytest.mark.long
def test_a_block_head_is_trained_online_exported_and_decodes(tmp_path, target, monkeypatch):
    """On the same token ids and loss mask. The exported head is what the trainer's engine would draft with."""
    shape = dataclasses.replace(target.model.config, aux_layers=(1, 2, 3))  # engines number boundaries from 1 on
    target = tiny.make_target(shape, target.tokenizer)
    config = run_of(tmp_path, target, "online", max_steps=2, anchors=8, eval_every=2, decode_every=2)

    def placed_target(_, mesh):
        placed = jax.device_put(target.model, shardings(target.model, mesh, SHARDING_RULES))
        return dataclasses.replace(target, model=placed)

    monkeypatch.setattr(in_engine, "load_target", placed_target)  # an engine on each row of the mesh
    monkeypatch.setattr(in_engine, "_TOKENS", 8)
    config.folder("prepare").mkdir()
    prompt = {"id": "0", "category": "chat", "messages": [{"role": "user", "content": "abc"}]}
    (config.folder("prepare") / "held_out.jsonl").write_text(json.dumps(prompt) + "\n")
    values: dict[str, Any] = run_file.to_dict(config)
    values["draft"] |= {"kind": "dflash", "num_layers": 2, "block_size": 4, "mask_token_id": 1}
    values["draft"] |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "is_causal": False}
    values["export"] |= {"format": "vllm", "dtype": "float32"}  # SGLang reads no draft vocabulary
    config = run_file.from_dict(values)
    results = train.train(config, target)
    assert len(results["held_out"]["alpha"]) == 3 and results["train"]["positions"] > 0
    assert len(results["served"]["alpha"]) == 3 and results["served"]["rounds"] > 0, "the engine drafts whole blocks"
    export.run(config, target)
    draft = load_draft(config.folder("export"), target=target)
    c = draft.head.config
    assert (c.layer_types, c.sliding_window, c.is_causal) == (("sliding_attention", "full_attention"), 5, False)
    kind, rows = kind_of(config, target.model.config), jnp.asarray(target.model.output_rows)
    trained = kind.draft(load_head(config.folder("train"), kind.abstract()), rows, draft.token_ids)
    for got, expected in zip(jax.tree.leaves(draft), jax.tree.leaves(trained), strict=True):
        np.testing.assert_array_equal(got, expected)
    prompts, params = [[5, 6, 7], [9]], SamplingParams(max_tokens=8, ignore_eos=True)
    chain = DraftTree(num_steps=3, num_draft_tokens=4)
    drafted = Engine.load(target, config.folder("export"), chain, max_length=32).generate(prompts, params)
    plain = Engine.load(target, None, max_length=32).generate(prompts, params)
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]
    assert drafted[0].stats.rounds > 0
