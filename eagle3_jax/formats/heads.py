"""Drafts on disk: loading one of any kind in any form, and saving it in a given one.

Engines silently drop unknown keys and tensors, and leave missing ones random. A load here therefore refuses everything
that does not fit, in one message. Some errors keep all shapes right and pass: another RoPE base, or aux layers in
another counting that the run uses too. Counters show these: `export --check numbers --expect`.
"""

from __future__ import annotations

import logging
import pathlib
from typing import Any

import jax.numpy as jnp

from eagle3_jax.formats import draft_models, kinds
from eagle3_jax.formats.files import DraftFormatError
from eagle3_jax.formats.kinds import StoredHead
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.models.checkpoint.identity import COPY, check_same_target
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.target_config import ModelConfig
from eagle3_jax.runs import disk, manifest

_log = logging.getLogger(__name__)


def load_draft(
    folder: str | pathlib.Path,
    *,
    target: Target | ModelConfig,
    dtype: Any = jnp.float32,
    exact: bool = False,
    token_map: str | pathlib.Path | None = None,
) -> Draft:
    """Loads the draft for `target`, of any kind (`config.kinds.KINDS`), onto the default device.

    Accepts the engines' variants: `layers.0.` for `midlayer.`, a `model.` prefix, no `t2d`, no `rope_theta` (10000), no
    LM head (the target's rows of the draft vocabulary).

    Args:
        folder: the folder of a head in any of `FORMS`; or of a model of any family of targets, or its name.
        target: the model to draft for. The manifest beside a head of `export` names the target of its training. Another
            tokenizer is refused, and other aux layers are, but for a head that names its own, at which the target is
            observed; other weights or another chat template (`identity.COPY`) are logged as a warning. Only shapes are
            compared for a head without a manifest, or for an architecture alone (`ModelConfig`).
        dtype: dtype of the loaded weights.
        exact: refuses other weights and another chat template too.
        token_map: the tokens that a head of EAGLE-2 drafts (FR-Spec), see `eagle2.token_maps.read`; None is all.

    Raises:
        DraftFormatError: every problem of config.json and every missing, surplus or wrongly shaped tensor, by name;
            embeddings in the file that differ from the loaded target's; a model of another vocabulary.
        ManifestError: the head was trained with another target, by field. TargetError: a name that cannot be resolved.
    """
    folder = draft_models.resolve(folder)
    kind = kinds.of_folder(folder)
    if not kind.any_target and isinstance(target, Target) and (folder / manifest.NAME).exists():
        trained_with = manifest.read(folder, "export")["identity"].get("target")
        free = {*COPY, "aux_layers"} if kind.own_layers else COPY
        check_same_target(folder, trained_with, target.identity, but=() if exact else free)
        others = [words for field, words in COPY.items() if trained_with.get(field) != target.identity[field]]
        if others:
            _log.warning(
                "draft %s: a head of %s, trained with %s than those of %s; fewer drafts may be accepted, the tokens "
                "stay exact",
                *(folder, trained_with.get("name"), " and ".join(others), target.identity["name"]),
            )
    if token_map is not None and kind.token_map is None:
        raise DraftFormatError(f"token_map: got {token_map}, expected none: {folder} is a draft of {kind.label}")
    if kind.needs_weights and not isinstance(target, Target):
        raise DraftFormatError(f"{folder}: a draft of {kind.label}, expected a loaded target")
    return kind.load(folder, target, dtype, token_map)


def save_draft(
    folder: str | pathlib.Path,
    draft: Draft,
    *,
    target: ModelConfig,
    dtype: str,
    form: str = "sglang",
    target_name: str | None = None,
) -> None:
    """Writes a head for `target` to a new `folder`, atomically.

    Args:
        dtype: dtype of the stored weights, "float32" or "bfloat16".
        form: one of `FORMS`.
        target_name: hub id or folder, for the form that names it (speculators).

    Raises:
        DraftFormatError: the head does not fit the target, the form's engine could not run it, or its token ids cannot
            be a draft vocabulary.
        FileExistsError: `folder` exists.
    """
    folder = pathlib.Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder}: exists already, expected a new folder")
    kind = kinds.of_head(draft.head)
    head = kind.stored(draft, target, dtype, target_name)
    with disk.atomic(folder) as partial:
        kind.write(partial, head, form)


def read(folder: str | pathlib.Path, target: Target | ModelConfig | None = None) -> StoredHead:
    """Reads a head from its folder; config.json tells its kind and form.

    It is compared with `target` unless None, and its embeddings with a loaded one's. Raises DraftFormatError: every
    problem at once; a draft that has no other form (a model, a head of EAGLE-2, MTP).
    """
    return kinds.of_folder(pathlib.Path(folder)).read(pathlib.Path(folder), target)
