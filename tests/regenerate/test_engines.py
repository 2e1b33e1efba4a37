"""Engines of this process: neither drafts nor the number of engines change a conversation."""

import json
import pathlib

import pytest
import tiny

from eagle3_jax.config import run_file
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.regenerate import __main__ as regenerate
from eagle3_jax.runs import manifest


@pytest.mark.long
def test_drafts_on_two_rows_change_no_conversation(tmp_path, monkeypatch):
    target, warmed = tiny.write_target(tmp_path / "target"), list[Engine]()
    monkeypatch.setattr(Engine, "warm_up", lambda engine, *_, **__: warmed.append(engine))
    prompts = [
        {
            "id": f"p{i}",
            "category": "c",
            "messages": [{"role": "user", "content": text}, {"role": "user", "content": "And?"}],
        }
        for i, text in enumerate(["apple bird", "snow", "river tree river tree", "door", "apple", "cloud cloud"])
    ]

    def run(name: str, data: int, **settings: str) -> pathlib.Path:
        values = {"temperature": [0.0, 0.9], "max_tokens": 20, "max_length": 128, "batch_size": 2}
        config = run_file.from_dict(
            {
                "run_dir": str(tmp_path / name),
                "mesh": {"data": data},
                "target": {"name": str(target), "aux_layers": [1, 2, 3]},
                "regenerate": values | settings,
            }
        )
        made = pathlib.Path(str(config.folder("prepare")))
        manifest.begin(made, {"verb": "prepare"})
        for split, lines in (("train", prompts[1:]), ("held_out", prompts[:1])):
            (made / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        manifest.finish(made, files=("train.jsonl", "held_out.jsonl"))
        regenerate.regenerate(config)
        return pathlib.Path(str(config.folder("regenerate")))

    plain = run("plain", 1)
    assert warmed == []
    drafted = run("drafted", 2, draft="lookup")
    assert len(set(map(id, warmed))) == 2 and all(engine.stats().tiers["lookup 8"] for engine in warmed)
    for name in ("train.jsonl", "held_out.jsonl", "rejects.jsonl"):
        assert (drafted / name).read_bytes() == (plain / name).read_bytes()
    assert (plain / "train.jsonl").read_text()
