"""Draft heads on disk: loading a head in any form, and saving it in a given one.

Engines silently drop unknown keys and tensors, and leave missing ones random. A load here therefore refuses everything
that does not fit, in one message. Some errors keep all shapes right and pass: another RoPE base, or aux layers in
another counting that the run uses too. Counters show these: `export --check numbers --expect`.
"""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from eagle3_jax.formats import compatibility, draft_models, draft_vocabulary, eagle2, fields, files, mtp, token_maps
from eagle3_jax.formats.blocks.stored import (
    StoredBlockHead,
    config_values,
    from_head,
    is_block_head,
    read_block_head,
    to_head,
)
from eagle3_jax.formats.forms import FORMS, form_of
from eagle3_jax.formats.stored import DraftFormatError, StoredHead, from_draft, misfits, stale_embeddings, to_draft
from eagle3_jax.formats.tensors import EMBEDDINGS, LAYER, LM_HEAD, draft_table, head_problems
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.models.checkpoint.identity import COPY, check_same_target
from eagle3_jax.models.drafts.dflash import DFlash
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.target import ModelConfig
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
    """Loads the draft for `target`: a head in any of `FORMS`, of EAGLE-2 (see `eagle2`), or a smaller model.

    Heads are EAGLE-3's, block heads (DFlash, DSpark, DFlash2; see `blocks`), and MTP layers by themselves (see `mtp`).

    Accepts the engines' variants: `layers.0.` for `midlayer.`, a `model.` prefix, no `t2d`, no `rope_theta` (10000), no
    LM head (the target's rows of the draft vocabulary).

    Args:
        folder: the folder of a head; or of a model of any family of targets, or its name (see `load_target`).
        target: the model to draft for. The manifest beside a head of `export` names the target of its training. Another
            tokenizer is refused, and other aux layers are, but for a block head, whose own the target is observed at;
            other weights or another chat template (`identity.COPY`) are logged as a warning. Only shapes are compared
            for a head without a manifest, or for an architecture alone (`ModelConfig`).
        dtype: dtype of the loaded weights.
        exact: refuses other weights and another chat template too.
        token_map: the tokens that a head of EAGLE-2 drafts (FR-Spec), see `token_maps.read`; None is all.

    Returns:
        The head with its draft vocabulary, on the default device, for `Engine` and `decoding.rounds.generate`.

    Raises:
        DraftFormatError: every problem of config.json and every missing, surplus or wrongly shaped tensor, by name;
            embeddings in the file that differ from the loaded target's; a model of another vocabulary.
        ManifestError: the head was trained with another target, by field. TargetError: a name that cannot be resolved.
    """
    folder = draft_models.resolve(folder)
    if draft_models.is_model(folder):
        return _load_model(folder, target, dtype, token_map)
    if isinstance(target, Target) and (folder / manifest.NAME).exists():
        trained_with = manifest.read(folder, "export")["identity"].get("target")
        free = {*COPY, "aux_layers"} if is_block_head(folder) else COPY
        check_same_target(folder, trained_with, target.identity, but=() if exact else free)
        _warn_of_a_copy(folder, trained_with, target)
    if eagle2.is_eagle2(folder):
        return _load_eagle2(folder, target, dtype, token_map)
    if token_map is not None:
        raise DraftFormatError(f"token_map: got {token_map}, expected none: {folder} has a draft vocabulary of its own")
    if mtp.is_layer(folder):
        if not isinstance(target, Target):
            raise DraftFormatError(f"{folder}: an MTP layer, whose LM head is the target's: expected a loaded target")
        return mtp.load(target, dtype, folder)
    stored = read(folder, target)
    if isinstance(stored, StoredBlockHead):
        return Draft(to_head(stored, target, dtype), jnp.asarray(stored.token_ids, jnp.int32))
    return to_draft(stored, target, dtype)


def _warn_of_a_copy(folder: pathlib.Path, trained_with: dict[str, Any], target: Target) -> None:
    others = [words for field, words in COPY.items() if trained_with.get(field) != target.identity[field]]
    if others:
        _log.warning(
            "draft %s: a head of %s, trained with %s than those of %s; fewer drafts may be accepted, the tokens stay "
            "exact",
            *(folder, trained_with.get("name"), " and ".join(others), target.identity["name"]),
        )


def _load_model(
    folder: pathlib.Path, target: Target | ModelConfig, dtype: Any, token_map: str | pathlib.Path | None
) -> Draft:
    if not isinstance(target, Target):
        raise DraftFormatError(f"{folder}: a whole model; expected a loaded target, to compare tokenizers")
    if token_map is not None:
        raise DraftFormatError(f"token_map: got {token_map}, expected none: {folder} is a whole model")
    return draft_models.load(folder, target, dtype)


