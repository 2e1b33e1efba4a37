"""JSON schemas as regular expressions, in Rust's syntax.

What is generated is a part of what a schema allows: properties in the schema's order and no others, one space at most
behind a comma or colon, no `\\u` escapes. Nesting is bounded. A keyword without a regular form is refused by its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Stands for any value, with `DEPTH` containers inside each other; no JSON text has this character.
ANY, DEPTH = "\x01", 2
_RECURSIONS = 3  # times that a reference contains itself
_MOST = 200  # characters of a string and items of a list that has a limit

_GAP = "[ ]?"
_PLAIN = r'[^"\\\x00-\x1F]'
_CHARACTER = rf'(?:{_PLAIN}|\\["\\/bfnrt])'
_INTEGER = "-?(?:0|[1-9][0-9]*)"
_NUMBER = rf"{_INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{{1,2}})?"
_STRING = f'"{_CHARACTER}*"'
SCALAR = f"{_STRING}|{_NUMBER}|true|false|null"
VALUE = rf"{SCALAR}|\[(?:{ANY}(?:,{_GAP}{ANY})*)?\]|\{{(?:{_STRING}:{_GAP}{ANY}(?:,{_GAP}{_STRING}:{_GAP}{ANY})*)?\}}"
_DATE = (
    "[12][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](?:\.[0-9]+)?(?:Z|[+-]{_HOUR})"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HOST = "[a-z0-9]+(?:[.-][a-z0-9]+)*"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "email": rf"[a-z0-9]+(?:[._+-][a-z0-9]+)*@{_HOST}\.[a-z]{{2,}}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "uri": rf"https?://{_HOST}(?:/[A-Za-z0-9._~-]+)*/?",
}
_NOTES = frozenset(
    "title description default examples $schema $id $comment $defs definitions deprecated readOnly writeOnly".split()
)
_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_KEYWORDS: dict[str, frozenset[str]] = {
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "string": frozenset(("pattern", "format", "minLength", "maxLength")),
    "integer": _BOUNDS,
    "number": _BOUNDS,
    "boolean": frozenset(),
    "null": frozenset(),
}
_FIXED = {"boolean": "(?:true|false)", "null": "null"}
# A pattern's parts: an escape, a class, another character. In classes, Rust's own operators are escaped.
_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_SHORT = {r"\d": "0-9", r"\w": "A-Za-z0-9_", r"\s": " "}
_CLASSES = {".": r"[^\n]", r"\D": r"[^0-9]", r"\W": r"[^A-Za-z0-9_]", r"\S": r"[^\s]"} | {
    short: f"[{full}]" for short, full in _SHORT.items()
}


def regex_of(schema: str) -> str:
    """Returns the regular expression of a JSON schema's values. Raises ValueError: a part without one, by its place."""
    try:
        whole = json.loads(schema)
    except ValueError as error:
        raise _refused("json", schema, f"a JSON schema ({error})") from error
    found = _Schemas(whole).of(whole, "json", ())
    if found is None:
        raise _refused("json", schema, f"a schema with a value, within {_RECURSIONS} references inside each other")
    return found


def any_object() -> str:
    """Returns the regular expression of JSON objects."""
    return _map(ANY)


