"""Calls of functions in an answer's text: how families of models write them, how they are read, and their regex.

The forms have the names of vLLM's parsers (`--tool-call-parser`). They follow the families' published chat templates.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from eagle3_jax.config.checks import require
from eagle3_jax.decoding.structured.schema import literal, regex_of
from eagle3_jax.decoding.text import CALLED, CHANNEL, MESSAGE, START
from eagle3_jax.models.chat_template import THOUGHT, THOUGHT_END

Call = dict[str, Any]  # in OpenAI's form: {"id": ..., "type": "function", "function": {"name": ..., "arguments": JSON}}
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"  # DeepSeek's
_OF_STRINGS = ("type", "enum", "const", "title", "description", "default", "examples")
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # templates write arguments by Python's `str`


@dataclasses.dataclass(frozen=True)
class Form:
    """How a family of models writes calls.

    Attributes:
        told: texts that a chat template of the family holds, all of them.
        starts: tags that begin a call, or several.
        end: tag behind a call; without it, or where it is missing, calls last to the end of the text.
        fronts: begin calls at the front of the answer alone, and belong to them.
        pattern: what stands between the tags, with groups `name` and `arguments`; JSON is read without it.
        argument: one of the arguments, with groups for key and value; None where they are one JSON object.
        call: a call as it is written, with NAME and ARGS for its name and arguments.
        pair: one of the arguments as it is written, with KEY and VALUE.
        between: text between two calls.
        around: texts in front of all calls and behind them.
    """

    told: tuple[str, ...]
    starts: tuple[str, ...]
    end: str | None = None
    fronts: tuple[str, ...] = ()
    pattern: str = ""
    argument: str | None = None
    call: str = ""
    pair: str = ""
    between: str = "\n"
    around: tuple[str, str] = ("", "")


# A constraint lets no special token through. Where tags are such tokens, constrained calls are a list of JSON, as they
# are in vLLM for all models.
_LIST: Any = {"fronts": ("[{",), "call": '{"name": "NAME", "arguments": ARGS}', "between": ", ", "around": ("[", "]")}
# Those that tell more come first.
FORMS: Mapping[str, Form] = {
    "openai": Form(
        told=(CHANNEL, "functions."),
        starts=(START, CHANNEL),
        end="<|call|>",
        pattern=rf".*{CALLED}(?P<name>[\w.-]+).*?{re.escape(MESSAGE)}(?P<arguments>.*)",
        **_LIST,
    ),
    "glm45": Form(
        told=("<arg_key>",),
        starts=("<tool_call>",),
        end="</tool_call>",
        pattern=r"(?P<name>[^<\s]+)\s*(?P<arguments>(?:<arg_key>.*</arg_value>)?)",
        argument=r"<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>(.*?)</arg_value>",
        call="<tool_call>NAMEARGS\n</tool_call>",
        pair="\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>",
    ),
    "qwen3_coder": Form(
        told=("<tool_call>", "<function="),
        starts=("<tool_call>",),
        end="</tool_call>",
        pattern=r"<function=(?P<name>[^>]+)>(?P<arguments>.*)</function>",
        argument=r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>",
        call="<tool_call>\n<function=NAME>\nARGS</function>\n</tool_call>",
        pair="<parameter=KEY>\nVALUE\n</parameter>\n",
    ),
    "hermes": Form(
        told=("<tool_call>",),
        starts=("<tool_call>",),
        end="</tool_call>",
        call='<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>',
    ),
    "mistral": Form(
        told=("[TOOL_CALLS]",),
        starts=("[TOOL_CALLS]",),
        pattern=r"(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?P<arguments>\{.*)",
        **_LIST,
    ),
    "deepseek_v3": Form(
        told=(_BEGIN, "```json"),
        starts=(_CALLS, _BEGIN),
        end=_END,
        pattern=rf"(?:{_BEGIN})?function{_SEPARATOR}(?P<name>\S+)\s*```json\s*(?P<arguments>.*)```",
        call=f"{_BEGIN}function{_SEPARATOR}NAME\n```json\nARGS\n```{_END}",
        around=(_CALLS, _CALLS_END),
    ),
    "deepseek_v31": Form(
        told=(_BEGIN,),
        starts=(_CALLS, _BEGIN),
        end=_END,
        pattern=rf"(?:{_BEGIN})?(?P<name>\S+?){_SEPARATOR}(?P<arguments>.*)",
        call=f"{_BEGIN}NAME{_SEPARATOR}ARGS{_END}",
        between="",
        around=(_CALLS, _CALLS_END),
    ),
    "llama3_json": Form(
        told=('"parameters": dictionary',),
        starts=("<|python_tag|>",),
        fronts=("{",),
        call='{"name": "NAME", "parameters": ARGS}',
        between="; ",
    ),
}


def form_of(template: str) -> Form | None:
    """Tells the form of a chat template's calls; None for a template without tools, or of another form."""
    return next((form for form in FORMS.values() if all(text in template for text in form.told)), None)


