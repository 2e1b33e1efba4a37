"""Loads the models of an engine by name, folder or hub id: the target, and the draft that fits it."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, Literal

from eagle3_jax.config import MeshConfig, TargetConfig, Weights
from eagle3_jax.config.checks import require
from eagle3_jax.config.kinds import in_target
from eagle3_jax.formats import kinds
from eagle3_jax.formats.heads import load_draft
from eagle3_jax.formats.packaged import AUTO, LOOKUP, load_packaged
from eagle3_jax.mesh import decoding_mesh
from eagle3_jax.models.checkpoint.fetch import Target, load_target, target_config
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.target import TargetModel


def load_models(
    target: TargetConfig | str | pathlib.Path | Target,
    draft: str | pathlib.Path | Draft | None,
    *,
    dtype: Literal["float32", "bfloat16"] | None,
    weights: Weights | None,
    mesh: MeshConfig | None,
    token_map: str | pathlib.Path | None,
) -> tuple[TargetModel, Any, Draft | Literal["lookup"] | None, dict[str, Any]]:
    """Loads the target, observed at the draft's layers, its tokenizer, the draft, and the target's identity.

    Arguments and errors: `Engine.load`. Those that do not go together are refused before anything is loaded.
    """
    expected = "a folder, a name, 'auto', 'lookup', 'mtp', a loaded head, or None for no drafts"
    require(draft is None or isinstance(draft, str | pathlib.Path | Draft), "draft", draft, expected)
    in_folder = isinstance(draft, str | pathlib.Path) and draft not in (AUTO, LOOKUP) and not in_target(draft)
    if token_map is not None and not in_folder:
        got = repr(draft) if draft is None or isinstance(draft, str) else type(draft).__name__
        raise ValueError(f"token_map: got {token_map}, expected None beside draft {got}, which it does not cut")
    if isinstance(target, Target):
        if dtype is not None or weights is not None or mesh is not None:
            got = f"{dtype}, {weights}, {mesh}"
            raise ValueError(f"dtype, weights, mesh: got {got}, expected None for a target that is loaded already")
        loaded = target
    else:
        config = target_config(target)
        config = config if dtype is None else dataclasses.replace(config, dtype=dtype)
        config = config if weights is None else dataclasses.replace(config, weights=weights)
        loaded = load_target(config, None if mesh is None else decoding_mesh(mesh), for_engine=True)
    of_target = loaded.model.embed[...].dtype
    if isinstance(draft, pathlib.Path) or (isinstance(draft, str) and in_folder):
        head = load_draft(draft, target=loaded, dtype=of_target, token_map=token_map)
    elif isinstance(draft, str) and in_target(draft):
        head = kinds.named(draft).load(None, loaded, of_target)
    elif isinstance(draft, str):
        head = LOOKUP if draft == LOOKUP else load_packaged(loaded, of_target)
    else:
        head = draft
    model = loaded.model
    if isinstance(head, Draft) and head.head.config.aux_layers != model.config.aux_layers:
        model = model.observed_at(head.head.config.aux_layers)
    return model, loaded.tokenizer, head, loaded.identity
