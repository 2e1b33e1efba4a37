"""Real vLLM runs heads of every kind and accepts, position by position, what the written files promise."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_heads

from eagle3_jax.config import RunConfig, run_file
from eagle3_jax.export import __main__ as export
from eagle3_jax.export import check

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600), pytest.mark.usefixtures("plain_answers_once")]
FLAGS = {"EAGLE-3": (), "EAGLE-3.1": ("--draft.fc-norm", "--draft.norm-output")}
VLLM = ("--export.format", "vllm")
# Heads that are trained for their own sake: what is asked of each verb from `extract` on.
OTHERS = {
    "fc_norm": ("--draft.fc-norm",),
    "norm_output": ("--draft.norm-output",),
    "qk_norm": ("--draft.qk-norm", *VLLM),
    "a window": ("--draft.sliding-window", "24", "--export.format", "speculators"),
    "qk_norm and a window": ("--draft.qk-norm", *FLAGS["EAGLE-3.1"], "--draft.sliding-window", "24", *VLLM),
    "four aux layers": ("--target.aux-layers", "0", "1", "2", "4", *VLLM),
}
WHOLE = ("--draft.vocab-size", str(tiny.CONFIG["vocab_size"]))
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write_answers(folder: pathlib.Path, layers: int) -> pathlib.Path:
    """A run up to its answers. Heads of 32: vLLM's attention on a CPU takes no smaller ones."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.CONFIG, "head_dim", 32)
        patch.setitem(tiny.CONFIG, "num_hidden_layers", layers)
        config = tiny.write_run(folder, prompts=96, regenerate={"max_tokens": 96, "max_length": 192})
    for verb in ("prepare", "regenerate"):
        tiny.verb_in(config, verb)
    return folder


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_answers(tmp_path_factory.mktemp("vllm") / "run", tiny.CONFIG["num_hidden_layers"])


def train(answers: pathlib.Path, name: str, *flags: str) -> RunConfig:
    """A trained and exported head; the configuration's paths are absolute."""
    folder = answers.with_name(name)
    shutil.copytree(answers, folder)
    for verb in ("extract", "train", "export"):
        tiny.verb_in(folder / "run.yaml", verb, *flags)
    paths = ["--run-dir", str(folder / "run"), "--target.name", str(folder / "target")]
    return run_file.load(folder / "run.yaml", [*paths, *flags, "--evaluate.max-tokens", "96"])


@pytest.fixture(scope="module", params=FLAGS)
def trained(request: pytest.FixtureRequest, answers: pathlib.Path) -> RunConfig:
    return train(answers, request.param, *FLAGS[request.param])


def counted(config: RunConfig, head: pathlib.Path, vllm: pathlib.Path, depths: int = 3) -> dict[str, Any]:
    """vLLM's column, which is also the prediction's; so small a head of blocks need not reach the end of its block."""
    prompts = config.folder("prepare") / "held_out.jsonl"
    asked = dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, draft=str(head)))
    column = check.run(asked, prompts, "vllm", vllm)["engines"]["vllm"]
    assert min(column["accepted_per_position"][:depths]) > 0, "the head is not at work"
    return column


@pytest.mark.parametrize("form", ["sglang", "vllm", "speculators"])
def test_a_trained_head_in_every_form_that_vllm_reads(trained, vllm, form, tmp_path):
    written = trained.folder("export")
    if form != "sglang":
        export.convert(written, form, tmp_path / form)
        written = tmp_path / form
    assert counted(trained, written, vllm)["tau"] > 1.5


@pytest.mark.parametrize("name", OTHERS)
def test_a_head_trained_otherwise(answers, vllm, name):
    config = train(answers, name, *OTHERS[name])
    counted(config, config.folder("export"), vllm)


