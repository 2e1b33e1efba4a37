"""tools/full_size.py: the rows that it prints, of a target small enough for a test."""

import functools
import importlib
import json
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY, DRAFTED, STEPS = 64, 128, 4, 512, 128, 3

CONFIG = f"""
run_dir: unused
target: {{{{name: {{folder}}, dtype: float32, aux_layers: [0, 1, 2]}}}}
draft: {{{{vocab_size: {DRAFTED}}}}}
extract: {{{{max_length: 64, batch_tokens: 128}}}}
train: {{{{ttt_steps: {STEPS}, batch_size: 2, row_length: 64, loss_block: 64}}}}
mesh: {{{{model: 8}}}}
benchmark: {{{{batch_sizes: [2], simulated_acceptance: 1}}}}
evaluate: {{{{tree: {{{{num_steps: 2, topk: 2, num_draft_tokens: 4}}}}}}}}
"""


@pytest.mark.long
def test_each_part_is_measured_and_charged_what_it_computes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    full_size = importlib.import_module("full_size")
    values = json.loads((ROOT / "configs/targets/llama31_8b/config.json").read_text())
    sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": LAYERS}
    (tmp_path / "config.json").write_text(json.dumps(values | sizes | heads))
    (tmp_path / "run.yaml").write_text(CONFIG.format(folder=tmp_path))
    for name, value in {"TURNS": 2, "CHAINS": full_size.CHAINS[:1]}.items():
        monkeypatch.setattr(full_size, name, value)
    monkeypatch.setattr(full_size, "Run", functools.partial(full_size.Run, prompt=8, answer=17))
    monkeypatch.setattr(full_size.profile, "bandwidth", lambda: 1e9)
    file = tmp_path / "rows.json"
    arguments = ["--config", str(tmp_path / "run.yaml"), "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["full_size.py", *arguments])
    full_size.main()

    rows = {row["part"]: row for row in json.loads(file.read_text())}
    names = ["vanilla", "tree 2, 2, 4", "chain 3"]
    decoded = [f"decode, batch 2, {name}" for name in names]
    assert [part for part in rows if not part.startswith("products")] == ["train", "extract", *decoded]
    for form in (f"{LAYERS + 1} of {INTERMEDIATE} x {HIDDEN}", f"1 of {VOCABULARY} x {HIDDEN}"):
        assert f"products, {form}" in rows
    for part in rows.keys() - {"train", "extract", *decoded}:
        assert list(rows[part]["gigabytes_per_second"]) == ["1", "2", "4", "8", "16"]
        assert min(rows[part]["gigabytes_per_second"].values()) > 0

    mlp, output, norms = 3 * HIDDEN * INTERMEDIATE, HIDDEN * HIDDEN, 3 * HIDDEN
    layer = HIDDEN * (HIDDEN + 2 * 2 * 16) + output + mlp + 2 * HIDDEN
    charged = {part: rows[part]["teraflops"] * 1e12 / rows[part]["tokens_per_second"] for part in ("train", "extract")}
    assert charged["extract"] == pytest.approx(2 * (LAYERS * layer + HIDDEN + HIDDEN * VOCABULARY))
    head = 2 * HIDDEN * (HIDDEN + 2 * 2 * 16) + output + mlp + norms + HIDDEN + HIDDEN * DRAFTED
    assert charged["train"] == pytest.approx(6 * (3 * HIDDEN * HIDDEN + STEPS * head) + 2 * HIDDEN * DRAFTED, rel=0.002)

    # All drafts are accepted: 16 tokens behind the first, four a round of the chain of 3.
    vanilla, tree, chain = (rows[f"decode, batch 2, {name}"] for name in names)
    assert (vanilla["tau"], chain["tau"]) == (1, 4)
    assert tree["tau"] > 2
    assert vanilla["costs"] == 1
    for row in (vanilla, tree, chain):
        assert row["tokens_per_second"] == pytest.approx(2e3 * row["tau"] / row["round_ms"])
        assert row["costs"] == pytest.approx(row["round_ms"] / vanilla["round_ms"])
        assert row["gigabytes_per_second"] > 0
