"""The shape that a request asks of its answer."""

from __future__ import annotations

import dataclasses
import functools
import json as json_text
from collections.abc import Mapping, Sequence
from typing import Any

from eagle3_jax.config.checks import require
from eagle3_jax.decoding.structured import schema


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The shape of an answer, exactly one of the first five (vLLM's class of this name). Its tokens end where it ends.

    Raises ValueError: none or several of them, a value of another type, or a part of a schema without a regular form,
    by name.

    Attributes:
        json: a JSON schema, as a mapping or as text; afterwards text. Properties come in the schema's order.
        json_object: True: any JSON object.
        regex: a regular expression of the whole answer (Rust's syntax, without look-around and back references).
        choice: the answer is one of these texts.
        grammar: refused: a grammar has no finite table; give a schema or a regular expression.
        after: the text, by the target's tokens, behind which the shape begins, such as the end of a thought; before it
            anything goes. None: the shape is the whole answer's.
    """

    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    after: str | None = None

    def __post_init__(self) -> None:
        expected = "None: a grammar has no finite table; give json, regex or choice"
        require(self.grammar is None, "grammar", self.grammar, expected)
        require(isinstance(self.json_object, bool), "json_object", self.json_object, "True or False")
        kinds = {"json": self.json, "json_object": self.json_object or None, "regex": self.regex, "choice": self.choice}
        given = [name for name, value in kinds.items() if value is not None]
        require(len(given) == 1, "structured", given, f"exactly one of {', '.join(kinds)}")
        for name in ("regex", "after"):
            value = getattr(self, name)
            require(value is None or (isinstance(value, str) and value != ""), name, value, "a text, not empty")
        if self.choice is not None:
            listed = isinstance(self.choice, list | tuple) and len(self.choice) > 0
            texts = listed and all(isinstance(text, str) and text for text in self.choice)
            require(texts, "choice", self.choice, "texts that are not empty")
            object.__setattr__(self, "choice", tuple(self.choice))
        if self.json is not None and not isinstance(self.json, str):
            object.__setattr__(self, "json", json_text.dumps(self.json))
        _ = self.pattern

    @functools.cached_property
    def pattern(self) -> str:
        """The regular expression of the whole shape."""
        if self.json is not None:
            return schema.regex_of(str(self.json))
        if self.json_object:
            return schema.any_object()
        if self.choice is not None:
            return "|".join(map(schema.literal, self.choice))
        return schema.unanchored(str(self.regex))[0]
