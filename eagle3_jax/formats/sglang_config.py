"""config.json of a draft head in the form that SGLang and vLLM both read (EAGLE3_SPEC sections 1.2, 1.3, 6).

Written so that no engine has to guess: `rope_theta` is always there, in both of transformers' spellings, and aux layers
are left out when they are every engine's default. When they are not, the boundaries stand at top level, where vLLM
looks first, and the boundaries less one in `eagle_config`, which is all that SGLang reads and adds one to.
"""

from __future__ import annotations

from typing import Any

from eagle3_jax.models.draft import DraftHeadConfig
from eagle3_jax.models.llama import LlamaConfig

ARCHITECTURE = "LlamaForCausalLMEagle3"
# Other names of the same network: vLLM's, and that of the first EAGLE-3 heads.
_ARCHITECTURES = (ARCHITECTURE, "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
_AUX_KEY = "eagle_aux_hidden_state_layer_ids"
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "vocab_size",
    "draft_vocab_size",
    "target_hidden_size",
)
_REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "draft_vocab_size")
# Variants of the network that this head is not; each may stand at top level or in `eagle_config`.
_FIXED = {
    "hidden_act": "silu",
    "num_hidden_layers": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bias": False,
    "norm_before_residual": False,
    "norm_before_fc": False,
}


def misfits(head: DraftHeadConfig, target: LlamaConfig) -> list[str]:
    """Why a head cannot draft for a target, one sentence per field; empty when it can."""
    pairs = (
        ("vocab_size", head.vocab_size, target.vocab_size),
        ("target_hidden_size", head.target_hidden_size, target.hidden_size),
        ("hidden_size", head.hidden_size, target.hidden_size),  # the head reads the target's embeddings
        ("aux layers (boundaries)", head.aux_layers, target.aux_layers),
    )
    problems = [f"{field}: got {got}, expected {wanted}, the target's" for field, got, wanted in pairs if got != wanted]
    if head.draft_vocab_size > target.vocab_size:
        problems.append(f"draft_vocab_size: got {head.draft_vocab_size}, expected at most {target.vocab_size}")
    return problems


def uncapturable(head: DraftHeadConfig, target: LlamaConfig) -> list[str]:
    """Why SGLang could not feed this head, one sentence per field; empty when it can.

    SGLang captures a boundary as `hidden_states + residual` at the entry of a block: block 0 has no residual yet, and
    behind the last block there is no entry. vLLM takes the last boundary, but this form is for both.
    """
    last = target.num_hidden_layers
    if all(0 < boundary < last for boundary in head.aux_layers):
        return []
    expected = f"boundaries 1 to {last - 1}: SGLang captures neither 0 (the embeddings) nor {last} (the last block)"
    return [f"target.aux_layers: got {head.aux_layers}, expected {expected}"]


def served_by(head: DraftHeadConfig, target: LlamaConfig) -> str:
    """Which engines run this head as it was trained, and which would not, by their code at the versions named."""
    variant = [flag for flag in ("fc_norm", "norm_output") if getattr(head, flag)]
    others = []
    if variant:
        what = " and ".join(variant)
        others += [
            f"older SGLang and sglang-jax (to cddbf6f, 2026-08) drop {what} without a word, and acceptance collapses",
            f"older vLLM and tpu-inference (to b8692ff, 2026-08) refuse {what}",
        ]
    elif head.aux_layers != _default_aux_layers(target):
        others.append("sglang-jax and tpu-inference feed the default aux layers instead, without a word")
    engines = "SGLang (0.5.23) and vLLM (0.33.0)" + ("" if others else ", sglang-jax and tpu-inference")
    return "; ".join([f"served by {engines}", *others])


def write_config(head: DraftHeadConfig, target: LlamaConfig, dtype: str) -> dict[str, Any]:
    """The config.json of `head`, which drafts for `target`; `dtype` is that of the stored weights."""
    eos = target.eos_token_ids
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": head.hidden_size,
        "intermediate_size": head.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": head.num_attention_heads,
        "num_key_value_heads": head.num_key_value_heads,
        "head_dim": head.head_dim,
        "rms_norm_eps": head.rms_norm_eps,
        "rope_theta": head.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": head.rope_theta},
        "max_position_embeddings": head.max_position_embeddings,
        "vocab_size": head.vocab_size,
        "draft_vocab_size": head.draft_vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "torch_dtype": dtype,
    }
    values |= {flag: True for flag in ("fc_norm", "norm_output") if getattr(head, flag)}
    if head.aux_layers != _default_aux_layers(target):
        values[_AUX_KEY] = list(head.aux_layers)
        values["eagle_config"] = {_AUX_KEY: [b - 1 for b in head.aux_layers], "use_aux_hidden_state": True}
    return values