def written(form: Form, tools: Mapping[str, Any], parallel: bool) -> str:
    """Makes the regex of a call of one of the tools, or with `parallel` of several calls, whose arguments fit.

    `tools` are as in `Reader`. Raises ValueError: a part of a schema that has no regex, by its place.
    """
    calls = "|".join(_filled(form.call, NAME=literal(name), ARGS=_arguments(form, name, tools[name])) for name in tools)
    before, behind = map(literal, form.around)
    more = f"(?:{literal(form.between)}(?:{calls}))*" if parallel else ""
    return f"{before}(?:{calls}){more}{behind}"


def _arguments(form: Form, name: str, schema: Any) -> str:
    """Makes the regex of a call's arguments: no others than the schema names."""
    whole: dict[str, Any] = schema or {"type": "object", "properties": {}}
    closed: dict[str, Any] = {"additionalProperties": False}
    if not whole.get("properties", True):
        whole = closed | whole
    try:
        regex = regex_of(json.dumps(whole))
        if not form.pair:
            return regex
        require(whole.get("type") == "object", "json.type", whole.get("type"), "'object'")
        pairs = ""
        for key, part in whole.get("properties", {}).items():
            pair = _filled(form.pair, KEY=literal(key), VALUE=_value(form, part, whole.get("$defs"), key))
            pairs += pair if key in whole.get("required", ()) else f"(?:{pair})?"
        return pairs
    except ValueError as error:
        raise ValueError(f"tools.{name}.parameters{str(error).removeprefix('json')}") from error


def _value(form: Form, schema: Any, definitions: Any, key: str) -> str:
    """Makes the regex of an argument without quotes around strings."""
    if isinstance(schema, dict) and "anyOf" in schema:
        return f"(?:{'|'.join(_value(form, part, definitions, key) for part in schema['anyOf'])})"
    if "string" not in _kinds_of(schema):
        return regex_of(json.dumps(schema | {"$defs": definitions} if definitions else schema))
    unknown = [word for word in schema if word not in _OF_STRINGS]
    require(not unknown, f"json.properties.{key}", unknown, f"of keywords only {', '.join(_OF_STRINGS)}")
    if fixed := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        return f"(?:{'|'.join(literal(str(text)) for text in fixed)})"
    return _without(form.pair.partition("VALUE")[2].strip())


def _filled(text: str, **parts: str) -> str:
    """Makes a text's regex, in which words in capitals stand for one."""
    words = re.split(f"({'|'.join(parts)})", text)
    return "".join(parts.get(word, literal(word)) for word in words)


def _without(tag: str) -> str:
    """Makes the regex of every text without a tag, whose first character comes once in it."""
    first, begun = tag[0], "|".join(literal(tag[:size]) for size in range(len(tag) - 1, 0, -1))
    broken = "|".join(f"{literal(tag[:size])}[^{first}{literal(tag[size])}]" for size in range(1, len(tag)))
    return f"(?:[^{first}]|(?:{begun})*(?:{broken}))*(?:{begun})*"


