"""A head on the hub: what is uploaded, what its card says, and what is refused before anyone is asked."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from typing import Any

import httpx2
import huggingface_hub
import jax.numpy as jnp
import pytest
import tiny
import tiny_heads
from huggingface_hub import ModelCard
from tiny_blocks import HIDDEN, VOCAB, make_block_head

from eagle3_jax import report
from eagle3_jax.config import CardConfig, RunConfig, run_file
from eagle3_jax.export import __main__ as export
from eagle3_jax.export import publish
from eagle3_jax.formats import files
from eagle3_jax.formats.blocks.kinds import DFLASH
from eagle3_jax.models.drafts.dflash import DFlash
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.runs import manifest

pytestmark = pytest.mark.slow
ABOUT = CardConfig(license="apache-2.0", prompts=("words of the tests, CC0",))


@pytest.fixture
def config(whole_run: tiny.Run, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    copy = whole_run.copy(tmp_path / "copy")
    monkeypatch.chdir(copy.config.parent)
    return dataclasses.replace(run_file.load(copy.config), card=ABOUT)


@pytest.fixture
def chain(config: RunConfig) -> dict[str, Any]:
    """The run's only evaluation, to change."""
    return json.loads((config.folder("evaluate") / "chain.json").read_text())


def card(config: RunConfig, **evaluations: dict[str, Any]) -> str:
    """The model card once `report` has put these evaluations together."""
    for path in config.folder("evaluate").glob("*.json"):
        path.unlink()
    for name, evaluation in evaluations.items():
        (config.folder("evaluate") / f"{name}.json").write_text(json.dumps(evaluation))
    report.run(config)
    return publish.push(config, "me/head", upload=False)


