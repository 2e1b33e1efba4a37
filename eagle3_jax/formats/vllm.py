"""vLLM's own form: under its own name of the architecture, so that SGLang refuses what it would misread.

vLLM (models/llama_eagle3.py and v1/worker/gpu_model_runner.py, 0.32.0) takes boundaries as they are, at top level or
else in `eagle_config`, and counts them only in the latter: `num_aux_hidden_states` says how many, where not three.
tpu-inference (models/jax/llama_eagle3.py, b8692ff) knows this name alone, and tensors `midlayer.*`.
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
    "norm_before_residual": False,
    "norm_before_fc": False,
}


def read_boundaries(values: dict[str, Any], problems: list[str]) -> tuple[int, ...] | None:
    """Those at top level, else those in `eagle_config`."""
    inner = read_layers(f"eagle_config.{AUX_LAYERS}", (values.get("eagle_config") or {}).get(AUX_LAYERS), problems)
    return read_layers(AUX_LAYERS, values.get(AUX_LAYERS), problems) or inner


def count(head: StoredHead) -> dict[str, int]:
    """How many aux layers there are, where vLLM would expect three."""
    number = head.config.num_aux_layers
    return {} if number == 3 else {"num_aux_hidden_states": number}


def _write(head: StoredHead) -> dict[str, Any]:
    values = {"architectures": [FORM.architectures[0]], **fields.llama(head), **fields.draft_vocabulary(head)}
    values |= fields.flags(head, "fc_norm", "norm_output", "norm_before_residual", "norm_before_fc")
    if head.config.aux_layers is not None:
        values |= {AUX_LAYERS: list(head.config.aux_layers), **count(head)}
    return values


FORM = Form(
    name="vllm",
    engines=("vLLM", "tpu-inference"),
    architectures=("Eagle3LlamaForCausalLM",),
    layer=LAYER,
    keys=_KEYS,
    fixed=FIXED,
    flatten=fields.with_inner_norm,
    read_aux=read_boundaries,
    write=_write,
)