class Reader:
    """Separates an answer's text into content, thoughts and calls as it arrives: the same, wherever the text is cut.

    A call comes whole. Text in front of the first call is content, the spaces before the call left out; text between
    calls and behind them is dropped, as in vLLM. What looks like a call and cannot be read is content.
    """

    def __init__(
        self, form: Form | None, tools: Mapping[str, Any], *, thinks: bool = False, parallel: bool = True
    ) -> None:
        """Makes a reader of one answer.

        Args:
            form: of the calls; None reads none.
            tools: the functions' parameters (JSON schemas) by name.
            thinks: the prompt has opened a thought.
            parallel: False keeps the first call alone.
        """
        self._form, self._tools, self._parallel = form or Form((), ()), tools, parallel
        self.count = 0  # of calls so far
        self._held = ""
        self._opened = THOUGHT if thinks else ""  # tag of the open thought or call
        self._content = self._thought = ""  # new ones
        self._begun = False  # content has begun, behind a thought
        self._blank = self._looked = 0  # spaces in front of the open call; characters that hold no end of it

    def add(self, text: str, last: bool) -> tuple[str, str, list[Call]]:
        """Returns the content, the thoughts and the calls that this text completes. `last`: no more text follows."""
        self._held += text
        self._content, self._thought, calls = "", "", list[Call]()
        while self._held:
            if self._opened == THOUGHT:
                goes_on = self._leave_thought(last)
            elif self._opened:
                goes_on = self._leave_call(last, calls)
            else:
                goes_on = self._leave_text(last)
            if not goes_on:
                break
        return self._content, self._thought, calls

    def _say(self, size: int) -> None:
        """Moves held characters into the content."""
        self._content += "" if self.count else self._held[:size]
        self._held = self._held[size:]

    def _leave_thought(self, last: bool) -> bool:
        place = self._held.find(THOUGHT_END)
        ended = place >= 0
        if not ended:
            place = len(self._held) - (0 if last else _unfinished(self._held, [THOUGHT_END]))
        self._thought += self._held[:place]
        self._held = self._held[place + len(THOUGHT_END) * ended :]
        if ended:
            self._opened, self._begun = "", False
        return ended

    def _leave_text(self, last: bool) -> bool:
        tags, fronts = self._form.starts, () if self._begun else (THOUGHT, *self._form.fronts)
        blank = len(self._held) - len(self._held.lstrip())
        found = [(place, tag) for tag in tags if (place := self._held.find(tag)) >= 0]
        found += [(blank, tag) for tag in fronts if self._held.startswith(tag, blank)]
        if not found:
            size = len(self._held)
            if not last:
                size = len(self._held[: size - _unfinished(self._held, (*tags, *fronts))].rstrip())
            self._begun = self._begun or size > blank
            self._say(size)
            return False
        place, self._opened = min(found)
        spoken = len(self._held[:place].rstrip())
        self._say(spoken)
        self._blank = place - spoken
        if self._opened == THOUGHT:
            self._held = self._held[self._blank + len(THOUGHT) :]
        return True

    def _leave_call(self, last: bool, calls: list[Call]) -> bool:
        begin, end = self._blank + len(self._opened), self._form.end if self._opened in self._form.starts else None
        while end is not None and (place := self._held.find(end, max(self._looked, begin))) >= 0:
            if self._take(self._held[self._blank : place], calls):  # else the tag stands inside of an argument
                self._held, self._opened, self._looked = self._held[place + len(end) :], "", 0
                return True
            self._looked = place + len(end)
        if not last:
            self._looked = max(self._looked, len(self._held) - len(end or "") + 1)
        elif self._form.argument is None and self._take(self._held[self._blank :], calls):  # JSON tells its own end
            self._held = ""
        else:
            self._say(len(self._held))
        return False

    def _take(self, text: str, calls: list[Call]) -> bool:
        """Reads the calls of a text that begins with its tag; returns whether there are any."""
        if self._opened in self._form.fronts:
            parts = [text]
        else:  # without an end, each tag begins another call
            parts = text.split(self._opened, 1 if self._form.end else -1)[1:]
        try:
            read = [
                {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False, allow_nan=False)}
                for part in parts
                for name, arguments in self._read(part.strip())
            ]
        except (ValueError, RecursionError):
            return False
        for called in read if self._parallel else read[: 1 - self.count]:
            self.count += 1
            # Templates of Mistral take ids of nine letters and digits alone.
            calls.append({"id": secrets.token_hex(5)[:9], "type": "function", "function": called})
        return bool(read)

    def _read(self, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields names and arguments. Raises ValueError: no call."""
        if not self._form.pattern or text[:1] in ("[", "{"):
            while text:
                value, size = json.JSONDecoder().raw_decode(text)
                yield from map(_checked, value if isinstance(value, list) else [value])
                text = text[size:].lstrip().removeprefix(";").lstrip()
            return
        found = re.fullmatch(self._form.pattern, text, re.DOTALL)
        if found is None:
            raise ValueError
        if self._form.argument is None:
            yield _checked({"name": found["name"], "arguments": found["arguments"]})
            return
        properties = (self._tools.get(found["name"]) or {}).get("properties") or {}
        pairs = re.findall(self._form.argument, found["arguments"], re.DOTALL)
        yield found["name"], {key: _typed(value, properties.get(key)) for key, value in pairs}


def _unfinished(text: str, tags: Iterable[str]) -> int:
    """Counts the characters at the end of a text with which a tag may begin."""
    return max((size for tag in tags for size in range(len(tag)) if text.endswith(tag[:size])), default=0)


def _checked(value: Any) -> tuple[str, dict[str, Any]]:
    """Reads a call of JSON, whose arguments are an object or its text. Raises ValueError: it is none."""
    if isinstance(value, dict) and isinstance(name := value.get("name"), str):
        arguments = value.get("arguments", value.get("parameters"))
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if isinstance(arguments, dict):
            return name, arguments
    raise ValueError


def _typed(text: str, schema: Any) -> Any:
    """Reads an argument that is written without quotes: as text where the schema has strings, else as JSON."""
    kinds = _kinds_of(schema)
    if "string" in kinds and not (text == "null" and "null" in kinds):
        return text
    try:
        return json.loads(_PYTHON.get(text, text))
    except ValueError:
        return text


def _kinds_of(schema: Any) -> set[str]:
    """Returns the types that a JSON schema names, those of its alternatives included."""
    parts = [schema, *schema.get("anyOf", ())] if isinstance(schema, dict) else []
    named = [part.get("type") for part in parts if isinstance(part, dict)]
    return {kind for kinds in named for kind in ([kinds] if isinstance(kinds, str) else kinds or ())}
