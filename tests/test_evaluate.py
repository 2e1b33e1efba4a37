"""The verb on a tiny target with the real engine, and what it refuses."""

import dataclasses
import json
import pathlib
from typing import Any

import jax.numpy as jnp
import pytest
import tiny
from flax import nnx

from eagle3_jax import evaluate, report
from eagle3_jax.config import MeshConfig, RunConfig, run_file
from eagle3_jax.data import sources
from eagle3_jax.decoding.choice import tiers
from eagle3_jax.formats.heads import save_draft
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.runs import machine, manifest


@pytest.fixture(scope="module")
def target() -> Target:
    """A random target that reads bytes."""
    template = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<|end|>{% endfor %}"
    tokenizer = tiny.make_byte_tokenizer(template, additional_special_tokens=["<|end|>"])  # its answers end by length
    config = tiny.llama_config(vocab_size=len(tokenizer), num_hidden_layers=4, aux_layers=(1, 2, 3))
    return tiny.make_target(config, tokenizer)


@pytest.fixture
def config(tmp_path: pathlib.Path, target: Target) -> RunConfig:
    """A run whose export is there."""
    values: dict[str, Any] = {"max_tokens": 8, "tree": {"num_steps": 2, "topk": 1, "num_draft_tokens": 3}}
    config = run_file.from_dict({"run_dir": str(tmp_path / "run"), "draft": {"vocab_size": 9}, "evaluate": values})
    head = DraftHead(DraftHeadConfig.for_target(config.draft, target.model.config), rngs=nnx.Rngs(1))
    folder = config.folder("export")
    folder.parent.mkdir()
    save_draft(folder, Draft(head, jnp.arange(60, 69)), target=target.model.config, dtype="float32")
    manifest.begin(folder, {"target": target.identity})
    manifest.finish(folder)
    return config


@pytest.fixture
def prompts(tmp_path: pathlib.Path) -> pathlib.Path:
    """Two forms, two categories, a line that is broken and one that is too long."""
    lines = [
        {"id": "a", "category": "chat", "messages": [{"role": "user", "content": "Hi"}]},
        {"id": "b", "category": "chat", "prompt": "Why is the sky blue?"},
        {"prompt": "Count."},
        {"prompt": "x" * 400},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "{broken\n")
    return path


def measured(*_: Any, **__: Any) -> dict[str, Any]:
    """In place of a measurement, of which nothing is compared here."""
    return {"left_out": {}}