def _load_eagle2(
    folder: pathlib.Path,
    target: Target | ModelConfig,
    dtype: Any,
    token_map: str | pathlib.Path | None,
) -> Draft:
    if not isinstance(target, Target):
        raise DraftFormatError(f"{folder}: a head of EAGLE-2, whose LM head is the target's: expected a loaded target")
    size = target.model.config.vocab_size
    ids = None if token_map is None else token_maps.read(token_map, size)
    return eagle2.load(folder, target, dtype, ids)


def save_draft(
    folder: str | pathlib.Path,
    draft: Draft,
    *,
    target: ModelConfig,
    dtype: str,
    form: str = "sglang",
    target_name: str | None = None,
) -> None:
    """Writes a head to `folder`, atomically.

    Args:
        folder: must not exist yet.
        target: the model that the head drafts for.
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
    head, problems = stored_head(draft, target, dtype, target_name)
    with disk.atomic(folder) as partial:
        write(partial, head, form, problems)


def stored_head(draft: Draft, target: ModelConfig, dtype: str, name: str | None) -> tuple[StoredHead, list[str]]:
    """Converts a head in memory, of any kind, to a stored one, with a list of its problems; `name` is the target's."""
    if isinstance(draft.head, DFlash):
        return from_head(draft.head, draft.token_ids, target, dtype, name)
    return from_draft(draft, target, dtype, name)


def read(folder: str | pathlib.Path, target: Target | ModelConfig | None = None) -> StoredHead:
    """Reads a head from its folder; config.json tells its form.

    Args:
        target: the model to draft for, compared with the head unless None. Embeddings are compared with a loaded one's.

    Raises:
        DraftFormatError: every problem at once.
    """
    folder = pathlib.Path(folder)
    if is_block_head(folder):
        return read_block_head(folder, target)
    tensors, problems = files.read_tensors(folder)
    values = files.read_config(folder)
    form = form_of(values)
    values = form.flatten(values)
    config = fields.read(form, values, problems)
    if config is not None:
        problems += head_problems(tensors, draft_table(config), config)
        if target is not None:
            problems += misfits(config, target.model.config if isinstance(target, Target) else target)
        if isinstance(target, Target):
            problems += stale_embeddings(tensors, target)
    # Some heads of tied targets set it and have an LM head of their own nevertheless (AngelSlim/Qwen3-4B_eagle3).
    if values.get("tie_word_embeddings") and LM_HEAD not in tensors:
        problems.append(f"tie_word_embeddings: got True, expected False, or a tensor {LM_HEAD}")
    _refuse(problems, f"{folder} does not hold a usable draft head")
    assert config is not None
    ids = draft_vocabulary.read(tensors.get("d2t"), config)
    dropped = {"d2t", "t2d"} | ({EMBEDDINGS} if config.target_hidden_size == config.hidden_size else set())
    return StoredHead(
        config=config,
        tensors={name: tensor for name, tensor in tensors.items() if name not in dropped},
        token_ids=ids,
        bos_token_id=values.get("bos_token_id"),
        eos_token_id=values.get("eos_token_id"),
        verifier=values.get("verifier"),
    )


def write(folder: pathlib.Path, head: StoredHead, form: str, problems: Sequence[str] = ()) -> None:
    """Writes a head to `folder`, reads it back and compares every bit.

    Args:
        problems: those found with the head already, raised together with those of the form.

    Raises:
        DraftFormatError: the form's engine could not run the head, or it does not read back the same.
    """
    target_form = FORMS[form]
    refused = compatibility.refusals(target_form, head)
    if refused:
        able = [other.name for other in FORMS.values() if not compatibility.refusals(other, head)]
        refused.append(f"export.format: got {form!r}, expected {' or '.join(able) or 'another head'}")
    _refuse([*problems, *refused], "this draft cannot be saved")
    if isinstance(head, StoredBlockHead):
        values, layer = config_values(head, form), LAYER
    else:
        values, layer = target_form.write(head), target_form.layer
    tensors = {name.replace(LAYER, layer): np.ascontiguousarray(tensor) for name, tensor in head.tensors.items()}
    vocabulary = draft_vocabulary.write(head.token_ids, head.config.vocab_size)
    files.write(folder, values, tensors | vocabulary)
    if not read(folder).same(head):
        raise DraftFormatError(f"{folder}: the head does not read back the same; is the disk full?")


def _refuse(problems: list[str], sentence: str) -> None:
    if problems:
        raise DraftFormatError(f"{sentence}:\n  " + "\n  ".join(problems))