def literal(text: str) -> str:
    """Returns the regular expression of one text."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", r"\\\g<0>", text)


def unanchored(regex: str) -> tuple[str, bool, bool]:
    """Returns a regular expression without anchors around it, and whether it began and ended with one."""
    begins, ends = regex.startswith("^"), re.search(r"(?<!\\)(?:\\\\)*\$$", regex) is not None
    return regex[begins : len(regex) - ends], begins, ends


def _refused(place: str, got: object, expected: str) -> ValueError:
    return ValueError(f"{place}: got {got!r}, expected {expected}")


def _map(value: str) -> str:
    pair = f"{_STRING}:{_GAP}{value}"
    return rf"\{{(?:{pair}(?:,{_GAP}{pair})*)?\}}"


def _list(item: str | None, low: int, high: int | None, first: Sequence[str] = ()) -> str | None:
    """Returns lists that begin with the `first` items, with `low` to `high` more."""
    if item is None or high == 0:
        return rf"\[{f',{_GAP}'.join(first)}\]" if low == 0 else None
    if first:
        return rf"\[{f',{_GAP}'.join(first)}(?:,{_GAP}{item}){_times(low, high)}\]"
    more = _times(max(low - 1, 0), None if high is None else high - 1)
    return rf"\[(?:{item}(?:,{_GAP}{item}){more}){'' if low else '?'}\]"


def _times(low: int, high: int | None) -> str:
    return f"{{{low},{'' if high is None else high}}}"


class _Schemas:
    """The parts of one schema; None stands for a part without values."""

    def __init__(self, whole: Any) -> None:
        self._whole = whole

    def of(self, schema: Any, place: str, inside: tuple[str, ...]) -> str | None:
        """Returns a part's regular expression, `inside` these references."""
        if isinstance(schema, bool):
            return ANY if schema else None
        if not isinstance(schema, Mapping):
            raise _refused(place, schema, "a schema")
        keywords = schema.keys() - _NOTES
        for keyword in ("$ref", "allOf", "anyOf", "oneOf", "enum", "const"):
            if keyword in keywords:
                beside = keywords - {keyword} - ({"type"} if keyword in ("enum", "const") else set())
                if beside:
                    raise _refused(f"{place}.{min(beside)}", schema[min(beside)], f"nothing beside {keyword}")
                return self._composed(keyword, schema, place, inside)
        kinds = _listed(schema.get("type", [kind for kind, own in _KEYWORDS.items() if own & keywords]))
        if unknown := [kind for kind in kinds if kind not in _KEYWORDS]:
            raise _refused(f"{place}.type", unknown[0], f"one of {', '.join(_KEYWORDS)}")
        known = frozenset({"type"}).union(*(_KEYWORDS[kind] for kind in kinds))
        if keywords - known:
            name = min(keywords - known)
            raise _refused(f"{place}.{name}", schema[name], "none: this keyword has no regular form here")
        if not kinds:
            return ANY
        return _either(self._value(kind, schema, place, inside) for kind in kinds)

    def _value(self, kind: str, schema: Mapping[str, Any], place: str, inside: tuple[str, ...]) -> str | None:
        if kind in _FIXED:
            return _FIXED[kind]
        if kind in ("object", "array"):
            return (self._object if kind == "object" else self._array)(schema, place, inside)
        return _string(schema, place) if kind == "string" else _numbers(schema, place, whole=kind == "integer")

    def _composed(self, keyword: str, schema: Mapping[str, Any], place: str, inside: tuple[str, ...]) -> str | None:
        value, at = schema[keyword], f"{place}.{keyword}"
        if keyword == "$ref":
            if inside.count(value) > _RECURSIONS:
                return None
            return self.of(self._found(value, at), str(value), (*inside, value))
        if keyword in ("enum", "const"):
            values = value if keyword == "enum" else [value]
            held = [one for one in values if not _kinds(one).isdisjoint(_listed(schema.get("type", _KEYWORDS)))]
            return _either(literal(json.dumps(one, ensure_ascii=False)) for one in held)
        if not isinstance(value, list) or not value:
            raise _refused(at, value, "a list of schemas")
        if keyword == "allOf" and len(value) > 1:
            raise _refused(at, value, "one schema: several at once have no regular form here")
        if keyword == "oneOf":
            known = [self._known(one, at) for one in value]
            if any(not _apart(known[i], other) for i in range(len(known)) for other in known[:i]):
                raise _refused(at, value, "schemas of different types or constants; else anyOf")
        return _either(self.of(one, f"{at}[{number}]", inside) for number, one in enumerate(value))

    def _found(self, reference: Any, place: str) -> Any:
        found = self._whole
        try:
            if not reference.startswith("#"):
                raise KeyError
            for name in reference[1:].split("/")[1:]:
                name = name.replace("~1", "/").replace("~0", "~")
                found = found[int(name) if isinstance(found, list) else name]
        except (AttributeError, LookupError, TypeError, ValueError):
            raise _refused(place, reference, "a reference into this schema, such as '#/$defs/name'") from None
        return found

    def _known(self, schema: Any, place: str) -> Any:
        while isinstance(schema, Mapping) and "$ref" in schema:
            schema = self._found(schema["$ref"], place)
        return schema

    def _object(self, schema: Mapping[str, Any], place: str, inside: tuple[str, ...]) -> str | None:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if missing := [name for name in required if name not in properties]:
            raise _refused(f"{place}.required", missing[0], "names of properties")
        if not properties:
            other = schema.get("additionalProperties", True)
            value = ANY if other is True or other == {} else None
            value = value or self.of(other, f"{place}.additionalProperties", inside)
            return r"\{\}" if value is None else _map(value)
        members, must = [], []
        for name, part in properties.items():
            value = self.of(part, f"{place}.properties.{name}", inside)
            if value is not None:
                members.append(f"{literal(json.dumps(name, ensure_ascii=False))}:{_GAP}{value}")
                must.append(name in required)
            elif name in required:
                return None

        def behind(first: int) -> str:
            parts = (f"(?:,{_GAP}{members[i]}){'' if must[i] else '?'}" for i in range(first + 1, len(members)))
            return members[first] + "".join(parts)

        if True in must:
            first = must.index(True)
            return rf"\{{{''.join(f'(?:{member},{_GAP})?' for member in members[:first])}{behind(first)}\}}"
        return rf"\{{{_either(map(behind, range(len(members)))) or ''}{'?' if members else ''}\}}"

    def _array(self, schema: Mapping[str, Any], place: str, inside: tuple[str, ...]) -> str | None:
        items, first = schema.get("items", "prefixItems" not in schema), schema.get("prefixItems", [])
        low, high = _counts(schema, "minItems", "maxItems", place)
        parts = [self.of(part, f"{place}.prefixItems[{i}]", inside) for i, part in enumerate(first)]
        beyond = None if high is None else high - len(parts)
        if None in parts or (beyond is not None and beyond < 0):
            return None
        item = ANY if items is True or items == {} else self.of(items, f"{place}.items", inside)
        return _list(item, max(low - len(parts), 0), beyond, [part for part in parts if part is not None])


