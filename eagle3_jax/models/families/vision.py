"""Vision-language checkpoints, of which only the text model is read.

Its tensors are named "language_model.model.layers..." on the hub and "model.language_model.layers..." in transformers;
a text-only checkpoint has neither prefix.
"""

from __future__ import annotations

from typing import Any

# Architecture of a vision-language model -> that of its text model.
TEXT_OF = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Gemma4UnifiedForConditionalGeneration": "Gemma4ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "Mistral3ForConditionalGeneration": "Ministral3ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
# The same, and the `model_type` of the text model -> its architecture: Mistral Small 3 is wrapped as Ministral 3 is.
_BY_TYPE = {("Ministral3ForCausalLM", "mistral"): "MistralForCausalLM"}
# Fields whose top-level values override those of `text_config`.
_OUTSIDE = ("bos_token_id", "eos_token_id", "tie_word_embeddings")
# Prefixes of the tensors outside the text model.
TOWER = (
    *("multi_modal_projector.", "vision_model.", "vision_tower.", "vision_embedder.", "visual."),
    *("audio_tower.", "embed_audio.", "embed_vision."),
)


def architecture(values: dict[str, Any]) -> str | None:
    """Returns the only name in a config.json's `architectures`; None if there is not exactly one."""
    named = values.get("architectures")
    return named[0] if isinstance(named, list) and len(named) == 1 and isinstance(named[0], str) else None


def text_values(values: dict[str, Any]) -> dict[str, Any]:
    """Extracts the text model's config.json from a vision-language model's; any other is returned unchanged."""
    text = TEXT_OF.get(architecture(values) or "")
    if text is None:
        return values
    inner = values.get("text_config") or {}
    text = _BY_TYPE.get((text, inner.get("model_type", "")), text)
    # The top-level value is the checkpoint's; the inner one may be the class default (Gemma 3: one stop token of two).
    outside = {name: values[name] for name in _OUTSIDE if values.get(name) is not None}
    values = {**values, **inner, **outside, "architectures": [text]}
    rope = values.get("rope_scaling")
    if isinstance(rope, dict) and "mrope" in (rope.get("type"), rope.get("rope_type")):
        del values["rope_scaling"]  # mrope: three positions per token, equal for text
    return values


def text_name(name: str) -> str:
    """Maps a tensor's name to that in a text-only checkpoint; a tower's loses the prefix before the tower."""
    if name.startswith("language_model."):
        return name.removeprefix("language_model.")
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    bare = name.removeprefix("model.")
    return bare if bare.startswith(TOWER) else name
