"""A head on the hub: what is uploaded, what its card says, and what is refused before anyone is asked."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import huggingface_hub
import pytest
import tiny
import tiny_heads
from huggingface_hub import ModelCard

from eagle3_jax import config as configs
from eagle3_jax import export, publish

pytestmark = [pytest.mark.slow, pytest.mark.any_jax]
ABOUT = configs.CardConfig(license="apache-2.0", prompts=("words of the tests, CC0",))


@pytest.fixture
def config(whole_run: tiny.Run, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> configs.RunConfig:
    copy = whole_run.copy(tmp_path / "copy")
    monkeypatch.chdir(copy.config.parent)
    return dataclasses.replace(configs.load(copy.config), card=ABOUT)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What the hub was asked for."""
    asked: list[tuple[str, Any]] = []

    class Api:
        def create_repo(self, repository: str, *, exist_ok: bool) -> None:
            asked.append((repository, exist_ok))

        def create_commit(self, repository: str, added: list[Any], *, commit_message: str) -> None:
            asked.append((repository, {x.path_in_repo: x.path_or_fileobj for x in added}))

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    return asked


def test_a_head_is_uploaded_in_one_commit_with_its_card(config, hub):
    said = publish.push(config, "me/head", upload=True)
    (_, exist_ok), (repository, added) = hub
    assert (repository, exist_ok) == ("me/head", True)
    assert sorted(added) == ["README.md", "config.json", "manifest.json", "model.safetensors"]
    assert pathlib.Path(added["model.safetensors"]) == config.folder("export") / "model.safetensors"
    text = added["README.md"].decode()
    assert text in said
    card = ModelCard(text)
    assert card.data.to_dict()["library_name"] == "eagle3_jax" and card.data.to_dict()["license"] == "apache-2.0"
    assert "base_model" not in card.data.to_dict()  # a folder, which no one else has
    for words in ("words of the tests, CC0", "| odd |", "| all |", "ttt_steps 3", '"num_speculative_tokens": 3'):
        assert words in text


def test_nothing_is_uploaded_unless_asked_for(config, hub, capsys):
    export.main(["--config", "run.yaml", "--card.license", "mit", "--push-to-hub", "me/head"])
    said = capsys.readouterr().out
    assert not hub
    assert "would go to me/head; `--upload` uploads it" in said and "license: mit" in said


def test_what_the_card_could_not_say_truly_is_refused(config, hub):
    with pytest.raises(ValueError, match=r"card.license: got None"):
        publish.push(dataclasses.replace(config, card=configs.CardConfig()), "me/head", upload=True)
    report = pathlib.Path(config.run_dir, "report.json")
    kept = report.read_text()
    report.unlink()
    with pytest.raises(FileNotFoundError, match=r"eagle3_jax.report` writes what the card says"):
        publish.push(config, "me/head", upload=True)
    first = next(line for line in kept.splitlines() if '"model.safetensors"' in line)
    report.write_text(kept.replace(first, first.replace(first.split('"')[3], "0" * 64)))
    with pytest.raises(ValueError, match="measured another head than"):
        publish.push(config, "me/head", upload=True)
    report.write_text(kept)
    tiny_heads.alter(config.folder("export"), rope_theta=5.0)
    with pytest.raises(ValueError, match="config.json"):
        publish.push(config, "me/head", upload=True)
    assert not hub
