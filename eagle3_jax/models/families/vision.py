"""Checkpoints of models that also see images: the text model in them, which is all that is read.

Names of tensors are those of the hub ("language_model.model.layers...") and of transformers ("model.language_model.
layers..."); a text model alone has neither part.
"""

from __future__ import annotations

from typing import Any

# `architectures` of a whole model -> its text model's.
TEXT_OF = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
}
# Fields that hold of the whole model, wherever else they stand.
_OUTSIDE = ("bos_token_id", "eos_token_id")
# How the names of the other tensors begin.
TOWER = ("multi_modal_projector.", "vision_model.", "vision_tower.", "visual.")


def architecture(values: dict[str, Any]) -> str | None:
    """The only name in a config.json's `architectures`; None where that is something else."""
    named = values.get("architectures")
    return named[0] if isinstance(named, list) and len(named) == 1 and isinstance(named[0], str) else None


def text_values(values: dict[str, Any]) -> dict[str, Any]:
    """The text model's config.json, of the whole model's; any other as it is."""
    text = TEXT_OF.get(architecture(values) or "")
    if text is None:
        return values
    inner = values.get("text_config") or {}
    # What stands outside is the checkpoint's own; inside may be the class' default (Gemma 3: one stop token of two).
    outside = {name: values[name] for name in _OUTSIDE if values.get(name) is not None}
    values = {**values, **inner, **outside, "architectures": [text]}
    rope = values.get("rope_scaling")
    if isinstance(rope, dict) and "mrope" in (rope.get("type"), rope.get("rope_type")):
        del values["rope_scaling"]  # three positions a token, which for text are the same
    return values


def text_name(name: str) -> str:
    """A tensor's name as a text model alone has it; of a tower's, without what stands before the tower's."""
    if name.startswith("language_model."):
        return name.removeprefix("language_model.")
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    bare = name.removeprefix("model.")
    return bare if bare.startswith(TOWER) else name
