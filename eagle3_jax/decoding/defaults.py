"""Defaults for sampling parameters that a request leaves out, from generation_config.json, as in vLLM and SGLang."""

from __future__ import annotations

from typing import Any

from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.models.checkpoint.fetch import GENERATION, fetch
from eagle3_jax.runs import disk

# The file's name of a field -> `SamplingParams`'.
_FIELDS = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
_FIELDS["max_new_tokens"] = "max_tokens"


def sampling_defaults(chosen: str, target: str) -> dict[str, Any]:
    """Reads the defaults that `serve.generation_config` chose, as arguments of `SamplingParams`; `max_tokens` limits.

    Raises ValueError: a folder without the file, or a value out of range.
    """
    if chosen == "vllm":
        return {}
    path = (fetch(target, whole=False) if chosen == "auto" else disk.path_of(chosen)) / GENERATION
    if chosen != "auto" and not path.exists():
        expected = f'"auto", "vllm", or a folder with {GENERATION}'
        raise ValueError(f"serve.generation_config: got {chosen}, expected {expected}")
    held = disk.read_json(path) if path.exists() else {}
    found = {ours: held[name] for name, ours in _FIELDS.items() if held.get(name) is not None}
    try:
        SamplingParams(**found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return found