def _string(schema: Mapping[str, Any], place: str) -> str:
    given = [name for name in ("pattern", "format") if name in schema]
    sizes = [name for name in ("minLength", "maxLength") if name in schema]
    if len(given) > 1 or (given and sizes):
        name = (sizes or given)[-1]
        raise _refused(f"{place}.{name}", schema[name], f"nothing beside {given[0]}")
    if "pattern" in schema:
        return f'"{_pattern(schema["pattern"], f"{place}.pattern")}"'
    if "format" in schema:
        if schema["format"] not in _FORMATS:
            raise _refused(f"{place}.format", schema["format"], f"one of {', '.join(_FORMATS)}")
        return f'"{_FORMATS[schema["format"]]}"'
    return f'"{_CHARACTER}{_times(*_counts(schema, "minLength", "maxLength", place))}"' if sizes else _STRING


def _either(parts: Iterator[str | None]) -> str | None:
    held = list(dict.fromkeys(part for part in parts if part is not None))
    if ANY in held:
        return ANY
    return f"(?:{'|'.join(held)})" if held else None


def _kinds(value: Any) -> set[str]:
    """Returns the types of a value."""
    kinds = {bool: {"boolean"}, str: {"string"}, int: {"integer", "number"}, float: {"number"}, list: {"array"}}
    return kinds.get(type(value), {"null"} if value is None else {"object"})


def _apart(one: Any, other: Any) -> bool:
    """Tells whether types or constants show that no value fulfils both of two schemas."""
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    values = [part.get("enum", [part["const"]] if "const" in part else None) for part in (one, other)]
    if None not in values:
        return not any(a == b for a in values[0] for b in values[1])
    pairs = zip((one, other), values, strict=True)
    left, right = (
        {"number" if kind == "integer" else kind for kind in _listed(part.get("type", ()))}
        if given is None
        else set().union(*map(_kinds, given))
        for part, given in pairs
    )
    if left and right and left.isdisjoint(right):
        return True
    known, others = one.get("properties", {}), other.get("properties", {})
    shared = {*one.get("required", ())} & {*other.get("required", ())} & known.keys() & others.keys()
    return any(_apart(known[name], others[name]) for name in shared)


def _listed(kinds: Any) -> list[str]:
    return [kinds] if isinstance(kinds, str) else list(kinds)


def _counts(schema: Mapping[str, Any], least: str, most: str, place: str) -> tuple[int, int | None]:
    low, high = schema.get(least, 0), schema.get(most)
    for name, value in ((least, low), (most, high)):
        if value is not None and not (isinstance(value, int) and value >= 0):
            raise _refused(f"{place}.{name}", value, "a whole number")
    if low > _MOST:
        raise _refused(f"{place}.{least}", low, f"{_MOST} at most")
    if high is not None and high < low:
        raise _refused(f"{place}.{most}", high, f"{least} at least")
    return low, None if high is None else min(high, _MOST)


