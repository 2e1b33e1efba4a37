"""Heads that come with this package, found by the target that they draft for: `draft="auto"`."""

from __future__ import annotations

import pathlib
from typing import Any, Final

from eagle3_jax.formats import draft_models, files, heads, token_maps
from eagle3_jax.formats.mtp import MTP
from eagle3_jax.formats.stored import misfits
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.runs import manifest, processes

AUTO: Final = "auto"
LOOKUP: Final = "lookup"
HEADS = pathlib.Path(__file__).parents[1] / "heads"
# The weights may be another copy of the same model, such as the hub's beside a quantised one: shapes alone must fit.
_SAME = ("tokenizer", "chat_template", "aux_layers")


def shipped_head(target: Target) -> pathlib.Path | None:
    """The folder of the head that comes for this target; None where none does."""
    for path in sorted(HEADS.glob(f"*/{manifest.NAME}")):
        trained_with = manifest.read(path.parent, made_by="export", verify=False)["identity"]["target"]
        if all(trained_with[field] == target.identity[field] for field in _SAME):
            if not misfits(heads.read(path.parent).config, target.model.config):
                return path.parent
    return None


def load_shipped(target: Target, dtype: Any) -> Draft | None:
    """The head that comes for this target, ready to draft (see `load_draft`); None where none does."""
    folder = shipped_head(target)
    return None if folder is None else heads.load_draft(folder, target=target, dtype=dtype)


def chosen_draft(draft: str | None, export: pathlib.Path, target: Target) -> tuple[str, pathlib.Path | None]:
    """The draft that a verb works with.

    Args:
        draft: a folder or a model's name, "auto", "mtp" or "lookup"; None is the run's own or, where the run has none,
            "auto".
        export: the run's own.

    Returns:
        The draft, as `Engine.load` takes it; and the folder of the head, None of "lookup" and "mtp".

    Raises:
        ManifestError: the run's export is not finished; or it has none, and no head comes for this target.
        ValueError: "auto", and no head comes for this target.
    """
    if draft is None:
        if (export / manifest.NAME).exists() or shipped_head(target) is None:
            manifest.read(export, made_by="export", verify=False)  # `load_draft` does
            return str(export), export
        processes.say(f"{export}: no head there; that of this package for {target.identity['name']} drafts")
        draft = AUTO
    if draft in (LOOKUP, MTP):
        return draft, None
    if draft != AUTO:
        return draft, draft_models.resolve(draft)
    folder = shipped_head(target)
    if folder is None:
        raise ValueError(f"draft: got 'auto', expected a folder: no head comes for {target.identity['name']}")
    return AUTO, folder


def draft_identity(draft: str, folder: pathlib.Path | None, token_map: str | None) -> dict[str, Any]:
    """What a measurement notes of a verb's `draft`, and of what `chosen_draft` found, that another one would change."""
    held = folder and files.file_digests(folder)
    mapped = {} if token_map is None else {"token_map": manifest.digest(token_maps.locate(token_map))}
    return {"folder": draft, "files": held, **mapped}
