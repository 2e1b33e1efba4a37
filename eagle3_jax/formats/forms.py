"""The six forms of an EAGLE-3 head on disk, named after their readers: config.json written and read.

`FORMS` is the table. Aux layers are boundaries in memory; each form's comment says how its engines count them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from eagle3_jax.formats import fields
from eagle3_jax.formats.fields import FIXED, LLAMA, REQUIRED, Form, read_layers
from eagle3_jax.formats.kinds import StoredHead
from eagle3_jax.formats.tensors import AUX_LAYERS, LAYER
from eagle3_jax.models.drafts.dflash import SLIDING
from eagle3_jax.models.layers import LinearScaling

_FLAGS = ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc")
_OFF = dict.fromkeys(_FLAGS, False)
_LAYER = {"qk_norm": False, "sliding_window": None}
_SIZES = {"draft_vocab_size": "vocab_size", "target_hidden_size": "hidden_size"}

# ------------------------------------------------------------------------------------------------------------- sglang
# SGLang and SpecForge; vLLM and sglang-jax read this form too, and it holds the keys of each. SGLang
# (models/llama_eagle3.py, 0.5.23) counts layers by their outputs (boundary - 1), in `eagle_config` alone. vLLM
# (v1/worker/gpu_model_runner.py, 0.32.0) takes boundaries, those at top level first. `draft_vocab_size` must be
# present; null makes SGLang use the target's LM head. SGLang drops unknown keys without a message.


def _flatten_sglang(values: dict[str, Any]) -> dict[str, Any]:
    """Maps `use_aux_norm`, an older name, to `fc_norm`."""
    values = fields.with_inner_norm(values)
    return values | {"fc_norm": True} if values.get("use_aux_norm") else values


def _read_aux_sglang(values: dict[str, Any], problems: list[str]) -> tuple[int, ...] | None:
    boundaries = read_layers(AUX_LAYERS, values.get(AUX_LAYERS), problems)
    outputs = read_layers(f"eagle_config.{AUX_LAYERS}", (values.get("eagle_config") or {}).get(AUX_LAYERS), problems)
    if boundaries and outputs and boundaries != tuple(i + 1 for i in outputs):
        expected = [b - 1 for b in boundaries]
        problems.append(f"eagle_config.{AUX_LAYERS}: got {list(outputs)}, expected {expected}, {AUX_LAYERS} less one")
    return boundaries or (outputs and tuple(i + 1 for i in outputs))


def _write_sglang(head: StoredHead) -> dict[str, Any]:
    values = {"architectures": [SGLANG.architectures[0]], **fields.llama(head), **fields.draft_vocabulary(head)}
    values |= {flag: True for flag in _FLAGS if getattr(head.config, flag)}
    values |= {"draft_vocab_size": None} if head.tied else {}
    if head.config.aux_layers is not None:
        outputs = [boundary - 1 for boundary in head.config.aux_layers]
        values[AUX_LAYERS] = list(head.config.aux_layers)
        values["eagle_config"] = {AUX_LAYERS: outputs, "use_aux_hidden_state": True}
    return values


SGLANG = Form(
    name="sglang",
    engines=("SGLang", "vLLM", "sglang-jax"),
    architectures=("LlamaForCausalLMEagle3",),
    layer=LAYER,
    keys=LLAMA | _SIZES | {flag: False for flag in _FLAGS if flag != "norm_before_residual"},
    present=("draft_vocab_size",),
    fixed=FIXED | {"norm_before_residual": False},
    flatten=_flatten_sglang,
    read_aux=_read_aux_sglang,
    write=_write_sglang,
)

# --------------------------------------------------------------------------------------------------------------- vllm
# vLLM, under its own architecture name: SGLang refuses what it would misread. vLLM (models/llama_eagle3.py and
# v1/worker/gpu_model_runner.py, 0.32.0) takes boundaries, at top level or else in `eagle_config`. It expects three of
# them unless `num_aux_hidden_states` gives another number. tpu-inference (models/jax/llama_eagle3.py, 0.32.0) knows
# the first name alone, and tensors `midlayer.*`.
#
# A head with norms of queries and keys is vLLM's Qwen 3 class (models/qwen3_eagle3.py, 0.32.0). Both classes read the
# window of a sliding layer.


def _flatten_vllm(values: dict[str, Any]) -> dict[str, Any]:
    return fields.with_inner_norm(values) | {"qk_norm": fields.architecture(values) == VLLM.architectures[1]}


def _layer(head: StoredHead) -> dict[str, Any]:
    """Writes the layer as vLLM has it: Qwen 3's where it norms queries and keys, else Llama's."""
    c, values = head.config, fields.llama(head)
    values |= {"model_type": "qwen3"} if c.qk_norm else {}
    if c.sliding_window is not None:
        values |= {"layer_types": [SLIDING], "sliding_window": c.sliding_window, "use_sliding_window": True}
    return values


def _read_aux_vllm(values: dict[str, Any], problems: list[str]) -> tuple[int, ...] | None:
    inner = read_layers(f"eagle_config.{AUX_LAYERS}", (values.get("eagle_config") or {}).get(AUX_LAYERS), problems)
    return read_layers(AUX_LAYERS, values.get(AUX_LAYERS), problems) or inner


def _count(head: StoredHead) -> dict[str, int]:
    """Writes `num_aux_hidden_states` where it is not vLLM's three."""
    number = head.config.num_aux_layers
    return {} if number == 3 else {"num_aux_hidden_states": number}


