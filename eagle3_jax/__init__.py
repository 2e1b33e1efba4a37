"""EAGLE-3 speculative decoding in JAX: train a draft head for an open LLM, decode with it, export it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle3_jax.config import DraftTree as DraftTree
    from eagle3_jax.decoding.engine import Engine as Engine
    from eagle3_jax.decoding.sampling import SamplingParams as SamplingParams
    from eagle3_jax.formats.sglang import load_draft as load_draft
    from eagle3_jax.models.registry import load_target as load_target

# Loaded on first use, so that a verb's `--help` does not wait for JAX.
_HOMES = {
    "DraftTree": "eagle3_jax.config",
    "Engine": "eagle3_jax.decoding.engine",
    "SamplingParams": "eagle3_jax.decoding.sampling",
    "load_draft": "eagle3_jax.formats.sglang",
    "load_target": "eagle3_jax.models.registry",
}
__all__ = ["DraftTree", "Engine", "SamplingParams", "load_draft", "load_target"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'eagle3_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
