"""The form of SGLang and SpecForge; vLLM and sglang-jax read it too, and it says to each what it needs.

SGLang (models/llama_eagle3.py, 0.5.23) captures layers by their outputs: boundary - 1, in `eagle_config` alone. vLLM
(v1/worker/gpu_model_runner.py, 0.32.0) takes boundaries, and those at top level first. `draft_vocab_size` must be
there; null gives the head the target's LM head. SGLang drops what it does not know without a word.
"""

from __future__ import annotations

from typing import Any

from eagle3_jax.formats import fields
from eagle3_jax.formats.fields import AUX_LAYERS, FIXED, LLAMA, Form, read_layers
from eagle3_jax.formats.stored import StoredHead
from eagle3_jax.formats.tensors import LAYER

_KEYS = LLAMA | {
    "draft_vocab_size": "vocab_size",
    "target_hidden_size": "hidden_size",
    "fc_norm": False,
    "norm_output": False,
    "norm_before_fc": False,
}


def _flatten(values: dict[str, Any]) -> dict[str, Any]:
    """`use_aux_norm` is an older name of `fc_norm`."""
    values = fields.with_inner_norm(values)
    return values | {"fc_norm": True} if values.get("use_aux_norm") else values


def _read_aux(values: dict[str, Any], problems: list[str]) -> tuple[int, ...] | None:
    boundaries = read_layers(AUX_LAYERS, values.get(AUX_LAYERS), problems)
    outputs = read_layers(f"eagle_config.{AUX_LAYERS}", (values.get("eagle_config") or {}).get(AUX_LAYERS), problems)
    if boundaries and outputs and boundaries != tuple(i + 1 for i in outputs):
        expected = [b - 1 for b in boundaries]
        problems.append(f"eagle_config.{AUX_LAYERS}: got {list(outputs)}, expected {expected}, {AUX_LAYERS} less one")
    return boundaries or (outputs and tuple(i + 1 for i in outputs))


def _write(head: StoredHead) -> dict[str, Any]:
    values = {"architectures": [FORM.architectures[0]], **fields.llama(head), **fields.draft_vocabulary(head)}
    values |= fields.flags(head, "fc_norm", "norm_output", "norm_before_fc")
    values |= {"draft_vocab_size": None} if head.tied else {}
    if head.config.aux_layers is not None:
        outputs = [boundary - 1 for boundary in head.config.aux_layers]
        values[AUX_LAYERS] = list(head.config.aux_layers)
        values["eagle_config"] = {AUX_LAYERS: outputs, "use_aux_hidden_state": True}
    return values


FORM = Form(
    name="sglang",
    engines=("SGLang", "vLLM", "sglang-jax"),
    architectures=("LlamaForCausalLMEagle3",),
    layer=LAYER,
    keys=_KEYS,
    present=("draft_vocab_size",),
    fixed=FIXED | {"norm_before_residual": False},
    flatten=_flatten,
    read_aux=_read_aux,
    write=_write,
)