def _write_vllm(head: StoredHead) -> dict[str, Any]:
    architecture = VLLM.architectures[head.config.qk_norm]
    values = {"architectures": [architecture], **_layer(head), **fields.draft_vocabulary(head)}
    values |= {flag: True for flag in _FLAGS if getattr(head.config, flag)}
    if head.config.aux_layers is not None:
        values |= {AUX_LAYERS: list(head.config.aux_layers), **_count(head)}
    return values


VLLM = Form(
    name="vllm",
    engines=("vLLM", "tpu-inference"),
    architectures=("Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM"),
    layer=LAYER,
    keys=LLAMA | _SIZES | _OFF | _LAYER,
    fixed=FIXED,
    flatten=_flatten_vllm,
    read_aux=_read_aux_vllm,
    write=_write_vllm,
)

# -------------------------------------------------------------------------------------------------------- speculators
# speculators (models/eagle3/config.py, c05b95b), which `vllm serve HEAD` reads with the target's name. The draft
# layer's `LlamaConfig`, or `Qwen3Config` with norms of queries and keys, stands in `transformer_layer_config`, the
# other keys beside it; aux layers are boundaries. vLLM takes a missing `norm_before_residual` for true
# (transformers_utils/configs/speculators/algos.py, 0.32.0), so every flag is written. Embeddings, which speculators
# saves, are left out: both readers then use the target's.


def _flatten_speculators(values: dict[str, Any]) -> dict[str, Any]:
    layer, speculation = values.get("transformer_layer_config"), values.get("speculators_config")
    outer = {key: value for key, value in values.items() if key != "transformer_layer_config"}
    verifier = speculation.get("verifier") if isinstance(speculation, dict) else None
    values = (layer if isinstance(layer, dict) else {}) | outer | {"verifier": verifier}
    return values | {"qk_norm": values.get("model_type") == "qwen3"}


def _read_aux_speculators(values: dict[str, Any], problems: list[str]) -> tuple[int, ...] | None:
    if (got := values.get("model_type", "llama")) not in ("llama", "qwen3"):
        problems.append(f"model_type: got {got!r}, expected 'llama' or 'qwen3'")
    return read_layers(AUX_LAYERS, values.get(AUX_LAYERS), problems)


def _write_speculators(head: StoredHead) -> dict[str, Any]:
    layers = head.config.aux_layers
    return {
        "architectures": [SPECULATORS.architectures[0]],
        "speculators_model_type": "eagle3",
        **fields.draft_vocabulary(head),
        **{flag: getattr(head.config, flag) for flag in _FLAGS},
        "embed_requires_grad": False,
        **({} if layers is None else {AUX_LAYERS: list(layers)}),
        "tie_word_embeddings": False,
        "transformer_layer_config": _layer(head) | _count(head),
        "speculators_config": speculation("eagle3", 3, head.verifier),  # vLLM's default number
    }