def test_another_measurement_does_not_take_a_report_s_place(
    config: RunConfig, target: Target, prompts: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What decides a rate is a part of it: the devices of an engine, the machine, versions."""
    output = tmp_path / "report.json"
    monkeypatch.setattr(evaluate, "_measure", measured)
    report = evaluate.run(config, prompts, output, target)
    monkeypatch.setattr(evaluate, "_measure", None)
    assert evaluate.run(config, prompts, output, target) == report
    split = dataclasses.replace(config, mesh=MeshConfig(model=2))
    with pytest.raises(manifest.ManifestError, match=r"report.json was made from .*:\n  mesh.model: found 1, expect"):
        evaluate.run(split, prompts, output, target)
    for name, found in (("hardware", machine.hardware() | {"cores": 999}), ("versions", {"jax": "0.0"})):
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(machine, name, lambda found=found: found)
            with pytest.raises(manifest.ManifestError, match=rf"(?s)\n  {name}\.\w+: found .*another --output"):
                evaluate.run(config, prompts, output, target)
    assert json.loads(output.read_text()) == report
    monkeypatch.setattr(evaluate, "_measure", measured)
    assert evaluate.run(split, prompts, output, target, replace=True)["identity"]["mesh"] == {"model": 2}


@pytest.mark.parametrize(
    "content", ["run_dir: x\n", '{"prompt": "Hi"}\n', '{"prompt": "a"}\n{"prompt": "b"}\n', '{"identity": {}}\n']
)
def test_another_file_in_the_report_s_place_stays(
    config: RunConfig, target: Target, prompts: pathlib.Path, tmp_path: pathlib.Path, content: str
) -> None:
    output = tmp_path / "mine"
    output.write_text(content)
    with pytest.raises(manifest.ManifestError, match="mine: got another file, expected a report of `evaluate`"):
        evaluate.run(config, prompts, output, target, replace=True)
    assert output.read_text() == content


@pytest.mark.slow
def test_measures_a_prompts_file(
    config: RunConfig, target: Target, prompts: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "deep" / "report.json"
    report = evaluate.run(config, prompts, output, target)
    assert json.loads(output.read_text()) == json.loads(json.dumps(report))
    assert (report["prompts"], report["identical"], report["mismatches"]) == (3, 3, [])
    assert report["left_out"] == {"unusable": 1, "too_long": 1, "refused": 0}
    assert report["tokens"] == 3 + report["rounds"] + sum(report["accepted_per_position"])
    assert len(report["alpha"]) == 2
    assert report["tau"] == pytest.approx(1 + sum(report["accepted_per_position"]) / report["rounds"])
    assert set(report["tokens_per_second"]) == {"vanilla", "speculative"}
    assert report["speedup"] == pytest.approx(report["seconds"]["vanilla"] / report["seconds"]["speculative"])
    assert {name: part["prompts"] for name, part in report["categories"].items()} == {"chat": 2, "all": 1}
    assert report["hardware"]["cores"] >= 1 and report["versions"]["python"]
    assert report["config"]["evaluate"]["max_tokens"] == 8
    assert sorted(report["identity"]["draft"]["files"]) == ["config.json", "model.safetensors"]
    assert report["identity"]["target"] == target.identity
    assert evaluate.summary(report).splitlines()[-1].split()[-1] == "3/3"

    before = output.read_bytes()
    assert evaluate.run(config, prompts, output, target) == report
    assert output.read_bytes() == before and "nothing to do" in capsys.readouterr().err


@pytest.mark.long
def test_the_engine_may_choose(
    config: RunConfig, target: Target, prompts: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "of_head", lambda head: (tiers.VANILLA, tiers.CHAIN))
    auto = dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, tree="auto"))
    result = evaluate.run(auto, prompts, tmp_path / "report.json", target)
    assert result["identical"] == 3
    assembled = report.assemble({"auto": result}, {})
    assembled["target"] = {"name": "tiny", "dtype": "float32"}
    assert assembled["drafts"]["auto"]["tree"] == "auto"
    assert "auto (chosen by the engine)" in report.table(assembled)


def turns(*roles: str) -> list[dict[str, str]]:
    return [{"role": role, "content": f"{role} {place}"} for place, role in enumerate(roles)]


@pytest.mark.parametrize(
    ("messages", "asked"),
    [
        (turns("user", "user"), 1),
        (turns("system", "user", "user"), 2),
        (turns("user", "assistant", "user"), 3),
        (turns("user", "assistant", "user", "assistant"), 3),
        (turns("system", "user", "assistant", "user", "user"), 4),
    ],
)
def test_of_a_conversation_one_request_is_made(tmp_path: pathlib.Path, messages: list[Any], asked: int) -> None:
    """Its last question whose predecessors are answered; an answer at the end is not continued."""
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": messages}))
    (prompt,), _ = sources.read_file(path)
    assert prompt["messages"] == messages[:asked]


def test_what_the_template_refuses_is_counted_and_left_out(target: Target, tmp_path: pathlib.Path) -> None:
    template = "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('none') }}{% endif %}"
    tokenizer = tiny.make_byte_tokenizer(template + "{{ m['content'] }}{% endfor %}", eos_token="<|end|>")
    path = tmp_path / "system.jsonl"
    path.write_text("".join(json.dumps({"messages": turns(*roles)}) + "\n" for roles in (["system", "user"], ["user"])))
    read, _ = sources.read_file(path)
    kept, left_out = sources.encode(read, tokenizer, 100, "--prompts")
    assert (len(kept), left_out) == (1, {"too_long": 0, "refused": 1})
    with pytest.raises(ValueError, match="--prompts: got no prompt within 100 tokens: 0 are longer, .* refuses 1"):
        sources.encode(read[:1], tokenizer, 100, "--prompts")


@pytest.mark.parametrize(("engines", "batch_size", "used"), [(1, 1, 1), (2, 1, 2), (8, 1, 3), (8, 2, 2), (2, 8, 1)])
def test_engines_share_the_prompts_of_each_category(engines: int, batch_size: int, used: int) -> None:
    """No more engines than have full batches; one keeps the order."""
    prompts = [{"id": f"{c}{i}", "category": c} for i in range(5) for c in "ba" if c == "b" or i < 3]
    shares = evaluate._shares(prompts, engines, batch_size)
    assert len(shares) == used
    assert sorted(p["id"] for share in shares for p in share) == sorted(p["id"] for p in prompts)
    for category, count in (("a", 3), ("b", 5)):
        sizes = [sum(p["category"] == category for p in share) for share in shares]
        assert max(sizes) - min(sizes) <= 1 and sum(sizes) == count


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "not found, expected a JSONL file"), ("[1]\n{}\n", "no usable prompt, 2 lines refused")],
)
def test_a_prompts_file_without_prompts_is_refused(
    config: RunConfig, target: Target, tmp_path: pathlib.Path, text: str | None, message: str
) -> None:
    path = tmp_path / "none.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        evaluate.run(config, path, tmp_path / "report.json", target)


def test_a_missing_export_is_named(tmp_path: pathlib.Path, prompts: pathlib.Path, target) -> None:
    """Where no head comes with the package for the target either."""
    with pytest.raises(manifest.ManifestError, match=r"expected the output of `python -m eagle3_jax.export`"):
        evaluate.run(RunConfig(run_dir=str(tmp_path / "empty")), prompts, tmp_path / "report.json", target)
