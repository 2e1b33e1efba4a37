"""config.json of a draft head, read and written by a table of each form: what a key's absence means, what is fixed.

Keys are called as the fields of `DraftHeadConfig` are: Hugging Face's `LlamaConfig`, and what engines add to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from eagle3_jax.formats.stored import StoredHead
from eagle3_jax.models.drafts.eagle3 import DraftHeadConfig
from eagle3_jax.models.rope import is_positive, read_rope, write_rope

REQUIRED = object()
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
# Key -> what its absence, or null, means: a value, or a string, the key whose value it then has.
LLAMA: dict[str, Any] = {
    "vocab_size": REQUIRED,
    "hidden_size": REQUIRED,
    "intermediate_size": REQUIRED,
    "num_attention_heads": REQUIRED,
    "num_key_value_heads": "num_attention_heads",
    "head_dim": None,  # hidden_size // num_attention_heads
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
}
# Variants of the network that this head is not; each may stand at top level or in `eagle_config`.
FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "num_hidden_layers": 1,
    "attention_bias": False,
    "mlp_bias": False,
    "bias": False,
    "use_aux_hidden_state": True,
    "use_sliding_window": False,
}


@dataclasses.dataclass(frozen=True)
class Form:
    """How a head is laid down for one family of engines, in both directions.

    Attributes:
        name: in configs and on the command line.
        engines: that read it. The first one decides what the form can say.
        architectures: of config.json; the first is written, the others are the same network.
        layer: how the names of the draft layer's tensors begin.
        keys: as `LLAMA`; present: keys that must be there, be they null.
        fixed: as `FIXED`.
        flatten: config.json -> one flat object.
        read_aux: a flat object -> the boundaries, None for the default; appends to a list of problems.
        write: a head -> config.json.
    """

    name: str
    engines: tuple[str, ...]
    architectures: tuple[str, ...]
    layer: str
    keys: dict[str, Any]
    fixed: dict[str, Any]
    read_aux: Callable[[dict[str, Any], list[str]], tuple[int, ...] | None]
    write: Callable[[StoredHead], dict[str, Any]]
    flatten: Callable[[dict[str, Any]], dict[str, Any]] = lambda values: values
    present: tuple[str, ...] = ()


def read(form: Form, values: dict[str, Any], problems: list[str]) -> DraftHeadConfig | None:
    """The shape of the head that a (flattened) config.json describes; None, and why, where it cannot be told."""
    known = len(problems)
    if architecture(values) not in form.architectures:
        problems.append(f"architectures: got {values.get('architectures')!r}, expected {[form.architectures[0]]!r}")
    inner = values.get("eagle_config") or {}
    if not isinstance(inner, dict):
        problems.append(f"eagle_config: got {inner!r}, expected an object")
        return None
    for key, expected in form.fixed.items():
        for where, section in (("", values), ("eagle_config.", inner)):
            if section.get(key, expected) != expected:
                problems.append(f"{where}{key}: got {section[key]!r}, expected {expected!r}")
    found = sizes(form.keys, values, problems, form.present)
    theta, scaling = read_rope(values, problems)
    aux_layers = form.read_aux(values, problems)
    if len(problems) > known:
        return None
    head = DraftHeadConfig(**found, rope_theta=theta, rope_scaling=scaling, aux_layers=aux_layers)
    count = values.get("num_aux_hidden_states")
    if count is not None and count != head.num_aux_layers:
        problems.append(
            f"num_aux_hidden_states: got {count!r}, expected {head.num_aux_layers}, as aux layers are named"
        )
    if head.draft_vocab_size > head.vocab_size:
        problems.append(f"draft_vocab_size: got {head.draft_vocab_size}, expected at most {head.vocab_size}")
    return head


def sizes(
    keys: dict[str, Any], values: dict[str, Any], problems: list[str], present: Collection[str] = ()
) -> dict[str, Any]:
    """What a config.json says of `keys`, see `Form`. Appends to `problems`; the values then mean nothing."""
    found: dict[str, Any] = {}
    known = len(problems)
    for key, absent in keys.items():
        value = values.get(key)
        if (value is None and absent is REQUIRED) or (key in present and key not in values):
            problems.append(f"{key}: missing")
        elif value is None:
            found[key] = found.get(absent) if isinstance(absent, str) else absent
        else:
            found[key] = value
            problems += _value_problems(key, value)
    if len(problems) > known:
        return found
    heads, kv_heads, size = found["num_attention_heads"], found["num_key_value_heads"], found["hidden_size"]
    if heads % kv_heads:
        problems.append(f"num_attention_heads: got {heads}, expected a multiple of num_key_value_heads = {kv_heads}")
    return found | {"head_dim": found["head_dim"] or size // heads, "rms_norm_eps": float(found["rms_norm_eps"])}


def with_inner_norm(values: dict[str, Any]) -> dict[str, Any]:
    """`norm_before_fc` at top level, as vLLM and SGLang read it: in `eagle_config` it counts more (NVIDIA's heads)."""
    inner, key = values.get("eagle_config"), "norm_before_fc"
    return values | {key: inner[key]} if isinstance(inner, dict) and key in inner else values


def architecture(values: dict[str, Any]) -> str | None:
    """The first of a config.json's `architectures`; None where there is no such name."""
    names = values.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def read_layers(key: str, ids: Any, problems: list[str]) -> tuple[int, ...] | None:
    """Aux layers as a config holds them, in whatever counting."""
    if ids is None:
        return None
    if not (isinstance(ids, list) and ids and all(type(i) is int for i in ids)):
        problems.append(f"{key}: got {ids!r}, expected a list of integers")
        return None
    return tuple(ids)


def llama(head: StoredHead) -> dict[str, Any]:
    """The keys of `LLAMA` and `FIXED` that engines look for, and RoPE, for a head."""
    c = head.config
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.rms_norm_eps,
        **write_rope(c.rope_theta, c.rope_scaling),
        "max_position_embeddings": c.max_position_embeddings,
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": head.bos_token_id,
        "eos_token_id": head.eos_token_id,
        "torch_dtype": str(head.tensors["fc.weight"].dtype),
    }


def draft_vocabulary(head: StoredHead) -> dict[str, Any]:
    """`draft_vocab_size`, and `target_hidden_size` where it is not the head's own."""
    c = head.config
    values: dict[str, Any] = {"draft_vocab_size": c.draft_vocab_size}
    return values if c.target_hidden_size == c.hidden_size else values | {"target_hidden_size": c.target_hidden_size}


def flags(head: StoredHead, *names: str) -> dict[str, bool]:
    """Of these flags those that are on."""
    return {name: True for name in names if getattr(head.config, name)}


def _value_problems(key: str, value: Any) -> list[str]:
    kind = DraftHeadConfig.__annotations__[key]
    if kind == "bool":
        return [] if isinstance(value, bool) else [f"{key}: got {value!r}, expected true or false"]
    if kind == "int":
        is_size = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        return [] if is_size else [f"{key}: got {value!r}, expected a positive integer"]
    return [] if is_positive(value) else [f"{key}: got {value!r}, expected a positive number"]