def speculation(algorithm: str, drafts: int, verifier: dict[str, Any] | None) -> dict[str, Any]:
    """Writes how speculators drafts with a head of any kind."""
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafts}],
        "verifier": verifier or {"name_or_path": None, "architectures": []},
    }


SPECULATORS = Form(
    name="speculators",
    engines=("vLLM",),
    architectures=("Eagle3DraftModel", "Eagle3Speculator"),
    layer="layers.0.",
    keys=LLAMA | _SIZES | _OFF | _LAYER | {"norm_before_residual": True},
    fixed=FIXED | {"speculators_model_type": "eagle3", "embed_requires_grad": False},
    flatten=_flatten_speculators,
    read_aux=_read_aux_speculators,
    write=_write_speculators,
)

# -------------------------------------------------------------------------------------------------------------- eagle
# SafeAILab/EAGLE (model/cnets.py, model/configs.py, cb7e084), whose heads vLLM and tpu-inference read too. config.json
# is a plain `LlamaConfig` under the target's own architecture name, with `draft_vocab_size`. The head has one layer,
# whatever `num_hidden_layers` says (EAGLE3-Vicuna1.3-13B has its target's 40). Aux layers are the default; heads are
# hidden_size / num_attention_heads wide. RoPE is unscaled, or linear over a base of 10000; `rope_scaling` then has
# `type` and `factor` alone. Any `target_hidden_size` makes EAGLE look for embeddings in the checkpoint.


def _read_aux_eagle(values: dict[str, Any], problems: list[str]) -> None:
    for where, section in (("", values), ("eagle_config.", values.get("eagle_config") or {})):
        if section.get(AUX_LAYERS) is not None:
            expected = "none: EAGLE takes the default ones, and no other counting can be told from this architecture"
            problems.append(f"{where}{AUX_LAYERS}: got {section[AUX_LAYERS]!r}, expected {expected}")


def _write_eagle(head: StoredHead) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": head.config.rope_theta}
    if isinstance(head.config.rope_scaling, LinearScaling):
        rope = {"rope_scaling": {"type": "linear", "factor": head.config.rope_scaling.factor}}
    unknown = ("head_dim", "rope_theta", "rope_parameters", "rope_scaling")
    kept = {key: value for key, value in fields.llama(head).items() if key not in unknown}
    return {"architectures": [EAGLE.architectures[0]], **kept, **rope, **fields.draft_vocabulary(head)}


EAGLE = Form(
    name="eagle",
    engines=("EAGLE", "vLLM", "tpu-inference"),
    architectures=("LlamaForCausalLM",),
    layer=LAYER,
    keys=LLAMA | {"draft_vocab_size": REQUIRED, "target_hidden_size": "hidden_size"},
    fixed={key: value for key, value in FIXED.items() if key != "num_hidden_layers"} | _OFF,
    read_aux=_read_aux_eagle,
    write=_write_eagle,
)

# --------------------------------------------------------------------------------------------------------- eagle3_jax
# This package, for heads that no other engine runs yet: vLLM's keys without vLLM's limits. Read as vLLM's form.

EAGLE3_JAX = dataclasses.replace(VLLM, name="eagle3_jax", engines=("eagle3_jax",))

# ---------------------------------------------------------------------------------------------------------- llama.cpp
# One GGUF file in place of a folder's two, see `llama_cpp`: its keys are made of vLLM's, and read as vLLM's form.

LLAMA_CPP = dataclasses.replace(VLLM, name="llama.cpp", engines=("llama.cpp",))

# --------------------------------------------------------------------------------------------------------------- table

FORMS = {form.name: form for form in (SGLANG, VLLM, SPECULATORS, EAGLE, EAGLE3_JAX, LLAMA_CPP)}


def form_of(values: dict[str, Any]) -> Form:
    """Detects the form of a config.json; an unknown one maps to SGLang's, whose reader names the error."""
    if "speculators_model_type" in values:
        return SPECULATORS
    return next((form for form in FORMS.values() if fields.architecture(values) in form.architectures), SGLANG)
