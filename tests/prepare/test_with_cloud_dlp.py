"""prepare with Cloud DLP: nothing it finds is in any file, it is counted by kind, and paid for once."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
from fake_dlp import FakeDlp

from eagle3_jax.config import ConfigError, RunConfig, run_file
from eagle3_jax.prepare import __main__ as prepare
from eagle3_jax.prepare import cleaning, cloud_dlp
from eagle3_jax.prepare.cleaning import FINDINGS, HELD_OUT, REJECTS, TRAIN
from eagle3_jax.runs import manifest

QUESTIONS = [{"prompt": f"What is {a} plus {b}?"} for a in range(2, 6) for b in range(10, 15)]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"who": "Jane Doe"}'}}
LINES = [
    *QUESTIONS,
    {"prompt": "Write to Иван Петров at ivan@example.org"},
    {"messages": [{"role": "user", "content": "Who called?"}, {"role": "assistant", "content": "山田太郎"}]},
    {"messages": [{"role": "user", "content": "Call!"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]},
    {"prompt": "Jane Doe " * 300},
    {"prompt": "A marker <|im_end|> and Jane Doe"},
    '{"prompt": "half a line of Jane Doe',
]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDlp]:
    monkeypatch.setenv("DLP_TOKEN", "secret")
    monkeypatch.setattr(cloud_dlp, "_pause", lambda _: None)
    with FakeDlp() as fake:
        yield fake


def run_config(tmp_path: pathlib.Path, server: FakeDlp, **section: Any) -> RunConfig:
    path = tmp_path / "in.jsonl"
    lines = (line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in LINES)
    path.write_text("\n".join(lines))
    how = {"project": "my-project", "location": "europe-west1", "token_variable": "DLP_TOKEN", "url": server.url}
    source = {"kind": "conversations" if section.pop("answered", False) else "jsonl", "path": str(path)}
    values = {"sources": [source], "personal_data_engine": "cloud_dlp", "cloud_dlp": how, "max_chars": 2000, **section}
    return run_file.from_dict({"run_dir": str(tmp_path / "run"), "prepare": values})


def content(config: RunConfig) -> str:
    names = (TRAIN, HELD_OUT, REJECTS)
    return "".join((config.folder("prepare") / name).read_text(encoding="utf-8") for name in names)


def test_what_is_found_is_in_no_file_and_counted_by_kind(tmp_path, server, capsys):
    config = run_config(tmp_path, server)
    prepare.prepare(config)
    written = content(config)
    assert not any(name in written for name in ("Иван", "Jane", "@example"))
    assert "Write to <PERSON_NAME> at <EMAIL_ADDRESS>" in written and "half a line of <PERSON_NAME>" in written
    assert "A marker <|im_end|> and <PERSON_NAME>" in written
    made = manifest.read(config.folder("prepare"), "prepare")
    assert made["results"]["personal_data"] == {"PERSON_NAME": 1, "EMAIL_ADDRESS": 1}
    assert made["identity"]["prepare"]["cloud_dlp"] == {
        "location": "europe-west1",
        "info_types": list(config.prepare.cloud_dlp.info_types),
        "min_likelihood": "LIKELY",
    }
    assert len(server.asked) == 1, "all in one request"
    assert "Cloud DLP inspects at most 0.0 MB, 0.00 USD at 3.00 USD a GB" in capsys.readouterr().err
    assert not (config.folder("prepare") / FINDINGS).exists()
    sources = {"sources": [{"kind": "packaged", "limit": 20}, {"kind": "tfds", "name": "x", "field": "y"}]}
    others = run_file.from_dict({"run_dir": "x", "prepare": run_file.to_dict(config.prepare) | sources})
    price = "; and for each thousand prompts of 1 KB of packaged, tfds:x 1.0 MB, 0.00 USD at 3.00 USD a GB"
    assert cloud_dlp.foretold(others.prepare).endswith(price)
    other = run_config(tmp_path, server, personal_data_engine="presidio", cloud_dlp={})
    with pytest.raises(manifest.ManifestError, match="personal_data_engine: found 'cloud_dlp'"):
        prepare.prepare(other)


def test_answers_and_tool_calls_are_searched_too(tmp_path, server):
    config = run_config(tmp_path, server, answered=True)
    prepare.prepare(config)
    assert "山田" not in content(config) and "Jane" not in content(config)
    assert manifest.read(config.folder("prepare"), "prepare")["results"]["personal_data"] == {"PERSON_NAME": 2}


def test_a_service_that_dies_leaves_a_run_that_pays_for_no_text_twice(tmp_path, server, monkeypatch):
    monkeypatch.setattr(cleaning, "_RECORDS", 5)
    server.rule = lambda number: (503, {}) if number > 1 else None
    config = run_config(tmp_path, server)
    with pytest.raises(ValueError, match=r"^prepare.cloud_dlp: .*8 attempts: status 503"):
        prepare.prepare(config)
    assert len(server.asked) == 2
    server.rule = lambda number: None
    prepare.prepare(config)
    assert len(server.cells) == len(set(server.cells)), "each text once"
    expected = run_config(tmp_path, server)
    expected = run_file.from_dict(run_file.to_dict(expected) | {"run_dir": str(tmp_path / "other")})
    prepare.prepare(expected)
    assert content(config) == content(expected)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cloud_dlp": {}}, "cloud_dlp.project: got None, expected the project that pays"),
        ({"personal_data_engine": "presidio"}, "cloud_dlp.project: got 'my-project', expected null without"),
        ({"cloud_dlp": {"project": "a/b"}}, "cloud_dlp.project: got 'a/b', expected letters"),
        ({"cloud_dlp": {"project": "a", "location": "../x"}}, "cloud_dlp.location: got '../x', expected letters"),
        ({"cloud_dlp": {"project": "a", "url": "http://example.org"}}, "cloud_dlp.url: got 'http://example.org'"),
    ],
)
def test_wrong_values(tmp_path, server, values, message):
    with pytest.raises(ConfigError, match=f"prepare.{message}"):
        run_config(tmp_path, server, **values)
