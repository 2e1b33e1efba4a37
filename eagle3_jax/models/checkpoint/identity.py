"""Identity of a target (digests of weights, tokenizer and chat template, and aux layers), and its comparison."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Collection
from typing import Any

from eagle3_jax.models import chat_template
from eagle3_jax.models.target_config import ModelConfig
from eagle3_jax.runs.manifest import ManifestError

# Fields that must agree between conversations, features, heads and their target. Name and dtype may differ.
FIELDS = ("weights", "tokenizer", "chat_template", "aux_layers")
# Those of `FIELDS` that only change how many drafts of a head are accepted: another copy of the model, such as a
# quantised or fine-tuned one, may use the head.
COPY = {"weights": "other weights", "chat_template": "another chat template"}


def identify(
    files: dict[str, str], config: ModelConfig, tokenizer: Any, *, name: str, commit: str | None, dtype: str
) -> dict[str, Any]:
    """Makes the identity of a target for manifests, as JSON: `FIELDS`, name, commit, architecture and dtype.

    `files` are digests of its weight files, see `load.file_digests`; `commit` is the hub's, None without a hub.
    """
    # Aux layers select the hidden states to keep and do not change the model; the files tell the kind of the scales.
    architecture = dataclasses.asdict(dataclasses.replace(config, aux_layers=()))
    del architecture["scales"]
    for field in dataclasses.fields(config):
        if field.metadata.get("later") and getattr(config, field.name) == field.default:
            del architecture[field.name]
    return {
        "name": name,
        "commit": commit,
        "architecture": config.architecture,
        "weights": _sha256(json.dumps([files, architecture], sort_keys=True)),
        "tokenizer": tokenizer_digest(tokenizer),
        "chat_template": chat_template.digest(tokenizer),
        "aux_layers": list(config.aux_layers),
        "dtype": dtype,
    }


def tokenizer_digest(tokenizer: Any) -> str:
    """Hashes everything that decides the ids of a text, the chat template excluded; sha256 in hex."""
    return _sha256(tokenizer.backend_tokenizer.to_str())


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def check_same_target(
    folder: str | pathlib.Path, found: Any, expected: dict[str, Any], *, but: Collection[str] = ()
) -> None:
    """Refuses a folder whose manifest has the identity `found`, for a target with the identity `expected`.

    Raises ManifestError with every field that differs; those in `but` may.
    """
    found = found if isinstance(found, dict) else {}
    problems = [
        f"target.{field}: found {found.get(field)!r}, expected {expected[field]!r}"
        for field in FIELDS
        if field not in but and found.get(field) != expected[field]
    ]
    if problems:
        raise ManifestError(f"{folder}: made with another target:\n  " + "\n  ".join(problems))