def read_config(values: dict[str, Any], target: LlamaConfig) -> tuple[DraftHeadConfig | None, list[str]]:
    """Reads a config.json that write_config, SpecForge or SafeAILab's EAGLE wrote.

    Args:
        target: the model that the head drafts for; decides what absent aux layers mean.

    Returns:
        The head's shape, or None when it cannot be told, and every problem by field name.
    """
    problems: list[str] = []
    architectures = values.get("architectures")
    if not isinstance(architectures, list) or architectures[:1] not in [[name] for name in _ARCHITECTURES]:
        problems.append(f"architectures: got {architectures!r}, expected [{ARCHITECTURE!r}]")
    inner = values.get("eagle_config") or {}
    for field, expected in _FIXED.items():
        for where, section in (("", values), ("eagle_config.", inner)):
            if section.get(field, expected) != expected:
                problems.append(f"{where}{field}: got {section[field]!r}, expected {expected!r}")
    problems += [f"{field}: missing" for field in _REQUIRED if values.get(field) is None]
    for field in _SIZES:
        size = values.get(field)
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            problems.append(f"{field}: got {size!r}, expected a positive integer")
    flags = {flag: values.get(flag, False) for flag in ("fc_norm", "norm_output")}
    problems += [f"{flag}: got {v!r}, expected true or false" for flag, v in flags.items() if not isinstance(v, bool)]
    eps = values.get("rms_norm_eps", 1e-6)
    if not _is_positive(eps):
        problems.append(f"rms_norm_eps: got {eps!r}, expected a positive number")
    theta = _read_rope(values, problems)
    aux_layers = _read_aux_layers(values, inner, target, problems)
    if problems:
        return None, problems
    heads = values["num_attention_heads"]
    kv_heads = values.get("num_key_value_heads") or heads
    if heads % kv_heads:
        return None, [f"num_attention_heads: got {heads}, expected a multiple of num_key_value_heads = {kv_heads}"]
    head = DraftHeadConfig(
        vocab_size=values["vocab_size"],
        draft_vocab_size=values["draft_vocab_size"],
        hidden_size=values["hidden_size"],
        target_hidden_size=values.get("target_hidden_size") or values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=values.get("head_dim") or values["hidden_size"] // heads,
        rms_norm_eps=float(eps),
        rope_theta=theta,
        max_position_embeddings=values.get("max_position_embeddings") or 2048,
        aux_layers=aux_layers,
        fc_norm=flags["fc_norm"],
        norm_output=flags["norm_output"],
    )
    return head, misfits(head, target)


def _default_aux_layers(target: LlamaConfig) -> tuple[int, int, int]:
    """What every engine takes when the config names no aux layers. On a shallow target they collide."""
    n = target.num_hidden_layers
    return 2, n // 2, n - 3


def _read_rope(values: dict[str, Any], problems: list[str]) -> float:
    """The base of the head's RoPE: absent means 10000, whatever the target's is."""
    found = {}
    for key in ("rope_parameters", "rope_scaling"):
        section = values.get(key) or {}
        kind = section.get("rope_type", section.get("type", "default"))
        if kind != "default":
            problems.append(f"{key}.rope_type: got {kind!r}, expected 'default'")
        found[f"{key}.rope_theta"] = section.get("rope_theta")
    found["rope_theta"] = values.get("rope_theta")
    found = {key: theta for key, theta in found.items() if theta is not None}
    wrong = [
        f"{key}: got {theta!r}, expected a positive number" for key, theta in found.items() if not _is_positive(theta)
    ]
    if wrong:
        problems += wrong
        return 0.0
    if len(set(found.values())) > 1:
        problems.append(f"rope_theta: got {found}, expected one value")
    return float(next(iter(found.values()), 10000.0))


def _read_aux_layers(
    values: dict[str, Any], inner: dict[str, Any], target: LlamaConfig, problems: list[str]
) -> tuple[int, ...]:
    """Boundaries: at top level as they are, in `eagle_config` (SGLang, SpecForge) less one, else the default."""
    outer, less_one = values.get(_AUX_KEY), inner.get(_AUX_KEY)
    for key, ids in ((_AUX_KEY, outer), (f"eagle_config.{_AUX_KEY}", less_one)):
        if ids is not None and not (isinstance(ids, list) and ids and all(type(i) is int for i in ids)):
            problems.append(f"{key}: got {ids!r}, expected a list of integers")
            return ()
    if outer is not None and less_one is not None and outer != [i + 1 for i in less_one]:
        problems.append(
            f"eagle_config.{_AUX_KEY}: got {less_one}, expected {[b - 1 for b in outer]}, {_AUX_KEY} less one"
        )
    if outer is not None:
        return tuple(outer)
    if less_one is not None:
        return tuple(i + 1 for i in less_one)
    return _default_aux_layers(target)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
