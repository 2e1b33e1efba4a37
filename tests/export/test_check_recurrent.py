"""Real vLLM decodes a Qwen 3.5 with a head from here, in the bfloat16 that its CPU kernels require."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tiny
from safetensors.numpy import save_file
from test_check_vllm import BLOCKS, WHOLE, train

from eagle3_jax.decoding.measure.compare import first_difference
from eagle3_jax.decoding.measure.near_tie import near_tie
from eagle3_jax.export import check
from eagle3_jax.models.checkpoint.fetch import load_target
from eagle3_jax.models.families import family_of, read_shape

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600), pytest.mark.usefixtures("plain_answers_once")]
# Heads of sizes that vLLM's kernels for CPUs take: of attention from 32 on, of Gated DeltaNet those of published ones.
SHAPE: dict[str, Any] = tiny.CONFIG | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}


def write_as(folder: pathlib.Path, shape: dict[str, Any]) -> None:
    """Takes the place of the Llama in a folder: its words, behind the layers of another family."""
    config, rng = read_shape(shape, (1, 2, 3)), np.random.default_rng(0)
    words = tiny.make_weights(tiny.make_tokenizer())
    tensors = {}
    entries = family_of(config).table(config).values()
    for name, size in (item for entry in entries for item in entry.tensors.items()):
        if "norm" in name or "scal" in name:
            tensors[name] = np.full(size, float("linear_attn" in name or "Qwen" not in shape["architectures"][0]))
        elif name.endswith(("A_log", "dt_bias")):
            tensors[name] = rng.uniform(-2, 1, size)
        else:
            scale = 0.2 if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")) else 1.0
            tensors[name] = scale * rng.normal(size=size) / np.sqrt(size[-1])
    tensors |= {name: words[name] for name in ("model.embed_tokens.weight", "lm_head.weight") if name in tensors}
    rounded = {name: np.ascontiguousarray(x.astype(ml_dtypes.bfloat16)) for name, x in tensors.items()}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(shape))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("recurrent") / "run"
    folder.mkdir()
    sizes = {"max_tokens": 96, "max_length": 192, "batch_size": 16}
    config = tiny.write_run(folder, prompts=260, target={"dtype": "bfloat16"}, regenerate=sizes)
    write_as(folder / "target", SHAPE)
    for verb in ("prepare", "regenerate"):
        tiny.verb_in(config, verb)
    return folder


HEADS = {"EAGLE-3": ("--export.format", "vllm"), "DFlash": (*BLOCKS, *WHOLE)}


@pytest.mark.parametrize("name", HEADS)
def test_both_engines_accept_as_many_drafts(answers, vllm, name, monkeypatch):
    """At every position, within two of a hundred rounds; texts part at near-ties alone."""
    config = train(answers, name, *HEADS[name])
    target, prompts = load_target(config.target), config.folder("prepare") / "held_out.jsonl"
    columns: dict[str, check.Counted] = {}
    monkeypatch.setattr(check, "_problems", lambda found: columns.update(found) or [])
    print(check.table(check.run(config, prompts, "vllm", vllm, target)))
    ours, theirs = columns["numbers"], columns["vllm"]
    here, there = (np.divide(found.counts.accepted, found.counts.rounds) for found in (ours, theirs))
    assert min(found.counts.rounds for found in (ours, theirs)) > 2000
    np.testing.assert_allclose(here, there, atol=0.02)
    asked = check._request(config, prompts, target, config.folder("export"))["prompts"]
    for one, other in ((ours.plain, ours.answers), (theirs.plain, theirs.answers), (ours.plain, theirs.plain)):
        for prompt, a, b in zip(asked, one, other, strict=True):
            if (at := first_difference(a, b)) is not None:
                assert near_tie(target.model, [*prompt, *a[:at]], (a[at], b[at])) is not None
