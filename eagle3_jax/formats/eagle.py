"""The form of SafeAILab/EAGLE (model/cnets.py, model/configs.py, cb7e084), whose heads vLLM and tpu-inference read too.

A plain `LlamaConfig` under the target's own architecture name, with `draft_vocab_size`. There is one layer, whatever
`num_hidden_layers` says (EAGLE3-Vicuna1.3-13B has its target's 40). Aux layers are the default, heads are as wide as
hidden_size / num_attention_heads. RoPE is unscaled, or linear over a base of 10000, and then
`rope_scaling` has `type` and `factor` and nothing else. Where `target_hidden_size` stands, whatever it is, EAGLE looks
for embeddings in the checkpoint.
"""

from __future__ import annotations

from typing import Any

from eagle3_jax.formats import fields
from eagle3_jax.formats.fields import AUX_LAYERS, FIXED, LLAMA, REQUIRED, Form
from eagle3_jax.formats.stored import StoredHead
from eagle3_jax.formats.tensors import LAYER
from eagle3_jax.models.layers import LinearScaling

_KEYS = LLAMA | {"draft_vocab_size": REQUIRED, "target_hidden_size": "hidden_size"}
_FIXED = {"norm_before_residual": False, "fc_norm": False, "norm_output": False, "norm_before_fc": False}


def _read_aux(values: dict[str, Any], problems: list[str]) -> None:
    for where, section in (("", values), ("eagle_config.", values.get("eagle_config") or {})):
        if section.get(AUX_LAYERS) is not None:
            expected = "none: EAGLE takes the default ones, and no other counting can be told from this architecture"
            problems.append(f"{where}{AUX_LAYERS}: got {section[AUX_LAYERS]!r}, expected {expected}")


def _write(head: StoredHead) -> dict[str, Any]:
    llama = fields.llama(head)
    rope = {"rope_theta": head.config.rope_theta}
    if isinstance(head.config.rope_scaling, LinearScaling):
        rope = {"rope_scaling": {"type": "linear", "factor": head.config.rope_scaling.factor}}
    unknown = ("head_dim", "rope_theta", "rope_parameters", "rope_scaling")
    kept = {key: value for key, value in llama.items() if key not in unknown}
    return {"architectures": [FORM.architectures[0]], **kept, **rope, **fields.draft_vocabulary(head)}


FORM = Form(
    name="eagle",
    engines=("EAGLE", "vLLM", "tpu-inference"),
    architectures=("LlamaForCausalLM",),
    layer=LAYER,
    keys=_KEYS,
    fixed={key: value for key, value in FIXED.items() if key != "num_hidden_layers"} | _FIXED,
    read_aux=_read_aux,
    write=_write,
)
