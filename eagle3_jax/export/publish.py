"""Uploads an exported head with a model card to the Hugging Face hub: `python -m eagle3_jax.export --push-to-hub`.

All of the card comes from the run's manifests, the head's files and `report.json`.
"""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HTTPError

from eagle3_jax.config import CardConfig, RunConfig
from eagle3_jax.formats import files, kinds
from eagle3_jax.formats.forms import EAGLE3_JAX
from eagle3_jax.formats.kinds import DraftKind
from eagle3_jax.models.checkpoint.fetch import split_revision
from eagle3_jax.runs import disk, manifest

CARD = "README.md"
_TEMPLATE = pathlib.Path(__file__).with_name("card.md")  # Jinja
_TRAINING = ("epochs", "learning_rate", "batch_size", "row_length")


def push(config: RunConfig, repository: str, *, upload: bool) -> str:
    """Uploads the run's export with its card to `repository` ("user/name"), as one commit; creates it if need be.

    Without `upload` no request is made. Returns a list of the files, and the card. Raises ManifestError: no finished
    training or export, or an unfinished stage that the card describes. FileNotFoundError: no report. ValueError: no
    licence in the config, or a report of another head. OSError: the hub refuses, or does not answer.
    """
    exported, trained = (manifest.read(config.folder(verb), verb) for verb in ("export", "train"))
    folder = disk.local(config.folder("export"))
    path = config.run_folder / "report.json"
    if not path.exists():
        raise FileNotFoundError(f"{path}: not found; `python -m eagle3_jax.report` writes what the card says")
    if config.card.license is None:
        raise ValueError("card.license: got None, expected a name that the hub knows, such as apache-2.0")
    report = disk.read_json(path)
    held, measured = files.file_digests(folder), _of_heads(report)
    others = [name for name, way in measured.items() if way["draft"]["files"] != held]
    if others or not measured:
        found = f"{', '.join(others)} measured another head than" if others else "nothing in it measured"
        raise ValueError(f"{path}: {found} {config.folder('export')}; evaluate this one, and run `report` again")
    prepared = manifest.read(config.folder("prepare"), "prepare", verify=False)
    text = _card(config.card, report, exported, trained["identity"], prepared, folder, repository)
    paths = [folder / name for name in (*held, manifest.NAME)]
    if upload:
        hub = huggingface_hub.HfApi()
        added = [huggingface_hub.CommitOperationAdd(path.name, path) for path in paths]
        added.append(huggingface_hub.CommitOperationAdd(CARD, text.encode()))
        try:
            hub.create_repo(repository, exist_ok=True)
            message = f"{kinds.of_folder(folder).label} head, step {exported['identity']['step']}"
            hub.create_commit(repository, added, commit_message=message)
        except HTTPError as error:  # the hub's httpx raises no OSError when nobody answers
            raise OSError(f"{repository}: not uploaded: {error}") from error
    sizes = [f"  {path.name}  {path.stat().st_size:,} bytes" for path in paths]
    heading = f"uploaded to {repository}:" if upload else f"would go to {repository}; `--upload` uploads it:"
    return "\n".join([heading, *sizes, f"  {CARD}:", "", text])


def _card(
    about: CardConfig,
    report: dict[str, Any],
    exported: dict[str, Any],
    trained: dict[str, Any],
    prepared: dict[str, Any],
    folder: pathlib.Path,
    repository: str,
) -> str:
    name, identity = report["target"]["name"], exported["identity"]
    hub = split_revision(name)[0]
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", hub) and not pathlib.Path(name).exists()
    form, kind = identity.get("converted_to") or identity["export"]["format"], kinds.of_folder(folder)
    base, block = hub if on_hub else None, kind.block(folder)
    data = huggingface_hub.ModelCardData(
        base_model=base,
        library_name="eagle3_jax",
        license=about.license,
        tags=[kind.label.lower().replace("-", ""), "speculative-decoding", "draft-model"],
    )
    trees = [way["tree"] for way in _of_heads(report).values() if isinstance(way["tree"], dict)]
    steps = block or max((tree["num_steps"] for tree in trees if tree["topk"] == 1), default=3)  # chains
    from eagle3_jax.training.kinds.kind import named  # needs the extra `train`, which `export --from` does not

    training = named(kind.name)
    settings = (*_TRAINING, *(training.settings if training else ()))
    asked, held_out = report["prompts_file"], prepared["files"]["held_out.jsonl"]
    others = f"Prompts of {asked['name']} (sha256 `{asked['sha256']}`)"
    values = {
        "about": about,
        "answered": _results(report, "regenerate")["train"],
        "block_size": files.read_config(folder).get("block_size"),
        "commands": _commands(kind, block, steps, base or "TARGET", repository, form),
        "engines": "" if form == EAGLE3_JAX.name else kind.served_by(kind.read(folder), form),
        "exported": exported,
        "label": kind.label,
        "prepared": _results(report, "prepare"),
        "provenance": _results(report, "extract")["train"]["provenance"],
        "prompts": "Held-out prompts" if asked["sha256"] == held_out else others,
        "report": report,
        "trained": trained,
        "training": {name: trained["train"][name] for name in settings},
    }
    filters = {
        "counts": lambda counted, form: ", ".join(form.format(*item) for item in counted.items()),
        "json": json.dumps,
        "number": lambda value: "-" if value is None else f"{value:.2f}",
    }
    return str(huggingface_hub.ModelCard.from_template(data, str(_TEMPLATE), **values, **filters))


def _commands(kind: DraftKind, block: int | None, steps: int, target: str, repository: str, form: str) -> list[str]:
    """Lists the commands that serve the head with chains of `steps` drafts; only SGLang's form is for SGLang."""
    if form == EAGLE3_JAX.name:
        return [f"python -m eagle3_jax.serve --target {target} --draft {repository}"]
    speculative = json.dumps({"method": kind.method, "model": repository, "num_speculative_tokens": steps})
    commands = [f"vllm serve {target} --speculative-config '{speculative}'"]
    if form == "sglang":
        depth = f"--speculative-num-steps {steps} --speculative-eagle-topk 1 " if block is None else ""
        commands.append(
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {kind.algorithm} "
            f"--speculative-draft-model-path {repository} {depth}--speculative-num-draft-tokens {steps + 1}"
        )
    return commands


def _of_heads(report: dict[str, Any]) -> dict[str, Any]:  # not of "lookup"
    return {name: way for name, way in report["drafts"].items() if way["draft"]["files"]}


def _results(report: dict[str, Any], stage: str) -> dict[str, Any]:
    if "results" not in report["stages"].get(stage, {}):
        expected = f"those of a finished `python -m eagle3_jax.{stage}`; run `report` again where they are"
        raise manifest.ManifestError(f"report.json: stages.{stage}: got no results, expected {expected}")
    return report["stages"][stage]["results"]
