"""An exported head on the Hugging Face hub, with a model card: `python -m eagle3_jax.export --push-to-hub`.

The card says what the run's manifests and `report.json` hold: the target and its digest, data, settings, acceptance
and speed by category, and who may use it how.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import huggingface_hub
import yaml
from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

from eagle3_jax.config import CardConfig, RunConfig
from eagle3_jax.formats import files
from eagle3_jax.models.checkpoint.fetch import split_revision
from eagle3_jax.runs import disk, manifest

CARD = "README.md"
_TRAINING = ("epochs", "learning_rate", "batch_size", "row_length", "ttt_steps", "step_decay")


def push(config: RunConfig, repository: str, *, upload: bool) -> str:
    """Uploads the run's export with its card to `repository` ("user/name"), as one commit; creates it if need be.

    Args:
        upload: False uploads nothing and asks no one.

    Returns:
        What was, or would be, uploaded, with the card.

    Raises:
        ManifestError: no finished training or export, or a damaged one; no finished stage that the card speaks of.
        FileNotFoundError: no report.
        ValueError: the configuration names no licence, or the report is of another head, in any of its evaluations, or
            of none. OSError: the hub refuses, or does not answer.
    """
    folder = config.folder("export")
    exported, trained = manifest.read(folder, "export"), manifest.read(config.folder("train"), "train")
    path = pathlib.Path(config.run_dir, "report.json")
    if not path.exists():
        raise FileNotFoundError(f"{path}: not found; `python -m eagle3_jax.report` writes what the card says")
    if config.card.license is None:
        raise ValueError("card.license: got None, expected a name that the hub knows, such as apache-2.0")
    report = disk.read_json(path)
    held, measured = files.file_digests(folder), _of_heads(report)
    others = [name for name, way in measured.items() if way["draft"]["files"] != held]
    if others or not measured:
        found = f"{', '.join(others)} measured another head than" if others else "nothing in it measured"
        raise ValueError(f"{path}: {found} {folder}; evaluate this one, and run `report` again")
    prepared = manifest.read(config.folder("prepare"), "prepare", verify=False)
    text = card(config.card, report, exported, trained["identity"], prepared, repository)
    paths = [folder / name for name in (files.CONFIG, files.WEIGHTS, manifest.NAME)]
    if upload:
        hub = huggingface_hub.HfApi()
        added = [huggingface_hub.CommitOperationAdd(path.name, path) for path in paths]
        added.append(huggingface_hub.CommitOperationAdd(CARD, text.encode()))
        try:
            hub.create_repo(repository, exist_ok=True)
            hub.create_commit(repository, added, commit_message=f"EAGLE-3 head, step {exported['identity']['step']}")
        except HTTPError as error:  # of the httpx that the hub uses; no OSError where nobody answers
            raise OSError(f"{repository}: not uploaded: {error}") from error
    sizes = [f"  {path.name}  {path.stat().st_size:,} bytes" for path in paths]
    said = f"uploaded to {repository}:" if upload else f"would go to {repository}; `--upload` uploads it:"
    return "\n".join([said, *sizes, f"  {CARD}:", "", text])


def card(
    about: CardConfig,
    report: dict[str, Any],
    exported: dict[str, Any],
    trained: dict[str, Any],
    prepared: dict[str, Any],
    repository: str,
) -> str:
    """The model card, Markdown with the hub's YAML in front.

    Args:
        report: `report.json` of the run. exported: manifest of its export. trained: identity of its training.
        prepared: manifest of its prompts.

    Raises:
        ManifestError: the report has no results of a stage that the card speaks of.
    """
    target, stages = report["target"], report["stages"]
    front: dict[str, Any] = {"license": about.license, "library_name": "eagle3_jax"}
    front |= {"tags": ["eagle3", "speculative-decoding", "draft-model"]}
    if "/" in target["name"] and not pathlib.Path(target["name"]).exists():
        front["base_model"], _ = split_revision(target["name"])
    trees = [way["tree"] for way in _of_heads(report).values() if isinstance(way["tree"], dict)]
    steps = max((tree["num_steps"] for tree in trees if tree["topk"] == 1), default=3)  # vLLM drafts chains
    return "\n\n".join(
        [
            f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
            f"# EAGLE-3 draft head for {target['name']}",
            "Drafts tokens that the target verifies, several in one step: the text stays the target's own. Of use with "
            f"this target alone: sha256 of weights `{target['weights']}`, of the chat template "
            f"`{target['chat_template']}`.",
            f"    vllm serve {front.get('base_model', 'TARGET')} --speculative-config "
            f"'{json.dumps({'method': 'eagle3', 'model': repository, 'num_speculative_tokens': steps})}'",
            "## Measured",
            _measured(report, prepared["files"]["held_out.jsonl"]),
            "## Data",
            "\n".join(_data(about, stages)),
            "## Training",
            f"Training-time test, seed {trained['seed']}, "
            + ", ".join(f"{name} {trained['train'][name]}" for name in _TRAINING)
            + f"; checkpoint of step {exported['identity']['step']}, {exported['results']['parameters']:,} parameters, "
            f"{exported['identity']['export']['dtype']}.",
            "Versions: " + ", ".join(f"{name} {version}" for name, version in exported["versions"].items()) + ".",
        ]
    )


def _of_heads(report: dict[str, Any]) -> dict[str, Any]:
    """The ways of drafting that read a head's files: all but "lookup" and the like."""
    return {name: way for name, way in report["drafts"].items() if way["draft"]["files"]}


