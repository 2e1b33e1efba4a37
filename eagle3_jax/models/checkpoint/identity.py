"""What makes a target this target and no other, and the one check that two are the same."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Collection
from typing import Any

from eagle3_jax.models import chat_template
from eagle3_jax.models.checkpoint import load as weights
from eagle3_jax.models.target import ModelConfig
from eagle3_jax.runs.manifest import ManifestError

# What must agree between conversations, features, heads and the target that uses them. Its name and dtype may differ.
FIELDS = ("weights", "tokenizer", "chat_template", "aux_layers")
# Of these, what decides no more than how many drafts of a head are accepted: another copy of the same model, such as a
# quantised or a fine-tuned one, may take the head.
COPY = {"weights": "other weights", "chat_template": "another chat template"}


def identify(
    files: dict[str, str], config: ModelConfig, tokenizer: Any, *, name: str, commit: str | None, dtype: str
) -> dict[str, Any]:
    """The identity of a target: `FIELDS`, name, commit, architecture and dtype. JSON-ready; goes into every manifest.

    Args:
        commit: of the hub's repository that it was taken from; None where it came from elsewhere.
        files: digests of its weight files, see `weights.file_digests`.
    """
    return {
        "name": name,
        "commit": commit,
        "architecture": config.architecture,
        "weights": weights.fingerprint(files, config),
        "tokenizer": tokenizer_digest(tokenizer),
        "chat_template": chat_template.digest(tokenizer),
        "aux_layers": list(config.aux_layers),
        "dtype": dtype,
    }


def tokenizer_digest(tokenizer: Any) -> str:
    """Of all that decides which ids a text becomes, its chat template left out."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


def check_same_target(
    folder: str | pathlib.Path, found: Any, expected: dict[str, Any], *, but: Collection[str] = ()
) -> None:
    """Refuses what was made with another target.

    Args:
        folder: what was made; its manifest says `found`.
        found: the identity of the target that it was made with.
        expected: the identity of the target that is to use it.
        but: fields that what was made does not depend on.

    Raises:
        ManifestError: every field that differs, with both values.
    """
    found = found if isinstance(found, dict) else {}
    problems = [
        f"target.{field}: found {found.get(field)!r}, expected {expected[field]!r}"
        for field in FIELDS
        if field not in but and found.get(field) != expected[field]
    ]
    if problems:
        raise ManifestError(f"{folder}: made with another target:\n  " + "\n  ".join(problems))
