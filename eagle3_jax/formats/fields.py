"""config.json of a draft head, read and written by a table for each form: defaults of absent keys, and fixed values.

Keys are named as the fields of `DraftHeadConfig`: Hugging Face's `LlamaConfig`, and the engines' additions.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Collection
from typing import Any

from eagle3_jax.formats.kinds import StoredHead
from eagle3_jax.models.drafts.dflash import SLIDING
from eagle3_jax.models.drafts.eagle3 import DraftHeadConfig
from eagle3_jax.models.rope import is_positive, read_rope, write_rope

REQUIRED = object()
# Key -> its value when absent or null; a string names the key whose value is taken.
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
# Keys that select another network, with the one value supported; each may stand at top level or in `eagle_config`.
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
    """The form of a head on disk for one family of engines, in both directions.

    Attributes:
        name: in configs and on the command line.
        engines: the engines that read the form. The first one decides which heads the form can hold.
        architectures: names in config.json.
        layer: prefix of the names of the draft layer's tensors.
        keys, fixed: as `LLAMA` and `FIXED`. present: keys that must be present, even if null.
        read_aux: a flat object -> the boundaries, None for the default; appends to a list of problems.
        write: a head -> config.json. flatten: config.json -> one flat object.
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
    """Reads the head's shape from a flattened config.json; None, with the reasons in `problems`, if that fails."""
    known = len(problems)
    if architecture(values) not in form.architectures:
        problems.append(f"architectures: got {values.get('architectures')!r}, expected {[form.architectures[0]]!r}")
    inner = values.get("eagle_config") or {}
    if not isinstance(inner, dict):
        problems.append(f"eagle_config: got {inner!r}, expected an object")
        return None
    values = _with_window(form, values, problems)
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
    if (count := values.get("num_aux_hidden_states")) not in (None, head.num_aux_layers):
        expected = f"{head.num_aux_layers}, the number of aux layers"
        problems.append(f"num_aux_hidden_states: got {count!r}, expected {expected}")
    if head.draft_vocab_size > head.vocab_size:
        problems.append(f"draft_vocab_size: got {head.draft_vocab_size}, expected at most {head.vocab_size}")
    return head


def _with_window(form: Form, values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Keeps the window of a sliding layer as vLLM does: `Qwen3Config` drops it unless `use_sliding_window` is true."""
    types = values.get("layer_types") or ()
    dropped = values.get("model_type") == "qwen3" and not values.get("use_sliding_window")
    if SLIDING not in types or dropped:
        return values | {"sliding_window": None}
    if "sliding_window" not in form.keys:
        problems.append(f"layer_types: got {types!r}, expected full attention: {form.engines[0]} reads no window")
    elif types != [SLIDING]:
        problems.append(f"layer_types: got {types!r}, expected one, of the one layer")
    elif values.get("sliding_window") is None:
        problems.append("sliding_window: missing, expected the window of the sliding layer")
    return values | {"use_sliding_window": False}


def sizes(
    keys: dict[str, Any], values: dict[str, Any], problems: list[str], present: Collection[str] = ()
) -> dict[str, Any]:
    """Reads `keys` (see `Form`) from a config.json. Appends to `problems`; the values are then undefined."""
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
    """Copies `norm_before_fc` to top level: its value in `eagle_config` (NVIDIA's heads) wins in vLLM and SGLang."""
    inner, key = values.get("eagle_config"), "norm_before_fc"
    return values | {key: inner[key]} if isinstance(inner, dict) and key in inner else values


def architecture(values: dict[str, Any]) -> str | None:
    """Returns the first of a config.json's `architectures`; None if there is no such name."""
    names = values.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def read_layers(key: str, ids: Any, problems: list[str]) -> tuple[int, ...] | None:
    """Reads a list of aux layers as it stands in a config, in the engine's own counting."""
    if ids is None:
        return None
    if not (isinstance(ids, list) and ids and all(type(i) is int for i in ids)):
        problems.append(f"{key}: got {ids!r}, expected a list of integers")
        return None
    return tuple(ids)


def llama(head: StoredHead) -> dict[str, Any]:
    """Writes a head's keys of `LLAMA` and `FIXED` that engines read, and its RoPE."""
    c = head.config
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": 1,
        **{key: getattr(c, key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")},
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
    """Writes `draft_vocab_size`, and `target_hidden_size` if it differs from the head's width."""
    c = head.config
    values: dict[str, Any] = {"draft_vocab_size": c.draft_vocab_size}
    return values if c.target_hidden_size == c.hidden_size else values | {"target_hidden_size": c.target_hidden_size}


def _value_problems(key: str, value: Any) -> list[str]:
    kind = typing.get_type_hints(DraftHeadConfig)[key]
    kind = int if kind == int | None else kind
    if kind is bool:
        fits, expected = isinstance(value, bool), "true or false"
    else:
        fits, expected = is_positive(value), "a positive number"
        if kind is int:
            fits, expected = fits and isinstance(value, int), "a positive integer"
    return [] if fits else [f"{key}: got {value!r}, expected {expected}"]
