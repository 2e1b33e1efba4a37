"""A run's configuration from its YAML, overrides included, and back to plain values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pydantic
import yaml

from eagle3_jax.config import flags
from eagle3_jax.config.checks import ConfigError, problems
from eagle3_jax.config.run import RunConfig
from eagle3_jax.runs import disk


def load(path: str | disk.Path, overrides: Sequence[str] = (), others: Collection[str] = ()) -> RunConfig:
    """Reads a YAML run file and applies overrides such as `--train.learning_rate 3e-4`. Raises ConfigError.

    `others` are further flags, which an unknown one may mean.
    """
    path = disk.path_of(path)
    try:
        values = yaml.load(disk.read_bytes(path).decode(), _Loader)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:  # RecursionError: thousands of brackets
        raise ConfigError(f"--config {path}: not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: got {type(values).__name__}, expected a mapping of sections")
    return with_overrides(values, overrides, others)


def with_overrides(values: dict[str, Any], overrides: Sequence[str], others: Collection[str] = ()) -> RunConfig:
    """Makes a RunConfig of nested values and dotted overrides, see `load`. Raises ConfigError."""
    return from_dict(_merged(values, flags.overrides(overrides, others)))


def _merged(values: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for name, value in over.items():
        below = merged.get(name)
        merged[name] = _merged(below, value) if isinstance(value, dict) and isinstance(below, dict) else value
    return merged


def from_dict(values: dict[str, Any]) -> RunConfig:
    """Validates nested values (as read from YAML) into a RunConfig. Raises ConfigError."""
    try:
        config = pydantic.TypeAdapter(RunConfig).validate_python(values)
        wrong = list(_mistaken(values, config, ()))
    except pydantic.ValidationError as error:
        wrong = problems(error, meant=flags.meant)
    if wrong:
        raise ConfigError("\n  ".join(["invalid configuration:", *wrong]))
    return config


def to_dict(config: Any) -> dict[str, Any]:
    """Converts a section or a whole RunConfig to plain nested values (JSON- and YAML-ready)."""
    return pydantic.TypeAdapter(type(config)).dump_python(config, mode="json")


def _mistaken(given: Any, read: Any, place: tuple[str, ...]) -> Iterator[str]:
    """Yields truth values that pydantic read as numbers (`yes` as 1), and other values read as truth values."""
    if isinstance(given, dict):
        for name, value in given.items():
            part = read[name] if isinstance(read, dict) else getattr(read, name)
            yield from _mistaken(value, part, (*place, name))
    elif isinstance(given, list | tuple):
        for number, (value, part) in enumerate(zip(given, read, strict=True)):
            yield from _mistaken(value, part, (*place, str(number)))
    elif isinstance(given, bool) != isinstance(read, bool):
        expected = "true or false" if isinstance(read, bool) else "a number"
        yield f"{'.'.join(place)}: got {given!r}, expected {expected}"


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping; YAML would keep the last one silently."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Checked before `<<` merges other mappings: a merged key may stand here too, and takes precedence.
        node = super().compose_mapping_node(anchor)
        keys = [(key.tag, key.value) for key, _ in node.value]
        for place, key in enumerate(keys):
            if key in keys[:place]:
                mark = node.value[place][0].start_mark
                raise yaml.constructor.ConstructorError(None, None, f"{key[1]!r} stands twice", mark)
        return node