def _pattern(pattern: Any, place: str) -> str:
    """Returns a pattern's texts as a JSON string writes them."""
    if not isinstance(pattern, str):
        raise _refused(place, pattern, "a regular expression")
    body, begins, ends = unanchored(pattern)
    parts, depth = [], 0
    for part in _PART.findall(body):
        depth += (part == "(") - (part == ")")
        if part in ("^", "$") or (part == "|" and depth == 0 and (begins or ends)):
            raise _refused(place, pattern, "anchors around the whole pattern alone")
        if part in _CLASSES or part[0] == "[":
            part = _CLASSES.get(part) or "[" + part[1:-1].replace("[", r"\[") + "]"
            for short, full in _SHORT.items():
                part = part.replace(short, full)
            part = f"[{part}&&{_PLAIN}]"
        elif part in ('"', '\\"', r"\\", r"\n", r"\t", r"\r"):
            part = r"\\" + (literal(part[-1]) if part[-1] in '"\\' else part[-1])
        elif part[0] == "\\" and part[1].isalnum():
            raise _refused(place, pattern, f"a regular expression without {part}")
        parts.append(part)
    anything = f"{_CHARACTER}*"
    return f"{'' if begins else anything}(?:{''.join(parts)}){'' if ends else anything}"


def _numbers(schema: Mapping[str, Any], place: str, *, whole: bool) -> str | None:
    """Returns the numbers between whole bounds, or all.

    Beside bounds a number has six decimals at most: more would round to the bound itself in a reader's float64.
    """
    if not _BOUNDS & schema.keys():
        return _INTEGER if whole else _NUMBER
    for name in _BOUNDS & schema.keys():
        value = schema[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or int(value) != value:
            raise _refused(f"{place}.{name}", value, "a whole number")
        if not whole and abs(value) > 10**9:
            raise _refused(f"{place}.{name}", value, "a number within 10**9")
    # The tighter of an open and a closed bound: the greatest lower one, open before closed.
    lows = [(int(schema[name]), name != "minimum") for name in ("minimum", "exclusiveMinimum") if name in schema]
    highs = [(-int(schema[name]), name != "maximum") for name in ("maximum", "exclusiveMaximum") if name in schema]
    low, high = max(lows, default=None), max(highs, default=None)  # the upper bound is a negated number's lower one

    def side(low: tuple[int, bool] | None, high: tuple[int, bool] | None) -> str | None:
        """Returns the numbers from 0 on between the bounds."""
        least, open_low = (0, False) if low is None or low[0] < 0 else low
        most, open_high = (None, False) if high is None else (-high[0], high[1])
        if most is not None and most < 0:
            return None
        first = least + open_low
        if whole:
            return _range(first, None if most is None else most - open_high)
        parts = [_range(first, None if most is None else most - 1)]
        parts = [part and rf"{part}(?:\.[0-9]{{1,6}})?" for part in parts]
        if open_low and (most is None or most > least):
            parts.append(rf"{least}\.[0-9]{{0,5}}[1-9]")
        if most is not None and not open_high and most >= first:
            parts.append(rf"{most}(?:\.0+)?")
        return _either(iter(parts))

    positive, negative = side(low, high), side(high, low)
    return _either(iter([positive, None if negative is None else f"-{negative}"]))


def _range(low: int, high: int | None) -> str | None:
    """Returns the decimal digits of the whole numbers from `low` (0 or more) to `high`."""
    last = 10 ** len(str(low)) - 1 if high is None else high
    parts: list[str | None] = [] if high is not None else [f"[1-9][0-9]{{{len(str(low))},}}"]
    for length in range(len(str(low)), len(str(last)) + 1):
        least, most = max(low, 10 ** (length - 1) if length > 1 else 0), min(last, 10**length - 1)
        parts += [_digits(str(least), str(most))] if least <= most else []
    return _either(iter(parts))


def _digits(low: str, high: str) -> str:
    """Returns the texts of digits between two of the same length."""
    if not low:
        return ""
    if low[0] == high[0]:
        return low[0] + _digits(low[1:], high[1:])
    rest, first, last, parts = len(low) - 1, int(low[0]), int(high[0]), []
    if low[1:].strip("0"):
        parts.append(low[0] + _digits(low[1:], "9" * rest))
        first += 1
    if high[1:].strip("9"):
        parts.append(high[0] + _digits("0" * rest, high[1:]))
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}][0-9]{{{rest}}}")
    return f"(?:{'|'.join(parts)})"
