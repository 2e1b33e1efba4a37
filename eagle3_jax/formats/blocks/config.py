"""config.json of a block head: a folder as z-lab and DeepSpec publish it, and the wrapper of speculators.

Keys are Hugging Face's `Qwen3Config`, and the engines' additions, at top level or in `dflash_config`. Sources: vLLM
0.32.0 (qwen3_dflash.py, qwen3_dspark.py, configs/speculators/algos.py), SGLang 0.5.23 (dflash_utils.py,
dspark_config.py), speculators 0.9.0 (models/{dflash,dspark,dflash2}/config.py).
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from eagle3_jax.formats import fields
from eagle3_jax.formats.fields import REQUIRED, read_layers
from eagle3_jax.formats.forms import SPECULATORS, speculation
from eagle3_jax.formats.kinds import StoredHead
from eagle3_jax.formats.tensors import AUX_LAYERS
from eagle3_jax.models.drafts.dflash import FULL, SLIDING, BlockHeadConfig, DFlash
from eagle3_jax.models.rope import read_rope

NESTED, SPECULATORS_TYPE, _LFM2 = "dflash_config", "speculators_model_type", "Lfm2DSparkDraftModel"
# Names in config.json; the first is written. vLLM and SGLang tell DFlash2 from DFlash by the architecture alone.
# SpecForge's raw export has DSpark's second name, Liquid AI's heads for LFM2.5 have the third.
ARCHITECTURES = {
    "DFlash": ("DFlashDraftModel",),
    "DSpark": ("Qwen3DSparkModel", "DSparkDraftModel", _LFM2),
    "DFlash2": ("DFlash2DraftModel",),
}
# Key -> its value when absent, see `fields.LLAMA`.
_SIZES: dict[str, Any] = dict.fromkeys(fields.LLAMA, REQUIRED) | {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "draft_vocab_size": "vocab_size",
    "target_hidden_size": "hidden_size",
}
# Keys that select another network, with the supported values.
_OFF = ("attention_bias", "mlp_bias", "use_gemma_norm", "attention_sink_bias", "add_swa_attention_sink_bias")
_STYLES = ("is_neox_style", "rope_is_neox_style")  # see `interleaved`; vLLM reads the first, SGLang both
_ONE = ("attention_value_scale", "output_multiplier", "input_embedding_scale", "logit_scale")
_FIXED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_OFF, (False,)),
    **dict.fromkeys(_STYLES, (True, False)),
    "use_aux_hidden_state": (True,),
    **dict.fromkeys(_ONE, (1.0,)),
    "hidden_act": ("silu",),
    "attention_mode": ("gqa",),
    "projector_type": ("dflash", "dspark", "dflash2"),
    "final_logit_softcapping": (0.0,),
}
# Key -> field of `BlockHeadConfig`.
_SELECTOR = {
    "conv_kernel_size": "conv_taps",
    "conv_group_size": "conv_group",
    "selector_rank": "selector_rank",
    "selector_top_k": "selector_top_k",
}
# Key of the target's layers -> what makes its numbers boundaries.
_AUX_LAYERS = {"target_layer_ids": 1, AUX_LAYERS: 0, "aux_hidden_state_layer_ids": 0}


def describes(network: type[DFlash], values: dict[str, Any]) -> bool:
    """Tells whether a config.json is that of a head of this network."""
    if SPECULATORS_TYPE in values:
        return values[SPECULATORS_TYPE] == network.__name__.lower()
    return fields.architecture(values) in ARCHITECTURES[network.__name__]


def read(network: type[DFlash], values: dict[str, Any], problems: list[str]) -> BlockHeadConfig | None:
    """Reads the head's shape from a config.json; None, with the reasons in `problems`, if that fails.

    Accepts each key at top level or in `dflash_config`, and layers of the target by output (`target_layer_ids`) or by
    boundary (`eagle_aux_hidden_state_layer_ids`, speculators' `aux_hidden_state_layer_ids`).
    """
    known = len(problems)
    wrapped = SPECULATORS_TYPE in values
    flat = _flat(values, problems)
    for key, supported in _FIXED.items():
        if flat.get(key) is not None and flat[key] not in supported:
            problems.append(f"{key}: got {flat[key]!r}, expected {supported[0]!r}")
    sizes = fields.sizes(_SIZES, flat, problems)
    theta, scaling = read_rope(flat, problems)
    if not any("rope_theta" in (x or {}) for x in (flat, flat.get("rope_parameters"), flat.get("rope_scaling"))):
        problems.append("rope_theta: missing; engines differ in its default")
    for key in ("rope_parameters", "rope_scaling"):  # left there by the config.json of a target that sees images
        if isinstance(flat.get(key), dict) and (sections := flat[key].get("mrope_section")):
            problems.append(f"{key}.mrope_section: got {sections!r}, expected none: a head has RoPE of its own")
    if {flat.get(key) for key in _STYLES} == {True, False}:
        got = {key: flat[key] for key in _STYLES}
        problems.append(f"{_STYLES[1]}: got {got}, expected one value")
    found: dict[str, Any] = {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "aux_layers": _aux_layers(flat, problems),
        "block_size": _integer(flat, "block_size", problems, 1 if network.corrector == "markov" else 2),
        "mask_token_id": _integer(flat, "mask_token_id", problems, 0),
        **_attention(network, flat, wrapped, problems),
    }
    found |= _markov(flat, problems) if network.corrector == "markov" else {}
    if network.corrector == "selector":
        found |= {field: _integer(flat, key, problems, 1) for key, field in _SELECTOR.items()}
    predicts, declared = network.corrector == "markov", flat.get("sample_from_anchor")  # whether the anchor's row does
    if declared is None and wrapped and predicts:
        absent = "vLLM takes an absent one for False, speculators for True"
        problems.append(f"sample_from_anchor: missing, expected True; {absent}")
    if declared not in (None, predicts):
        problems.append(f"sample_from_anchor: got {declared!r}, expected {predicts} of {network.__name__}")
    if len(problems) > known:
        return None
    config = canonical(network, BlockHeadConfig(**sizes, **found))
    problems += contradictions(network, config)
    return config


def interleaved(values: dict[str, Any]) -> bool:
    """Tells of a config.json that `read` takes whether RoPE rotates neighbours in a head, not its two halves."""
    flat = _flat(values, [])
    return any(flat.get(key) is False for key in _STYLES)


def write(network: type[DFlash], head: StoredHead, form: str) -> dict[str, Any]:
    """Writes config.json: the keys of a folder, or the wrapper of speculators, which vLLM reads with the target's name.

    vLLM makes every layer of the wrapper causal unless `sliding_window_non_causal` is true; full layers are
    bidirectional in speculators. So the flag is false for causal sliding layers alone.
    """
    c, count, sliding = head.config, len(head.config.layer_types), SLIDING in head.config.layer_types
    named, kind = {"architectures": [ARCHITECTURES[network.__name__][0]]}, network.__name__.lower()
    layers = fields.llama(head) | {
        "model_type": "qwen3",
        "num_hidden_layers": count,
        "layer_types": list(c.layer_types),
    }
    layers["use_sliding_window"] = sliding  # `Qwen3Config` drops `sliding_window` without it
    layers |= {"sliding_window": c.sliding_window, "max_window_layers": count} if sliding else {}
    own: dict[str, Any] = {}
    if network.corrector == "markov":
        flags = dict.fromkeys(("enable_confidence_head", "confidence_head_with_markov"), c.confidence)
        own = {"markov_rank": c.markov_rank, "markov_head_type": "vanilla", **flags, "sample_from_anchor": True}
    if network.corrector == "selector":
        own = {key: getattr(c, field) for key, field in _SELECTOR.items()}
    if form != SPECULATORS.name:
        values = named | layers | {"block_size": c.block_size}
        values |= {} if head.target_layers is None else {"num_target_layers": head.target_layers}
        values |= {} if c.draft_vocab_size == c.vocab_size else {"draft_vocab_size": c.draft_vocab_size}
        values |= {} if c.is_causal is None else {"is_causal": c.is_causal}
        outputs = {"mask_token_id": c.mask_token_id, "target_layer_ids": [boundary - 1 for boundary in c.aux_layers]}
        return values | (outputs | own if network.corrector == "markov" else {NESTED: outputs | own})
    return named | {
        SPECULATORS_TYPE: kind,
        "draft_vocab_size": c.draft_vocab_size,
        "block_size": c.block_size,
        "aux_hidden_state_layer_ids": list(c.aux_layers),
        "mask_token_id": c.mask_token_id,
        "sliding_window_non_causal": not any(c.causal(i) for i in range(count)),
        **({} if network.corrector == "markov" else {"sample_from_anchor": False}),
        **own,
        "tie_word_embeddings": False,
        "transformer_layer_config": layers,
        "speculators_config": speculation(kind, c.block_size - network.first_row, head.verifier),
    }


def canonical(network: type[DFlash], config: BlockHeadConfig) -> BlockHeadConfig:
    """Of equal configs returns the one that is compared: without a causality, window or option that changes nothing."""
    sliding = SLIDING in config.layer_types
    plain = dataclasses.replace(config, is_causal=None, sliding_window=config.sliding_window if sliding else None)
    layers = range(len(config.layer_types))
    if [plain.causal(i) for i in layers] != [config.causal(i) for i in layers]:
        plain = dataclasses.replace(plain, is_causal=config.is_causal)
    foreign = set() if network.corrector == "markov" else {"markov_rank", "confidence"}
    foreign |= set() if network.corrector == "selector" else set(_SELECTOR.values())
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(BlockHeadConfig)}
    return dataclasses.replace(plain, **{name: defaults[name] for name in foreign})


def contradictions(network: type[DFlash], config: BlockHeadConfig) -> list[str]:
    """Lists the fields that contradict each other."""
    c, problems = config, []
    if c.draft_vocab_size > c.vocab_size:
        problems.append(f"draft_vocab_size: got {c.draft_vocab_size}, expected at most {c.vocab_size}")
    if c.mask_token_id >= c.vocab_size:
        problems.append(f"mask_token_id: got {c.mask_token_id}, expected a token below vocab_size = {c.vocab_size}")
    if c.aux_layers[0] < 1:
        problems.append(f"aux layers (boundaries): got {list(c.aux_layers)}, expected boundaries from 1 on")
    if SLIDING in c.layer_types and c.sliding_window is None:
        problems.append("sliding_window: missing, expected the window of the sliding layers")
    if network.corrector == "selector" and c.hidden_size % c.conv_group:
        problems.append(f"conv_group_size: got {c.conv_group}, expected a divisor of hidden_size = {c.hidden_size}")
    return problems


def _flat(values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Merges top level, speculators' `transformer_layer_config` and `dflash_config`, which must not contradict."""
    flat: dict[str, Any] = {}
    nested: dict[str, Any] = {}
    for name in ("transformer_layer_config", NESTED):
        nested = values.get(name) or {}
        if not isinstance(nested, dict):
            problems.append(f"{name}: got {nested!r}, expected an object")
            nested = {}
        flat |= nested
    for key, value in values.items():
        if value is not None:
            if nested.get(key) not in (None, value):
                problems.append(f"{NESTED}.{key}: got {nested[key]!r}, expected {value!r}, the value at top level")
            flat[key] = value
    return flat


def _aux_layers(flat: dict[str, Any], problems: list[str]) -> tuple[int, ...]:
    """Reads the boundaries of the target. Appends to `problems`; the result is then undefined."""
    found: dict[str, tuple[int, ...]] = {}
    for key, shift in _AUX_LAYERS.items():
        ids = read_layers(key, flat.get(key), problems)
        if ids is not None:
            found[key] = tuple(i + shift for i in ids)
    if len(set(found.values())) > 1:
        problems.append(f"{', '.join(found)}: got boundaries {list(map(list, found.values()))}, expected the same ones")
    if not found:
        problems += [] if any(flat.get(key) for key in _AUX_LAYERS) else ["target_layer_ids: missing"]
        return ()
    layers = next(iter(found.values()))
    if any(a >= b for a, b in itertools.pairwise(layers)):
        problems.append(f"{next(iter(found))}: got {flat[next(iter(found))]}, expected ascending, distinct layers")
    return layers


def _attention(network: type[DFlash], flat: dict[str, Any], wrapped: bool, problems: list[str]) -> dict[str, Any]:
    """Reads the type, window and causality of the layers, as vLLM resolves them.

    `dflash_config.causal`, which SGLang ignores, and speculators' `sliding_window_non_causal` become `is_causal`.
    """
    count, types = _integer(flat, "num_hidden_layers", problems, 1), flat.get("layer_types")
    causal: dict[str, bool] = {}
    for key in ("is_causal", "causal", "use_swa", "sliding_window_non_causal"):
        if flat.get(key) is not None and not isinstance(flat[key], bool):
            problems.append(f"{key}: got {flat[key]!r}, expected true or false")
        elif flat.get(key) is not None:
            causal[key] = flat[key]
    is_causal = causal.get("is_causal", causal.get("causal"))
    if types is None:
        types = [SLIDING if causal.get("use_swa") else FULL] * count
        is_causal = bool(is_causal)  # sliding layers without `layer_types` are bidirectional
    elif not (isinstance(types, list) and len(types) == count and set(types) <= {FULL, SLIDING}):
        problems.append(f"layer_types: got {types!r}, expected {count} of {FULL!r} and {SLIDING!r}")
        return {"layer_types": (), "sliding_window": None, "is_causal": None}
    elif causal.get("use_swa") and SLIDING not in types:
        types, is_causal = [SLIDING] * count, bool(is_causal)
    window = None
    if SLIDING in types:
        key = "swa_window_size" if flat.get("swa_window_size") is not None else "sliding_window"
        window = _integer(flat, key, problems, 1)
    if wrapped and is_causal is None and SLIDING in types:
        if "sliding_window_non_causal" not in causal and network.corrector != "selector":
            problems.append(
                "sliding_window_non_causal: missing; vLLM takes an absent one for True, speculators for False"
            )
        is_causal = False if causal.get("sliding_window_non_causal", True) else None
    return {"layer_types": tuple(types), "sliding_window": window, "is_causal": is_causal}


def _markov(flat: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    head_type, confidence = flat.get("markov_head_type", "vanilla"), flat.get("enable_confidence_head", False)
    if head_type != "vanilla":
        other = "the Markov heads 'gated' and 'rnn' are other networks, which are not implemented"
        problems.append(f"markov_head_type: got {head_type!r}, expected 'vanilla': {other}")
    if not isinstance(confidence, bool):
        problems.append(f"enable_confidence_head: got {confidence!r}, expected true or false")
    with_markov = flat.get("confidence_head_with_markov", fields.architecture(flat) == _LFM2)
    if confidence is True and with_markov is not True:
        problems.append(
            f"confidence_head_with_markov: got {with_markov!r}, expected True where there is a confidence head"
        )
    return {"markov_rank": _integer(flat, "markov_rank", problems, 1), "confidence": confidence}


def _integer(flat: dict[str, Any], key: str, problems: list[str], least: int) -> int:
    """Reads an integer. Appends to `problems`; the result is then undefined."""
    value = flat.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    problems.append(
        f"{key}: missing" if value is None else f"{key}: got {value!r}, expected an integer from {least} on"
    )
    return least
