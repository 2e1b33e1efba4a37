"""A mix has the shares that are asked for, by the tokens of answers or by requests, and the seed alone chooses."""

from __future__ import annotations

import collections
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from eagle3_jax.config import ConfigError, RunConfig, run_file
from eagle3_jax.data import features
from eagle3_jax.extract import __main__ as extract
from eagle3_jax.extract import mixing
from eagle3_jax.runs import manifest

LENGTHS = {"code": 60, "chat": 6, "math": 20}  # tokens of an answer
SHARES = {"code": 0.3, "chat": 0.5, "math": 0.2}


def conversations(count: int, name: str) -> list[dict[str, Any]]:
    """Some with token ids, some with text alone, as many of each category."""
    found = []
    for number in range(count):
        category = list(LENGTHS)[number % 3]
        tokens = LENGTHS[category] + number % 5
        reply = {"role": "assistant", "content": "x" * tokens}
        messages = [{"role": "user", "content": f"Question {number}?"}, reply]
        ids = None if number % 2 else [[65] * tokens]
        origin = {"source": "jsonl:in.jsonl", **({"license": "mit"} if number % 4 else {})}
        told = {"messages": messages, "truncated": False, "answer_ids": ids}
        found.append({"id": f"{name}-{number}", "category": category, **origin, **told})
    return found


@pytest.fixture
def prepared(run_of: Callable[..., RunConfig], tmp_path: pathlib.Path) -> Callable[..., RunConfig]:
    """Makes a config whose conversations exist."""

    def make(mix: Any, lines: int = 900) -> RunConfig:
        how = {"states": "none", "max_length": 128, "batch_tokens": 512, "shard_records": 32, "mix": mix}
        return run_of(tmp_path, conversations(lines, "train"), conversations(lines // 3, "held_out"), **how)

    return make


def results(config: RunConfig) -> dict[str, Any]:
    return manifest.read(config.folder("extract"), "extract")["results"]


@pytest.mark.slow
def test_answers_have_the_shares_that_are_asked_for(tmp_path, target, prepared):
    config = prepared(SHARES)
    extract.extract(config, target)
    for split, near in (("train", 0.02), ("held_out", 0.15)):
        tokens = results(config)[split]["categories"]
        total = sum(tokens.values())
        assert {name: found / total for name, found in tokens.items()} == pytest.approx(SHARES, abs=near)
    kept = results(config)["mix"]
    assert kept["chat"]["kept"] == kept["chat"]["of"], "the scarcest is kept whole"
    for name, share in SHARES.items():
        assert kept[name]["kept"] == pytest.approx(share * kept["chat"]["of"] / SHARES["chat"], abs=LENGTHS[name] + 5)
    found = results(config)["train"]["provenance"]["jsonl:in.jsonl"]
    assert set(found) == {"mit", "unstated"} and sum(found.values()) == results(config)["train"]["records"]
    folder = config.folder("extract") / "train"
    ids = [name for path in sorted(folder.glob("*.array_record")) for name in features.read_notes(path)["ids"]]
    assert len(set(ids)) == len(ids) == results(config)["train"]["records"] > 32


def test_requests_of_a_log_are_shares_of_conversations(tmp_path, target, prepared):
    log = tmp_path / "traffic.jsonl"
    log.write_text('{"category": "code", "count": 30}\n{"category": "math"}\n\n{"category": "math", "count": 9}\n')
    config = prepared(str(log))
    wanted = mixing.wanted(str(log))
    assert wanted == {"by": "conversations", "shares": {"code": 0.75, "math": 0.25}}
    path = config.folder("regenerate") / "train.jsonl"
    limits, kept = mixing.choose(wanted | {"seed": 3}, path, target.tokenizer)
    assert kept == {"code": {"share": 0.75, "kept": 300, "of": 300}, "math": {"share": 0.25, "kept": 100, "of": 300}}
    lines = path.read_bytes().splitlines(keepends=True)
    chosen = [json.loads(line) for line in mixing.select(lines, limits, 3)]
    assert collections.Counter(line["category"] for line in chosen) == {"code": 300, "math": 100}
    assert [line["id"] for line in chosen] == [x["id"] for x in map(json.loads, lines) if x in chosen], "in their order"
    others = [json.loads(line) for line in mixing.select(lines, mixing.choose(wanted | {"seed": 4}, path, None)[0], 4)]
    assert {line["id"] for line in others} != {line["id"] for line in chosen}, "the seed chooses"


def test_another_mix_is_other_work(tmp_path, target, prepared):
    config = prepared({"code": 1.0}, lines=30)
    extract.extract(config, target)
    values = run_file.to_dict(config)
    for mix in ({"code": 0.5, "chat": 0.5}, None):
        other = run_file.from_dict(values | {"extract": values["extract"] | {"mix": mix}})
        with pytest.raises(manifest.ManifestError, match="mix"):
            extract.extract(other, target)


def test_clear_errors(tmp_path, target, prepared):
    config = prepared({"codee": 0.5, "chat": 0.5}, lines=30)
    with pytest.raises(
        ValueError, match=r"^extract.mix: got codee, expected categories of the conversations: chat, code"
    ):
        extract.extract(config, target)
    for mix, message in (
        ({"code": 0.5, "chat": 0.4}, r"expected shares that add up to 1 \(they add up to 0.9\)"),
        ({"code": 1.5, "chat": -0.5}, "extract.mix.chat: got -0.5, expected more than 0"),
        (3, "extract.mix: got 3, expected a mapping"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_file.from_dict({"run_dir": "x", "extract": {"mix": mix}})
    log = tmp_path / "traffic.jsonl"
    for text, message in (
        ("", "without a line"),
        ('{"category": "code"}\n{"category": "code", "count": 0}\n', "with another line 2, expected lines such as"),
        ('{"category": "code", "count": true}\n', "with another line 1"),
        ('{"kind": "code"}\n', "with another line 1"),
        ("[1]\n", "with another line 1"),
        ('{"category": "co', "with another line 1"),
    ):
        log.write_text(text)
        with pytest.raises(ValueError, match=rf"^extract.mix: got '.*traffic.jsonl' {message}"):
            mixing.wanted(str(log))
    with pytest.raises(ValueError, match=r"^extract.mix: got 'none.jsonl' \(No such file"):
        mixing.wanted("none.jsonl")
