"""Finds the packaged head of a target: `draft="auto"`."""

from __future__ import annotations

import pathlib
from typing import Any, Final

from eagle3_jax.config.kinds import in_target
from eagle3_jax.formats import draft_models, files, heads, kinds
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.runs import disk, manifest, processes

AUTO: Final = "auto"
LOOKUP: Final = "lookup"
# Weights are not compared, shapes are: they may be another copy of the model, such as the hub's of a quantised one.
_SAME = ("tokenizer", "chat_template", "aux_layers")


def packaged_head(target: Target) -> pathlib.Path | None:
    """Finds the folder of this package's head for a target; None if it has none."""
    for folder in map(draft_models.HEADS.joinpath, draft_models.packaged_heads()):
        trained_with = manifest.read(folder, made_by="export", verify=False)["identity"]["target"]
        if all(trained_with[field] == target.identity[field] for field in _SAME):
            head = heads.read(folder)
            if not head.kind.misfits(head.config, target.model.config):
                return folder
    return None


def load_packaged(target: Target, dtype: Any) -> Draft | None:
    """Loads this package's head for a target (see `load_draft`); None if it has none."""
    folder = packaged_head(target)
    return None if folder is None else heads.load_draft(folder, target=target, dtype=dtype)


def chosen_draft(draft: str | None, export: disk.Path, target: Target) -> tuple[str, pathlib.Path | None]:
    """Resolves the draft of a verb: as `Engine.load` takes it; and the folder of the head, if it has one.

    `draft` is a folder or a model's name, "auto", "mtp" or "lookup"; None is the run's own head, in the folder
    `export`, or without one "auto".

    Raises:
        ManifestError: the run's export is unfinished, or absent while this package has no head for the target.
        ValueError: "auto", and this package has no head for the target.
    """
    if draft is None:
        if (export / manifest.NAME).exists() or packaged_head(target) is None:
            manifest.read(export, made_by="export", verify=False)  # `load_draft` verifies
            return str(export), disk.local(export)
        processes.say(f"{export}: no head there; drafting with this package's head for {target.identity['name']}")
        draft = AUTO
    if draft == LOOKUP or in_target(draft):
        return draft, None
    if draft != AUTO:
        return draft, draft_models.resolve(draft)
    if (folder := packaged_head(target)) is None:
        expected = f"a head's folder or 'lookup': no packaged head for {target.identity['name']}"
        raise ValueError(f"draft: got 'auto', expected {expected}")
    return AUTO, folder


def draft_identity(draft: str, folder: pathlib.Path | None, token_map: str | None) -> dict[str, Any]:
    """Identifies what `chosen_draft` returns in a measurement's manifest, by digests of files and of the token map."""
    mapped = {} if token_map is None else {"token_map": kinds.token_map_digest(token_map)}
    return {"folder": draft, "files": folder and files.file_digests(folder), **mapped}