def test_a_head_in_eagle_s_own_form(vllm, tmp_path):
    """The default aux layers, which are three from seven layers on, and heads that are as wide as the hidden size."""
    heads = ("--draft.num-attention-heads", "2", "--draft.num-key-value-heads", "1")
    flags = ("--target.aux-layers", "2", "4", "5", *heads, "--export.format", "eagle")
    config = train(write_answers(tmp_path / "run", layers=8), "eagle", *flags)
    counted(config, config.folder("export"), vllm)


def test_a_head_over_the_whole_vocabulary_with_its_own_lm_head_and_with_the_target_s(answers, vllm, tmp_path):
    """SGLang is told of the latter by a null, which vLLM must take too."""
    config = train(answers, "whole vocabulary", *WHOLE)
    export.convert(config.folder("export"), "vllm", tmp_path / "vllm")
    counted(config, tmp_path / "vllm", vllm)
    head = bare(config.folder("export"), tmp_path / "own")
    tiny_heads.alter(head, {"lm_head.weight": None})
    export.convert(head, "sglang", tmp_path / "sglang")
    counted(config, tmp_path / "sglang", vllm)


def bare(written: pathlib.Path, head: pathlib.Path) -> pathlib.Path:
    """A written head as one from elsewhere, to be altered."""
    head.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(written / name, head)
    return head


@pytest.mark.parametrize("trained", ["EAGLE-3"], indirect=True)
@pytest.mark.parametrize(
    "fields",
    [
        {"norm_before_residual": True},
        {"norm_before_fc": True},
        LLAMA3,
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
        {"rope_theta": 500.0},
    ],
    ids=["norm_before_residual", "norm_before_fc", "llama3", "linear", "yarn", "rope_theta"],
)
def test_a_head_of_another_architecture(trained, vllm, fields, tmp_path):
    """The trained weights drafting worse than they could: other counters, and both must have these."""
    export.convert(trained.folder("export"), "vllm", tmp_path / "vllm")
    head = bare(tmp_path / "vllm", tmp_path / "head")
    tensors, config = tiny_heads.read(head)
    if "norm_before_fc" in fields:
        width = tensors["fc.weight"].shape[1]
        tiny_heads.alter(head, {"input_norm.weight": np.linspace(0.5, 2, width, dtype=np.float32)})
    elif "norm_before_residual" not in fields:  # RoPE, in both spellings
        rope = config["rope_parameters"] | fields
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        scaled = scaling if scaling["rope_type"] != "default" else None
        fields = {"rope_parameters": rope, "rope_scaling": scaled, "rope_theta": rope["rope_theta"]}
    tiny_heads.alter(head, **fields)
    counted(trained, head, vllm)


BLOCKS = ("--draft.kind", "dflash", "--draft.num-layers", "2", "--draft.mask-token-id", "447", "--train.anchors", "32")
BLOCKS += ("--export.format", "vllm")
SLIDE = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 20, "use_sliding_window": True}
SLIDE |= {"max_window_layers": 2}


@pytest.fixture(scope="module")
def blocks(answers: pathlib.Path) -> RunConfig:
    return train(answers, "blocks", *BLOCKS, *WHOLE)


@pytest.mark.parametrize(
    "fields",
    [{}, {"is_causal": True}, SLIDE, SLIDE | {"is_causal": False}, LLAMA3],
    ids=["full", "causal", "sliding", "sliding both ways", "llama3"],
)
def test_a_block_head(blocks, vllm, fields, tmp_path):
    """Trained with full layers; what the options change must be the same in both."""
    head = bare(blocks.folder("export"), tmp_path / "head")
    if "rope_type" in fields:
        fields = {"rope_parameters": fields | {"rope_theta": 1e4}, "rope_scaling": fields}
    tiny_heads.alter(head, **fields)
    assert "k_norm" in counted(blocks, head, vllm, depths=2)["repaired"]


def test_a_block_of_16_over_a_draft_vocabulary(answers, vllm):
    config = train(answers, "blocks of 16", *BLOCKS, "--draft.block-size", "16")
    counted(config, config.folder("export"), vllm, depths=2)
