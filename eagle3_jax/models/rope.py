"""RoPE in config.json: base and scaling, in both of transformers' spellings.

Version 4 writes `rope_theta` beside `rope_scaling`, version 5 puts both into `rope_parameters`. Older engines read the
first alone, so what is written here says it in both (as SpecForge's exporter does, export/checkpoint_io.py, a6b6b02).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from eagle3_jax.models.layers import LinearScaling, RopeScaling, Scaling, YarnScaling

THETA = 10000.0  # what no `rope_theta` means, to every engine, of most families and of every head
Kinds = Mapping[str, type[Scaling]]  # `rope_type` -> what it is read as
KINDS: Kinds = {"llama3": RopeScaling, "linear": LinearScaling, "yarn": YarnScaling}
_SECTIONS = ("rope_parameters", "rope_scaling")
_MSCALES = {"mscale", "mscale_all_dim"}  # of DeepSeek's YaRN: they change more than RoPE
# What a section may say beside its kind's fields: of other kinds, which no engine reads; of text with images, which for
# text changes nothing (see `vision`).
_HARMLESS = {field.name for kind in KINDS.values() for field in dataclasses.fields(kind)} | {
    *("rope_type", "type", "rope_theta", "finetuned", "mrope_section", "mrope_interleaved")
}
# What some engines read: 1 changes nothing. To each what its refusal adds.
_FACTORS = {
    # Of DeepSeek-R1-0528-Qwen3-8B 0.878: SGLang's factor is 1 then, the others' 1.139.
    "attn_factor": ": SGLang multiplies YaRN's factor by it, transformers and vLLM 0.32.0 do not: leave it out as "
    "these do, or write 'attention_factor' with SGLang's product in its place",
    "extrapolation_factor": "",
    "partial_rotary_factor": "",
}


def read_rope(
    values: dict[str, Any], problems: list[str], kinds: Kinds = KINDS, theta: float = THETA
) -> tuple[float, Scaling | None]:
    """Base and scaling of a config.json. Appends to `problems`, field by field; the values then mean nothing.

    Args:
        kinds: others are refused. theta: the base where none is said.
    """
    known = len(problems)
    thetas, scalings = {}, {}
    for key in _SECTIONS:
        section = values.get(key)
        if section and not isinstance(section, dict):
            problems.append(f"{key}: got {section!r}, expected an object")
        elif section:
            thetas[f"{key}.rope_theta"] = section.get("rope_theta")
            scalings[key] = read_scaling(section, key, problems, kinds)
    thetas["rope_theta"] = values.get("rope_theta")
    # transformers 4 writes it beside the section; 5 (modeling_rope_utils.py) and vLLM move it there and apply it.
    if (part := values.get("partial_rotary_factor")) not in (None, 1):
        problems.append(f"partial_rotary_factor: got {part!r}, expected none or 1")
    thetas = {key: theta for key, theta in thetas.items() if theta is not None}
    problems += [f"{key}: got {x!r}, expected a positive number" for key, x in thetas.items() if not is_positive(x)]
    if len(problems) > known:
        return theta, None
    if len(set(thetas.values())) > 1:
        problems.append(f"rope_theta: got {thetas}, expected one value")
    if len(set(scalings.values())) > 1:
        problems.append(f"rope_scaling: got {scalings}, expected one scaling")
    return float(next(iter(thetas.values()), theta)), next(iter(scalings.values()), None)


def write_rope(theta: float, scaling: Scaling | None) -> dict[str, Any]:
    """The keys of config.json that `read_rope` reads."""
    kind = next((name for name, made in KINDS.items() if isinstance(scaling, made)), "default")
    fields = {} if scaling is None else dataclasses.asdict(scaling)
    section: dict[str, Any] = {"rope_type": kind} | {name: x for name, x in fields.items() if x is not None}
    values: dict[str, Any] = {"rope_theta": theta, "rope_parameters": section | {"rope_theta": theta}}
    return values if scaling is None else values | {"rope_scaling": section}


def is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def read_scaling(section: dict[str, Any], key: str, problems: list[str], kinds: Kinds) -> Scaling | None:
    """What a RoPE section says beside its base. Appends to `problems`, which call the section `key`."""
    kind = section.get("rope_type", section.get("type", "default"))
    if kind == "default":
        problems += _unread(section, key, _MSCALES)
        return None
    if kind not in kinds:
        *first, last = (repr(name) for name in ("default", *sorted(kinds)))
        expected = f"{', '.join(first)} or {last}" if first else last
        problems.append(f"{key}.rope_type: got {kind!r}, expected {expected}")
        return None
    fields = dataclasses.fields(kinds[kind])
    values = {field.name: section[field.name] for field in fields if section.get(field.name) is not None}
    wrong = [f"{key}.{f.name}: missing" for f in fields if f.name not in values and f.default is dataclasses.MISSING]
    wrong += [
        f"{key}.{name}: got {value!r}, expected a positive number"
        for name, value in values.items()
        if not is_positive(value) and name != "truncate"
    ]
    wrong += _unread(section, key, {field.name for field in fields})
    problems += wrong
    return None if wrong else kinds[kind](**values)


def _unread(section: dict[str, Any], key: str, fields: set[str]) -> list[str]:
    """What a section says that is not read, unless it changes nothing."""
    wrong = []
    for name in sorted(section.keys() - fields - _HARMLESS):
        value, factor = section[name], name in _FACTORS
        if value and not (factor and value == 1):
            expected = f"none or 1{_FACTORS[name]}" if factor else "none"
            wrong.append(f"{key}.{name}: got {value!r}, expected {expected}")
    return wrong
