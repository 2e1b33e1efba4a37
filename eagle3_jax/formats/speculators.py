"""The form of speculators (models/eagle3/config.py, c05b95b): what `vllm serve HEAD` reads, target and all.

The draft layer's `LlamaConfig` stands in `transformer_layer_config`, the rest beside it; aux layers are boundaries. A
missing `norm_before_residual` is true to vLLM (transformers_utils/configs/speculators/algos.py, 0.32.0), so it is
always written, as are the other flags. Embeddings, which speculators saves, are left out: without them both take the
target's.
"""

from __future__ import annotations

from typing import Any

from eagle3_jax.formats import fields
from eagle3_jax.formats.fields import AUX_LAYERS, FIXED, LLAMA, Form, read_layers
from eagle3_jax.formats.stored import StoredHead
from eagle3_jax.formats.vllm import count

_OWN = {
    "draft_vocab_size": "vocab_size",
    "target_hidden_size": "hidden_size",
    "fc_norm": False,
    "norm_output": False,
    "norm_before_residual": True,
    "norm_before_fc": False,
}
_FIXED = {"speculators_model_type": "eagle3", "model_type": "llama", "embed_requires_grad": False}
# What vLLM drafts when it is not told otherwise; the converter of speculators writes the same.
_SPECULATIVE_TOKENS = 3


def _flatten(values: dict[str, Any]) -> dict[str, Any]:
    layer, said = values.get("transformer_layer_config"), values.get("speculators_config")
    outer = {key: value for key, value in values.items() if key != "transformer_layer_config"}
    verifier = said.get("verifier") if isinstance(said, dict) else None
    return (layer if isinstance(layer, dict) else {}) | outer | {"verifier": verifier}


def _read_aux(values: dict[str, Any], problems: list[str]) -> tuple[int, ...] | None:
    if "sliding_attention" in (values.get("layer_types") or ()):
        got = values["layer_types"]
        problems.append(f"transformer_layer_config.layer_types: got {got!r}, expected full attention")
    return read_layers(AUX_LAYERS, values.get(AUX_LAYERS), problems)


def _write(head: StoredHead) -> dict[str, Any]:
    c, layers = head.config, head.config.aux_layers
    return {
        "architectures": [FORM.architectures[0]],
        "speculators_model_type": "eagle3",
        **fields.draft_vocabulary(head),
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "embed_requires_grad": False,
        **({} if layers is None else {AUX_LAYERS: list(layers)}),
        "tie_word_embeddings": False,
        "transformer_layer_config": fields.llama(head) | count(head),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _SPECULATIVE_TOKENS}],
            "verifier": head.verifier or {"name_or_path": None, "architectures": []},
        },
    }


FORM = Form(
    name="speculators",
    engines=("vLLM",),
    architectures=("Eagle3DraftModel", "Eagle3Speculator"),
    layer="layers.0.",
    keys=LLAMA | _OWN,
    fixed=FIXED | _FIXED,
    flatten=_flatten,
    read_aux=_read_aux,
    write=_write,
)
