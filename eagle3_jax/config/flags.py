"""The fields of a RunConfig as flags (`--train.learning-rate 3e-4`): in `--help`, and as overrides of the YAML."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import re
import types
import typing
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NoReturn

from eagle3_jax.config.checks import ConfigError
from eagle3_jax.config.run import RunConfig

_ALIASES = {"train.warm_start": ("--warm-start",)}
_NONE = ("None", "null")


@dataclasses.dataclass(frozen=True)
class _Field:
    place: str  # "train.ttt_steps"
    kind: Any  # type, without pydantic's annotations
    default: Any
    text: str  # from the section's docstring

    @property
    def flags(self) -> list[str]:
        return [*_ALIASES.get(self.place, ()), f"--{self.place}".replace("_", "-")]

    @property
    def negation(self) -> str:
        """The flag that negates a truth value, such as `--draft.no-fc-norm`."""
        head, _, last = self.flags[-1].rpartition(".")
        return f"{head}.no-{last}"


def overrides(words: Sequence[str], others: Collection[str] = ()) -> dict[str, Any]:
    """Parses `--section.field VALUE ...` into nested texts; an unknown flag may mean one of `others`.

    Raises ConfigError: no field, or one without a value.
    """
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for field in fields(RunConfig):
        spelled = dict.fromkeys(spelling for flag in field.flags for spelling in (flag, _underscored(flag)))
        if field.kind is bool:
            parser.add_argument(*spelled, dest=field.place, action="store_true")
            negated = dict.fromkeys((field.negation, _underscored(field.negation)))
            parser.add_argument(*negated, dest=field.place, action="store_false")
        else:
            parser.add_argument(*spelled, dest=field.place, nargs="*" if tuple in _parts(field.kind) else None)
    given, unknown = parser.parse_known_args(words)
    if unknown:
        flag = unknown[0].partition("=")[0]
        near = difflib.get_close_matches(flag, others, 1, 0.8)
        hint = f", did you mean {near[0]}?" if near else meant(flag.lstrip("-").replace("-", "_"))
        expected = f"expected --section.field VALUE{hint}"
        raise ConfigError(f"{unknown[0]}: not a field of the configuration, {expected}")
    values: dict[str, Any] = {}
    for field in fields(RunConfig):
        if hasattr(given, field.place):
            *sections, name = field.place.split(".")
            inner = values
            for section in sections:
                inner[section] = inner = inner[section] if isinstance(inner.get(section), dict) else {}
            value, kinds = getattr(given, field.place), _parts(field.kind)
            if types.NoneType in kinds and value in (*_NONE, *([none] for none in _NONE)):
                value = None
            one_will_do = isinstance(value, list) and len(value) == 1 and not kinds <= {tuple, types.NoneType}
            inner[name] = value[0] if one_will_do else value
    return values


def add_to_help(parser: argparse.ArgumentParser, sections: Collection[str]) -> None:
    """Lists the run's own fields and those of `sections` in a parser's help, with their texts and defaults."""
    groups = [("run", RunConfig)]
    groups += [(s.name, type(s.default)) for s in dataclasses.fields(RunConfig) if s.name in sections]
    for name, section in groups:
        description, _, _ = inspect.cleandoc(section.__doc__ or "").partition("\nAttributes:\n")
        group = parser.add_argument_group(name, description)
        for field in fields(section, "" if section is RunConfig else f"{name}.", nested=section is not RunConfig):
            text, default = field.text.replace("%", "%%"), field.default
            if isinstance(default, tuple):
                default = " ".join(map(str, default)) or "none"
            if default is not dataclasses.MISSING:
                text += f" (default: {default})"
            if field.kind is bool:
                group.add_argument(*field.flags, field.negation, action="store_true", help=text)
            else:
                group.add_argument(*field.flags, metavar=_metavar(field.kind), help=text)


def meant(name: str) -> str:
    """Returns ", did you mean ...?" where a field has nearly this name, else an empty text."""
    sections = [section.name for section in dataclasses.fields(RunConfig)]
    near = difflib.get_close_matches(name, [*(field.place for field in fields(RunConfig)), *sections], 1, 0.8)
    return f", did you mean {near[0]}?" if near else ""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def _underscored(flag: str) -> str:
    return f"--{flag[2:].replace('-', '_')}"


def fields(section: Any, prefix: str = "", nested: bool = True) -> Iterator[_Field]:
    """Yields a section's fields, with `nested` those of its sections. Lists of sections stand in the YAML alone."""
    _, _, attributes = inspect.cleandoc(section.__doc__ or "").partition("\nAttributes:\n")
    texts = dict(re.findall(r"^    (\w+): (.*(?:\n     .*)*)", attributes, re.MULTILINE))
    kinds = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        place, kind = f"{prefix}{field.name}", kinds[field.name]
        if typing.get_origin(kind) is tuple and any(map(dataclasses.is_dataclass, _parts(typing.get_args(kind)[0]))):
            continue
        inner = next((part for part in _parts(kind) if dataclasses.is_dataclass(part)), None)
        if inner is None or inner is not kind:  # a value, or a section or else a word ("auto")
            default = field.default if inner is None else dataclasses.MISSING
            yield _Field(place, kind, default, " ".join(texts.get(field.name, "").split()))
        if inner is not None and nested:
            yield from fields(inner, f"{place}.")


def _parts(kind: Any) -> set[Any]:
    """Returns the members of a union, tuples as `tuple` and literals as `Literal`; another type alone."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return set().union(*map(_parts, typing.get_args(kind)))
    return {typing.get_origin(kind) or kind}


def _metavar(kind: Any) -> str:
    """Formats the values of a type: INT, {float32,bfloat16}, INT ..., STR|None."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return f"{{{','.join(map(str, parts))}}}"
    if origin is tuple:
        return f"{_metavar(parts[0])} ..."
    if origin in (typing.Union, types.UnionType):
        return "|".join(_metavar(part) for part in parts if not dataclasses.is_dataclass(part))
    return "None" if kind is types.NoneType else kind.__name__.upper()