def _measured(report: dict[str, Any], held_out: str) -> str:
    """One table for each way of drafting.

    Args:
        held_out: digest of the held-out prompts.
    """
    hardware, parts = report["hardware"], []
    for name, way in report["drafts"].items():
        rows = ["| | tau | first draft accepted | speed-up |", "|---|---|---|---|"]
        for category, found in [*way["categories"].items(), ("all", way)]:
            numbers = found["tau"], next(iter(found["alpha"]), None), found["speedup"]
            rows.append(f"| {category} | {' | '.join(map(_number, numbers))} |")
        instead = "" if way["draft"]["files"] else f" (not this head: {way['draft']['folder']})"
        asked = "temperature {temperature}, {max_tokens} tokens, batch {batch_size}".format_map(way["settings"])
        parts.append(f"{name}{instead}, {json.dumps(way['tree'])}, {asked}:\n\n" + "\n".join(rows))
    where = f"{hardware['accelerator'] or hardware['cpu']}, {hardware['cores']} cores"
    prompts = _prompts(report.get("prompts_file"), held_out)
    said = f"{prompts}, {where}. tau: tokens for each pass of the target, its own one included."
    return "\n\n".join([said, *parts])


def _prompts(file: dict[str, str] | None, held_out: str) -> str:
    if file is None:  # a report of an earlier version
        return "Prompts"
    name, digest = file["name"], file["sha256"]
    return "Held-out prompts" if digest == held_out else f"Prompts of {name} (sha256 `{digest}`)"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _data(about: CardConfig, stages: dict[str, Any]) -> list[str]:
    prompts, answers = _results(stages, "prepare"), _results(stages, "regenerate")["train"]
    own, given = answers["answered_by"]["target"], answers["answered_by"]["given"]
    lines = []
    if own:
        lines.append(f"- {own:,} conversations, {answers['tokens']:,} answered tokens, the target's own.")
    if given:
        lines.append(f"- {given:,} conversations given, answered elsewhere; whether by this target was not checked.")
    kinds = ", ".join(f"{category} {count}" for category, count in prompts["categories"]["train"].items())
    lines.append(f"- Prompts by category: {kinds}.")
    if rejected := prompts.get("rejected"):
        lines.append("- Left out: " + ", ".join(f"{reason} ({count})" for reason, count in rejected.items()) + ".")
    return [*lines, *(f"- {line}" for line in about.prompts)]


def _results(stages: dict[str, Any], name: str) -> dict[str, Any]:
    if "results" not in stages.get(name, {}):
        expected = f"those of a finished `python -m eagle3_jax.{name}`; run `report` again where they are"
        raise manifest.ManifestError(f"report.json: stages.{name}: got no results, expected {expected}")
    return stages[name]["results"]
