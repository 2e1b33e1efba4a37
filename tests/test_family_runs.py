"""Every family of targets through the verbs: a head learns from its states, is exported, and changes no token."""

import json
import pathlib
from typing import Any

import pytest
import tiny_families
import tiny_heads

from eagle3_jax import evaluate
from eagle3_jax.config import RunConfig, run_file
from eagle3_jax.export import __main__ as export
from eagle3_jax.extract import __main__ as extract
from eagle3_jax.formats.heads import load_draft
from eagle3_jax.models.families import FAMILIES, Family
from eagle3_jax.runs import manifest
from eagle3_jax.train import __main__ as train

TEXTS = [("Why is the sky blue?", "It scatters light, blue most."), ("Count.", "One two three, one two three.")]
# Not in the form of SGLang, the default, which cannot serve these aux layers of them.
FORMS = {"DeepseekV3ForCausalLM": "vllm"}


def prepared(folder: pathlib.Path, target_identity: dict, form: str, **draft: Any) -> RunConfig:
    """A config whose conversations exist, as `regenerate` leaves them; `draft` adds to its section."""
    config = run_file.from_dict(
        {
            "run_dir": str(folder / "run"),
            "target": {"name": str(folder / "target"), "aux_layers": list(tiny_families.AUX_LAYERS)},
            "draft": {"vocab_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8} | draft,
            "mesh": {"data": 1},
            "extract": {"max_length": 96, "batch_tokens": 384},
            "train": {
                "ttt_steps": 2,
                "batch_size": 2,
                "row_length": 192,
                "loss_block": 192,
                "argmax_mask": False,  # what random weights say best is rarely among the tokens of the answers
                "epochs": 100,
                "max_steps": 16,
                "learning_rate": 1e-2,
                "log_every": 1,
                "eval_every": 8,
            },
            "export": {"dtype": "float32", "format": form},
            "evaluate": {"max_tokens": 16, "batch_size": 2, "tree": {"num_steps": 2, "topk": 2, "num_draft_tokens": 4}},
        }
    )
    conversations = config.folder("regenerate")
    manifest.begin(conversations, {"target": target_identity})
    lines = [
        {"id": f"{i}", "category": "chat", "truncated": False, "answer_ids": None}
        | {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
        for i, (asked, answer) in enumerate(TEXTS * 4)
    ]
    for split, some in (("train", lines), ("held_out", lines[:2])):
        (conversations / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in some))
    manifest.finish(conversations, files=("train.jsonl", "held_out.jsonl"))
    return config


BLOCK = {"kind": "dflash", "num_layers": 2, "block_size": 4, "mask_token_id": 1}
RUNS = [pytest.param(family, {}, id=family.config.model_type) for family in FAMILIES]
RUNS += [
    pytest.param(family, BLOCK, id=f"{family.config.model_type}-dflash")
    for family in FAMILIES
    if family.config.architecture in ("Gemma4ForCausalLM", "Glm4MoeForCausalLM")
]


@pytest.mark.long
@pytest.mark.parametrize(("family", "draft"), RUNS)
def test_a_head_is_trained_exported_and_measured(family: Family, draft: dict, tmp_path: pathlib.Path) -> None:
    target = tiny_families.write(tmp_path / "target", family, max_position_embeddings=128)
    form = "vllm" if draft else FORMS.get(family.config.architecture, "sglang")
    config = prepared(tmp_path, target.identity, form, **draft)
    extract.extract(config, target)
    results = train.train(config, target)
    metrics = (config.folder("train") / "metrics.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, metrics) if line["kind"] == "train"]
    assert len(losses) == 16
    assert losses[-1] < 0.8 * losses[0]
    assert results["held_out"]["rounds"] > 0
    export.run(config, target)
    written = load_draft(config.folder("export"), target=target)
    for form in set() if draft else {"vllm", "speculators", "eagle3_jax"} - {config.export.format}:
        export.convert(config.folder("export"), form, tmp_path / form)
        tiny_heads.assert_same(load_draft(tmp_path / form, target=target), written)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": asked, "category": "chat"}) + "\n" for asked, _ in TEXTS))
    report = evaluate.run(config, prompts, tmp_path / "report.json", target)
    assert report["identical"] == report["prompts"] == len(TEXTS)
    assert report["rounds"] > 0 and report["identity"]["target"] == target.identity
