"""The printed commands name the run's target and head, and the fastest draft size that was measured."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import json
import os
import pathlib
import subprocess
import sys
from typing import NamedTuple

import pytest
import yaml
from tiny_heads import TARGET

from eagle3_jax.models.layers import RopeScaling

ROOT = pathlib.Path(__file__).parents[1]


class Printed(NamedTuple):
    stdout: str
    stderr: str


@pytest.fixture
def printed(monkeypatch):
    """What `tools/serve_*.sh CONFIG` prints, without the shell."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    draft_size = importlib.import_module("draft_size")

    def run(engine: str, config: pathlib.Path) -> Printed:
        monkeypatch.setattr(sys, "argv", ["draft_size.py", str(config), engine])
        output, warned = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(warned):
            draft_size.main()
        return Printed(output.getvalue(), warned.getvalue())

    return run


def script(name: str, config: pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "tools" / name), str(config)],
        env=os.environ | {"VENV": sys.prefix},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def write_config(folder: pathlib.Path, target: str) -> pathlib.Path:
    path = folder / "run.yaml"
    tree = {"num_steps": 2, "topk": 3, "num_draft_tokens": 6}
    path.write_text(
        yaml.safe_dump({"run_dir": str(folder / "run"), "target": {"name": target}, "evaluate": {"tree": tree}})
    )
    return path


def record(batch: int, steps: int, topk: int, tokens: int, speed: float, lookup: int = 0) -> dict[str, float]:
    sizes = {"batch_size": batch, "steps": steps, "topk": topk, "num_draft_tokens": tokens, "lookup_tokens": lookup}
    return sizes | {"speed": speed}


@pytest.mark.long
def test_the_fastest_size_is_named(tmp_path, printed):
    config = write_config(tmp_path, "org/model")
    (tmp_path / "run/benchmark").mkdir(parents=True)
    records = [
        record(1, 0, 0, 0, 50.0),
        record(1, 3, 1, 4, 60.0),
        record(1, 5, 1, 6, 65.0),
        record(1, 4, 4, 16, 70.0),
        record(1, 4, 4, 16, 90.0, lookup=5),
        record(8, 1, 1, 2, 300.0),
    ]
    (tmp_path / "run/benchmark/decode.jsonl").write_text("".join(json.dumps(x) + "\n" for x in records))
    vllm, sglang = (printed(engine, config) for engine in ("vllm", "sglang"))
    head = tmp_path / "run/export"
    assert vllm.stdout.split("'")[0].split() == ["vllm", "serve", "org/model", "\\", "--speculative-config"]
    asked = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 5}
    assert json.loads(vllm.stdout.split("'")[1]) == asked
    sizes = "--speculative-num-steps 4 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16"
    assert sizes in sglang.stdout and f"--speculative-draft-model-path {head}" in sglang.stdout
    assert not vllm.stderr and not sglang.stderr
    assert vllm.stdout.endswith(" --dtype bfloat16\n") and sglang.stdout.endswith(" --dtype bfloat16\n")


@pytest.mark.long
def test_a_race_outranks_the_table(tmp_path, printed):
    """Of `benchmark tune`: "behind" is by how much the winner was faster."""
    config = write_config(tmp_path, "org/model")
    (tmp_path / "run/benchmark").mkdir(parents=True)
    (tmp_path / "run/benchmark/decode.jsonl").write_text(json.dumps(record(1, 5, 1, 6, 65.0)) + "\n")

    def size(steps: int, topk: int, tokens: int, behind: float) -> dict[str, float]:
        sizes = {"steps": steps, "topk": topk, "num_draft_tokens": tokens, "lookup_tokens": 0}
        return sizes | {"speed": 50.0 * behind, "behind": behind}

    one = [size(0, 0, 0, 1.0), size(2, 1, 3, 1.1), size(7, 1, 8, 1.3), size(3, 3, 8, 1.05)]
    report = {"batches": [{"batch_size": 8, "sizes": [size(1, 1, 2, 1.0)]}, {"batch_size": 1, "sizes": one}]}
    (tmp_path / "run/benchmark/tune.json").write_text(json.dumps(report))
    vllm, sglang = (printed(engine, config) for engine in ("vllm", "sglang"))
    assert json.loads(vllm.stdout.split("'")[1])["num_speculative_tokens"] == 2
    sizes = "--speculative-num-steps 3 --speculative-eagle-topk 3 --speculative-num-draft-tokens 8"
    assert sizes in sglang.stdout and not vllm.stderr and not sglang.stderr


