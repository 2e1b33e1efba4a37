"""Sections of a configuration whose values pydantic checks; an error names the field, what it got, what it expected."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import pydantic
import pydantic.dataclasses
from pydantic import Field

Count = Annotated[int, Field(ge=1)]
Temperature = Annotated[float, Field(ge=0)]  # 0 is greedy
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Proper = Annotated[float, Field(gt=0, lt=1)]

# Members of unions: pydantic puts these tags into an error's place, the YAML has no such level.
TAGS = frozenset("packaged jsonl conversations tfds self DraftTree auto one several shares file".split())

_Section = TypeVar("_Section")
_EXPECTED = {
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false"),
    **dict.fromkeys(("int_from_float", "int_parsing", "int_type"), "an integer"),
    **dict.fromkeys(("float_parsing", "float_type"), "a number"),
    "dataclass_type": "a mapping of fields",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "missing": "a value: the field is required",
    "string_type": "a text",
    "too_short": "{min_length} entries or more",
    "tuple_type": "a list",
    "unexpected_keyword_argument": "a field of the configuration",
    "union_tag_invalid": "a kind of {expected_tags}",
    "union_tag_not_found": "a kind",
}


class ConfigError(ValueError):
    """A configuration that cannot be run; the message lists field, got, expected."""


def require(condition: bool, field: str, got: object, expected: str) -> None:
    """Refuses values that exclude each other, in `__post_init__`; pydantic reports the ValueError with all others."""
    if not condition:
        raise ValueError(f"{field}: got {got!r}, expected {expected}")


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def section(name: str = "") -> Callable[[type[_Section]], type[_Section]]:
    """Makes a frozen, keyword-only dataclass whose values pydantic checks; `name`, its place, is in ConfigErrors."""

    def make(cls: type[_Section]) -> type[_Section]:
        strict = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)
        checked: Any = pydantic.dataclasses.dataclass(cls, frozen=True, kw_only=True, config=strict)
        construct = checked.__init__

        @functools.wraps(construct)
        def __init__(self: Any, **values: Any) -> None:
            try:
                construct(self, **values)
            except pydantic.ValidationError as error:
                raise ConfigError("\n".join(problems(error, name))) from error

        checked.__init__ = __init__
        return checked

    return make


def problems(error: pydantic.ValidationError, prefix: str = "", meant: Callable[[str], str] | None = None) -> list[str]:
    """Formats a line for each problem: "train.batch_size: got 0, expected at least 1"; `meant` suggests other names."""
    lines = []
    for item in error.errors():
        kind, got, context = item["type"], item["input"], item.get("ctx", {})
        place = ".".join([prefix] * bool(prefix) + [str(part) for part in item["loc"] if part not in TAGS])
        if kind == "value_error":  # raised by `require`
            line = ".".join([place] * bool(place) + [str(context["error"])])
        elif kind == "missing":
            line = f"{place}: got none, expected {_EXPECTED[kind]}"
        else:
            expected = _EXPECTED[kind].format_map(context) if kind in _EXPECTED else f"another value: {item['msg']}"
            line = f"{place or 'config'}: got {got!r}, expected {expected}"
        lines.append(line + meant(place) if meant and kind == "unexpected_keyword_argument" else line)
    return lines