def changed(evaluation: dict[str, Any], draft: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """An evaluation of another draft, asked in another way."""
    of, how = evaluation["identity"], evaluation["config"]
    return evaluation | {
        "identity": of | {"draft": of["draft"] | draft},
        "config": how | {"evaluate": how["evaluate"] | settings},
    }


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
    message = publish.push(config, "me/head", upload=True)
    (_, exist_ok), (repository, added) = hub
    assert (repository, exist_ok) == ("me/head", True)
    assert sorted(added) == ["README.md", "config.json", "manifest.json", "model.safetensors"]
    assert pathlib.Path(added["model.safetensors"]) == config.folder("export") / "model.safetensors"
    text = added["README.md"].decode()
    assert text in message
    card = ModelCard(text)
    assert card.data.to_dict()["library_name"] == "eagle3_jax" and card.data.to_dict()["license"] == "apache-2.0"
    assert "base_model" not in card.data.to_dict()  # a folder, which no one else has
    for words in ("words of the tests, CC0", "| odd |", "| all |", "ttt_steps 3", '"num_speculative_tokens": 3'):
        assert words in text


def test_the_card_lists_sources_with_their_licences_and_what_others_answered(config):
    path = pathlib.Path(config.run_dir, "report.json")
    found = json.loads(path.read_text())
    learned = found["stages"]["extract"]["results"]["train"]
    assert sum(sum(x.values()) for x in learned["provenance"].values()) == learned["records"]
    learned["provenance"] = {"tfds:b": {"unstated": 7}, "jsonl:a": {"mit": 1234, "cc-by-4.0": 5}}
    ours = "- 1,200 conversations, 4,567 answered tokens, the target's own."
    others = "- 300 conversations given, answered elsewhere; whether by this target was not checked."
    for target, given, counts in ((1200, 300, [ours, others]), (1200, 0, [ours]), (0, 300, [others])):
        answered = {"answered_by": {"target": target, "given": given}, "tokens": 4567}
        found["stages"]["regenerate"]["results"]["train"] |= answered
        path.write_text(json.dumps(found))
        lines = publish.push(config, "me/head", upload=False).splitlines()
        assert [line for line in lines if line.startswith("- ") and "conversations" in line] == [
            *counts,
            "- Source jsonl:a, licence cc-by-4.0: 5 conversations.",
            "- Source jsonl:a, licence mit: 1,234 conversations.",
            "- Source tfds:b, licence unstated: 7 conversations.",
        ]
    found["stages"]["prepare"] = {"seconds": 3}
    path.write_text(json.dumps(found))
    with pytest.raises(manifest.ManifestError, match=r"stages.prepare: got no results, expected .* `report` again"):
        publish.push(config, "me/head", upload=False)


def test_a_block_head_s_card_says_its_kind_its_block_and_its_flags(config, chain, hub):
    folder = config.folder("export")
    identity = manifest.read(folder, "export")["identity"]
    shutil.rmtree(folder)
    shape = tiny.llama_config(vocab_size=VOCAB, hidden_size=HIDDEN, aux_layers=(1, 2, 4), num_hidden_layers=6)
    head = make_block_head(DFlash, draft_vocab_size=VOCAB, aux_layers=shape.aux_layers)
    stored = DFLASH.stored(Draft(head, jnp.arange(VOCAB)), shape, "float32", None)
    export._write(stored, "sglang", folder, identity)
    own = changed(chain, {"files": files.file_digests(folder)}, tree={"num_steps": 2, "topk": 1, "num_draft_tokens": 3})
    assert "ttt_steps" not in card(config, own=own)
    publish.push(config, "me/head", upload=True)
    _, (_, added) = hub
    model_card = ModelCard(added["README.md"].decode())
    assert model_card.data.to_dict()["tags"][0] == "dflash"
    for words in (
        "# DFlash draft head for ",
        "`block_size` 4.",
        "vllm serve TARGET --speculative-config '",
        '{"method": "dflash", "model": "me/head", "num_speculative_tokens": 3}',
        "--speculative-algorithm DFLASH --speculative-draft-model-path me/head --speculative-num-draft-tokens 4",
        "served by SGLang 0.5.23, vLLM 0.32.0, sglang-jax cddbf6f and later",
        "Blocks behind random anchors, seed 0, ",
        "anchors 256, block_weights d-pace",
        "| odd |",
    ):
        assert words in model_card.text, words


def test_every_evaluation_is_of_the_head_that_is_pushed_or_of_none_and_says_its_own_settings(config, chain):
    older = changed(chain, {"files": chain["identity"]["draft"]["files"] | {"model.safetensors": "0" * 64}})
    with pytest.raises(ValueError, match=r"report.json: auto, tree measured another head than .*export; evaluate"):
        card(config, chain=chain, tree=older, auto=older)
    deep = {"num_steps": 8, "topk": 1, "num_draft_tokens": 9}
    lookup = changed(chain, {"folder": "lookup", "files": None}, tree=deep, temperature=0.5, max_tokens=7, batch_size=4)
    with pytest.raises(ValueError, match=r"report.json: nothing in it measured .*export; evaluate"):
        card(config, copied=lookup)
    nothing: dict[str, Any] = {"tau": None, "alpha": [None], "speedup": None}
    chain["categories"]["odd"] |= nothing
    text = card(config, copied=lookup, own=chain)
    assert "copied (not this head: lookup), {" in text and "temperature 0.5, 7 tokens, batch 4" in text
    assert "own, {" in text and "temperature 0.0, 96 tokens, batch 1" in text
    assert '"num_speculative_tokens": 3' in text, "the head's own depth"
    assert "| odd | - | - | - |" in text and "\nHeld-out prompts." in text
    chain["identity"]["prompts_file"] = {"name": "train.jsonl", "sha256": "ab"}
    text = card(config, chain=chain)
    assert "\nPrompts of train.jsonl (sha256 `ab`). " in text and "Held-out" not in text


def test_a_hub_that_does_not_answer_is_one_sentence(config, monkeypatch):
    class Api:
        def create_repo(self, repository: str, *, exist_ok: bool) -> None:
            raise httpx2.ConnectError("[Errno -2] Name or service not known")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    asked = ["--config", "run.yaml", "--card.license", "mit", "--push-to-hub", "me/head", "--upload"]
    with pytest.raises(SystemExit, match=r"eagle3_jax.export: me/head: not uploaded: .*Name or service not known"):
        export.main(asked)


def test_what_the_card_could_not_say_truly_is_refused(config, hub, capsys):
    export.main(["--config", "run.yaml", "--card.license", "mit", "--push-to-hub", "me/head"])
    printed = capsys.readouterr().out
    assert not hub and "would go to me/head; `--upload` uploads it" in printed and "license: mit" in printed
    with pytest.raises(ValueError, match=r"card.license: got None"):
        publish.push(dataclasses.replace(config, card=CardConfig()), "me/head", upload=True)
    path = pathlib.Path(config.run_dir, "report.json")
    kept = path.read_text()
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"eagle3_jax.report` writes what the card says"):
        publish.push(config, "me/head", upload=True)
    first = next(line for line in kept.splitlines() if '"model.safetensors"' in line)
    path.write_text(kept.replace(first, first.replace(first.split('"')[3], "0" * 64)))
    with pytest.raises(ValueError, match="measured another head than"):
        publish.push(config, "me/head", upload=True)
    path.write_text(kept)
    tiny_heads.alter(config.folder("export"), rope_theta=5.0)
    with pytest.raises(ValueError, match="config.json"):
        publish.push(config, "me/head", upload=True)
    assert not hub
