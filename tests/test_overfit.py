"""A head learns fifty conversations of the real model by heart: nothing between loss and decoder is in its way."""

from __future__ import annotations

import json
import pathlib

import pytest
import tiny
import yaml

CONFIG = {
    "run_dir": "run",
    "target": {"name": "smollm2-135m-instruct", "dtype": "float32"},
    "draft": {"vocab_size": 1536, "fc_norm": True, "norm_output": True},
    "prepare": {"sources": [{"kind": "packaged", "limit": 56}], "held_out": 0.1},
    "regenerate": {"temperature": 0.0, "max_tokens": 96, "max_length": 512, "batch_size": 32},
    "extract": {"max_length": 512, "batch_tokens": 2048},
    "train": {
        "ttt_steps": 5,
        "epochs": 60,
        "batch_size": 2,
        "row_length": 512,
        "learning_rate": 1.0e-3,
        "warmup_ratio": 0.05,
        "eval_every": 10_000,
    },
    "export": {"dtype": "float32"},
    "evaluate": {"tree": {"num_steps": 5, "topk": 1, "num_draft_tokens": 6}, "max_tokens": 96},
}


@pytest.mark.long
def test_fifty_conversations_are_learnt_by_heart(tmp_path: pathlib.Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    for verb in ("prepare", "regenerate", "extract", "train", "export"):
        tiny.verb_in(config, verb, timeout=3000)
    prompts = tmp_path / "run/prompts/train.jsonl"
    assert len(prompts.read_text().splitlines()) >= 50
    report = tmp_path / "report.json"
    tiny.verb_in(config, "evaluate", "--prompts", str(prompts), "--output", str(report), timeout=3000)
    found = json.loads(report.read_text())
    assert found["identical"] == found["prompts"] >= 50
    assert found["tau"] >= 4.5, found  # of 6 at most: drafts behind the answer's end count as refused
