"""RoPE in config.json: base and scaling, in both of transformers' spellings.

Version 4 writes `rope_theta` beside `rope_scaling`, version 5 puts both into `rope_parameters`. Older engines read only
the first, so both are written (as by SpecForge's exporter, export/checkpoint_io.py, a6b6b02).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from eagle3_jax.models.layers import (
    AlphaScaling,
    LinearScaling,
    LongScaling,
    ProportionalScaling,
    RopeScaling,
    Scaling,
    YarnScaling,
)

THETA = 10000.0  # every engine's default of `rope_theta`, for most families and for every head
Scalings = dict[str, type[Scaling]]  # `rope_type` -> its class
SCALINGS: Scalings = {"llama3": RopeScaling, "linear": LinearScaling, "yarn": YarnScaling}
LONG: Scalings = {"longrope": LongScaling}  # of some targets; heads have none of these three
ALPHA: Scalings = {"dynamic": AlphaScaling}
PROPORTIONAL: Scalings = {"proportional": ProportionalScaling}
_SECTIONS = ("rope_parameters", "rope_scaling")
_PARTIAL = "partial_rotary_factor"
_MSCALES = {"mscale", "mscale_all_dim"}  # fields of DeepSeek's YaRN, which change more than RoPE
# Fields that a section may hold beside those of its kind: fields of other kinds, which no engine reads, and fields for
# images, which change nothing for text (see `vision`).
_HARMLESS = {field.name for kind in SCALINGS.values() for field in dataclasses.fields(kind)} | {
    *("rope_type", "type", "rope_theta", "finetuned", "mrope_section", "mrope_interleaved", "max_position_embeddings")
}
_LISTS = {"short_factor", "long_factor"}
# Fields that some engines read, with a hint for the refusal of values other than 1, which changes nothing.
_FACTORS = {
    # DeepSeek-R1-0528-Qwen3-8B has 0.878: SGLang's product is then 1, the other engines' factor 1.139.
    "attn_factor": ": SGLang multiplies YaRN's factor by it, transformers and vLLM 0.32.0 do not: leave it out as "
    "these do, or write 'attention_factor' with SGLang's product in its place",
    "extrapolation_factor": "",
    _PARTIAL: "",
}


def read_rope(
    values: dict[str, Any],
    problems: list[str],
    kinds: Scalings = SCALINGS,
    theta: float = THETA,
    *,
    partial: bool = False,
) -> tuple[float, Scaling | None]:
    """Reads base and scaling from a config.json. Appends to `problems` by field; the values are then undefined.

    `partial`: whether the family reads `partial_rotary_factor`, see `read_partial`; else it is refused.
    """
    if partial:
        rest = {key: {**values[key], _PARTIAL: None} for key in _SECTIONS if isinstance(values.get(key), dict)}
        values = {**values, _PARTIAL: None, **rest}
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
    # transformers 4 writes `partial_rotary_factor` beside the section; transformers 5 (modeling_rope_utils.py) and vLLM
    # move it into the section and apply it.
    if (part := values.get(_PARTIAL)) not in (None, 1):
        problems.append(f"{_PARTIAL}: got {part!r}, expected none or 1")
    thetas = {key: theta for key, theta in thetas.items() if theta is not None}
    problems += [f"{key}: got {x!r}, expected a positive number" for key, x in thetas.items() if not is_positive(x)]
    if len(problems) > known:
        return theta, None
    if len(set(thetas.values())) > 1:
        problems.append(f"rope_theta: got {thetas}, expected one value")
    if len(set(scalings.values())) > 1:
        problems.append(f"rope_scaling: got {scalings}, expected one scaling")
    return float(next(iter(thetas.values()), theta)), next(iter(scalings.values()), None)


def read_partial(values: dict[str, Any], problems: list[str], default: float) -> float:
    """Reads the share of a head that RoPE rotates. Appends to `problems`; the value is then undefined."""
    sections = [values, *(values[key] for key in _SECTIONS if isinstance(values.get(key), dict))]
    found = {section[_PARTIAL] for section in sections if section.get(_PARTIAL) is not None} or {default}
    if len(found) > 1 or not all(is_positive(share) and share <= 1 for share in found):
        problems.append(f"{_PARTIAL}: got {sorted(found, key=repr)}, expected one value in (0, 1]")
    return next(iter(found))


def write_rope(theta: float, scaling: Scaling | None) -> dict[str, Any]:
    """Writes the keys of config.json that `read_rope` reads."""
    kinds = SCALINGS | LONG | ALPHA | PROPORTIONAL
    kind = next((name for name, made in kinds.items() if isinstance(scaling, made)), "default")
    fields = {} if scaling is None else dataclasses.asdict(scaling)
    section: dict[str, Any] = {"rope_type": kind} | {name: x for name, x in fields.items() if x is not None}
    values: dict[str, Any] = {"rope_theta": theta, "rope_parameters": section | {"rope_theta": theta}}
    return values if scaling is None else values | {"rope_scaling": section}


def is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def read_scaling(section: dict[str, Any], key: str, problems: list[str], kinds: Scalings) -> Scaling | None:
    """Reads the scaling of a RoPE section. Appends to `problems`, which name the section `key`."""
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
    values |= {name: tuple(values[name]) for name in _LISTS & values.keys() if isinstance(values[name], list)}
    wrong = [f"{key}.{f.name}: missing" for f in fields if f.name not in values and f.default is dataclasses.MISSING]
    wrong += [
        f"{key}.{name}: got {value!r}, expected {'positive numbers' if name in _LISTS else 'a positive number'}"
        for name, value in values.items()
        if (name != "truncate" and not all(map(is_positive, value if isinstance(value, tuple) else [value])))
        or isinstance(value, tuple) != (name in _LISTS)
    ]
    unused = _MSCALES if kinds[kind] is AlphaScaling else set()
    wrong += _unread(section, key, {field.name for field in fields} | unused)
    problems += wrong
    return None if wrong else kinds[kind](**values)


def _unread(section: dict[str, Any], key: str, fields: set[str]) -> list[str]:
    """Lists the section's fields that are not read and would change the network."""
    wrong = []
    for name in sorted(section.keys() - fields - _HARMLESS):
        value, factor = section[name], name in _FACTORS
        if value and not (factor and value == 1):
            expected = f"none or 1{_FACTORS[name]}" if factor else "none"
            wrong.append(f"{key}.{name}: got {value!r}, expected {expected}")
    return wrong