BLOCK_HEADS = {
    "DFLASH": ("dflash", {"architectures": ["DFlashDraftModel"]}, 7),
    "DSPARK": ("dspark", {"architectures": ["Qwen3DSparkModel"], "markov_rank": 4}, 8),
}


def write_block_head(folder: pathlib.Path, algorithm: str) -> pathlib.Path:
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    shape = dict.fromkeys(sizes, 8) | {"rope_theta": 1e4, "num_hidden_layers": 1}
    block = {"block_size": 8, "mask_token_id": 0, "target_layer_ids": [1]}
    head = folder / "run/export"
    head.mkdir(parents=True)
    (head / "config.json").write_text(json.dumps(shape | block | BLOCK_HEADS[algorithm][1]))
    return head


@pytest.mark.parametrize("algorithm", BLOCK_HEADS)
def test_a_block_head_is_served_with_its_whole_block(tmp_path, printed, algorithm):
    method, _, drafts = BLOCK_HEADS[algorithm]
    head = write_block_head(tmp_path, algorithm)
    vllm, sglang = (printed(engine, write_config(tmp_path, "org/model")) for engine in ("vllm", "sglang"))
    asked = {"method": method, "model": str(head), "num_speculative_tokens": drafts}
    assert json.loads(vllm.stdout.split("'")[1]) == asked
    flags = f"--speculative-algorithm {algorithm} --speculative-draft-model-path {head}"
    assert f"{flags} \\\n  --speculative-num-draft-tokens {drafts + 1} \\\n" in sglang.stdout
    assert not vllm.stderr and not sglang.stderr


def test_on_tpus(tmp_path, printed):
    """tpu-inference is vLLM's command for its own form; sglang-jax drafts chains."""
    config = write_config(tmp_path, "org/model")
    tpu, jax = (printed(engine, config) for engine in ("tpu-inference", "sglang-jax"))
    asked = json.loads(tpu.stdout.split("'")[1])
    assert asked == {"method": "eagle3", "model": f"{tmp_path}/run/export-vllm", "num_speculative_tokens": 2}
    assert f"--from {tmp_path}/run/export --to vllm {tmp_path}/run/export-vllm" in tpu.stderr
    assert "python -m sgl_jax.launch_server --model-path org/model" in jax.stdout and "--to" not in jax.stderr
    assert "--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3" in jax.stdout


@pytest.mark.parametrize("scaled", [False, True])
def test_a_block_head_on_tpus(tmp_path, printed, scaled):
    """With what makes tpu-inference rotate as the head was trained, where that can be."""
    target = dataclasses.replace(TARGET, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64) if scaled else None)
    (tmp_path / "target").mkdir()
    (tmp_path / "target/config.json").write_text(json.dumps(target.to_hf()))
    config = write_config(tmp_path, str(tmp_path / "target"))
    write_block_head(tmp_path, "DFLASH")
    tpu, jax = (printed(engine, config) for engine in ("tpu-inference", "sglang-jax"))
    section = {"rope_type": "default", "rope_theta": target.rope_theta, "scale_factor": 1.0}
    if scaled:
        assert "nothing makes tpu-inference rotate" in tpu.stderr and "--hf-overrides" not in tpu.stdout
    else:
        assert json.loads(tpu.stdout.split("'")[3]) == {"rope_theta": 1e4, "rope_parameters": section}
    sizes = "--speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 8"
    assert sizes in jax.stdout and not jax.stderr


def test_without_a_measurement_it_is_the_evaluated_one_and_a_warning_tells(tmp_path, printed):
    config = write_config(tmp_path, "SmolLM2-135M-Instruct")  # as `load_target` takes it
    vllm, sglang = (printed(engine, config) for engine in ("vllm", "sglang"))
    assert '"num_speculative_tokens": 2' in vllm.stdout
    assert "--speculative-eagle-topk 3 --speculative-num-draft-tokens 6" in sglang.stdout
    for ended in (vllm, sglang):
        assert "benchmark tune` (or decode) finds the best one" in ended.stderr
        assert "not on the hub; first: python -m eagle3_jax.export" in ended.stderr
        assert f"{tmp_path}/run/target" in ended.stdout
