"""RoPE in config.json: base and scaling, in both of transformers' spellings.

Version 4 writes `rope_theta` beside `rope_scaling`, version 5 puts both into `rope_parameters`. Older engines read the
first alone, so what is written here says it in both (as SpecForge's exporter does, export/checkpoint_io.py, a6b6b02).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from eagle3_jax.models.layers import LinearScaling, RopeScaling

THETA = 10000.0  # what no `rope_theta` means, to every engine
_KINDS = {"llama3": RopeScaling, "linear": LinearScaling}
_SECTIONS = ("rope_parameters", "rope_scaling")


def read_rope(values: dict[str, Any], problems: list[str]) -> tuple[float, RopeScaling | LinearScaling | None]:
    """Base and scaling of a config.json. Appends to `problems`, field by field; the values then mean nothing."""
    known = len(problems)
    thetas, scalings = {}, {}
    for key in _SECTIONS:
        section = values.get(key)
        if section and not isinstance(section, dict):
            problems.append(f"{key}: got {section!r}, expected an object")
        elif section:
            thetas[f"{key}.rope_theta"] = section.get("rope_theta")
            scalings[key] = _read_scaling(section, key, problems)
    thetas["rope_theta"] = values.get("rope_theta")
    thetas = {key: theta for key, theta in thetas.items() if theta is not None}
    problems += [f"{key}: got {x!r}, expected a positive number" for key, x in thetas.items() if not is_positive(x)]
    if len(problems) > known:
        return THETA, None
    if len(set(thetas.values())) > 1:
        problems.append(f"rope_theta: got {thetas}, expected one value")
    if len(set(scalings.values())) > 1:
        problems.append(f"rope_scaling: got {scalings}, expected one scaling")
    return float(next(iter(thetas.values()), THETA)), next(iter(scalings.values()), None)


def write_rope(theta: float, scaling: RopeScaling | LinearScaling | None) -> dict[str, Any]:
    """The keys of config.json that `read_rope` reads."""
    kind = next((name for name, made in _KINDS.items() if isinstance(scaling, made)), "default")
    section: dict[str, Any] = {"rope_type": kind} | ({} if scaling is None else dataclasses.asdict(scaling))
    values: dict[str, Any] = {"rope_theta": theta, "rope_parameters": section | {"rope_theta": theta}}
    return values if scaling is None else values | {"rope_scaling": section}


def is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _read_scaling(section: dict[str, Any], key: str, problems: list[str]) -> RopeScaling | LinearScaling | None:
    kind = section.get("rope_type", section.get("type", "default"))
    if kind == "default":
        return None
    if kind not in _KINDS:
        problems.append(f"{key}.rope_type: got {kind!r}, expected 'default', 'linear' or 'llama3'")
        return None
    values = {field.name: section.get(field.name) for field in dataclasses.fields(_KINDS[kind])}
    missing = [f"{key}.{name}: missing" for name, value in values.items() if value is None]
    wrong = [
        f"{key}.{name}: got {value!r}, expected a positive number"
        for name, value in values.items()
        if value is not None and not is_positive(value)
    ]
    problems += missing + wrong
    return None if missing or wrong else _KINDS[kind](**values)
