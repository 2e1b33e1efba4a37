"""Calls of functions, as the models' published templates write them, read from whole texts and from every cut."""

import json
import pathlib
import re
from typing import Any

import outlines_core
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from eagle3_jax.serve.tools import FORMS, Reader, form_of, written

SCHEMAS: dict[str, Any] = {
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "number"}}},
    "say": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "to": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "loud": {"type": ["boolean", "null"]},
            "tags": {"type": "array"},
        },
    },
}
ADD = ("add", {"a": 2, "b": -3.5})
SAY = ("say", {"text": 'Zoë said "</x>"\n<b>', "to": None, "loud": True, "tags": ["é", {"n": 1}]})
_ADD, _SAY = json.dumps(ADD[1]), json.dumps(SAY[1], ensure_ascii=False)
_TEXT, _TAGS = SAY[1]["text"], json.dumps(SAY[1]["tags"], ensure_ascii=False)
# Form -> two calls in one answer.
BOTH = {
    "hermes": f'<tool_call>\n{{"name": "add", "arguments": {_ADD}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "say", "arguments": {_SAY}}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n-3.5\n</parameter>\n"
    f"</function>\n</tool_call>\n<tool_call>\n<function=say>\n<parameter=text>\n{_TEXT}\n</parameter>\n"
    f"<parameter=to>\nnull\n</parameter>\n<parameter=loud>\nTrue\n</parameter>\n<parameter=tags>\n{_TAGS}\n"
    "</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>b</arg_key>\n"
    f"<arg_value>-3.5</arg_value>\n</tool_call>\n<tool_call>say\n<arg_key>text</arg_key>\n<arg_value>{_TEXT}"
    "</arg_value>\n<arg_key>to</arg_key>\n<arg_value>null</arg_value>\n<arg_key>loud</arg_key>\n<arg_value>true"
    f"</arg_value>\n<arg_key>tags</arg_key>\n<arg_value>{_TAGS}</arg_value>\n</tool_call>",
    "llama3_json": f'{{"name": "add", "parameters": {_ADD}}}; {{"name": "say", "parameters": {_SAY}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "add", "arguments": {_ADD}}}, {{"name": "say", "arguments": {_SAY}}}]',
    "openai": f"<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{_ADD}<|call|>"
    f"<|start|>assistant to=functions.say<|channel|>commentary json<|message|>{_SAY}",
    "deepseek_v3": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{_ADD}\n```"
    f"<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>say\n```json\n{_SAY}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{_ADD}<｜tool▁call▁end｜>"
    f"<｜tool▁call▁begin｜>say<｜tool▁sep｜>{_SAY}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
}
ALL = [
    *BOTH.items(),
    ("llama3_json", "<|python_tag|>" + BOTH["llama3_json"]),
    ("mistral", f"[TOOL_CALLS]add[ARGS]{_ADD}[TOOL_CALLS]say[CALL_ID]a1b2c3d4e[ARGS]{_SAY}"),
    ("mistral", f"[TOOL_CALLS]add{_ADD}[TOOL_CALLS]say{_SAY}"),
]
BYTES = outlines_core.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
Calls = list[tuple[str, Any]]


def read(name: str, pieces: list[str], thought: str = "", **options: Any) -> tuple[str, Calls]:
    """Reads content and calls, and checks the thought."""
    reader, content, thoughts, found = Reader(FORMS.get(name), SCHEMAS, **options), "", "", []
    for place, piece in enumerate(pieces, 1):
        said, considered, calls = reader.add(piece, last=place == len(pieces))
        content, thoughts, found = content + said, thoughts + considered, found + calls
    assert thoughts == thought
    assert len(found) == reader.count
    assert all(len(call["id"]) == 9 and call["id"].isalnum() and call["type"] == "function" for call in found)
    return content, [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found]


def every_cut(name: str, text: str, **options: Any) -> tuple[str, Calls]:
    """Reads a text whole, in characters, and in two at every place."""
    whole = read(name, [text], **options)
    for pieces in ([*text, ""], *([text[:n], text[n:]] for n in range(1, len(text)))):
        assert read(name, pieces, **options) == whole, pieces
    return whole


@pytest.mark.parametrize(("name", "text"), ALL)
def test_calls_are_read_wherever_they_are_cut(name, text):
    assert every_cut(name, text) == ("", [ADD, SAY])
    if name != "llama3_json":
        assert every_cut(name, f"Let me see: <b>\n\n{text}\n") == ("Let me see: <b>", [ADD, SAY])
    assert every_cut(name, text, parallel=False) == ("", [ADD])


@pytest.mark.parametrize("name", BOTH)
def test_a_text_without_calls_is_content(name):
    for text in ("", " ", "No calls.\n", "Use {x} or [1], a<b and <tool or <|start or [TOOL", "  {", "<", "a <｜tool"):
        assert every_cut(name, text) == (text, [])


@pytest.mark.parametrize("name", BOTH)
def test_a_call_that_was_cut_off_has_none(name):
    text = BOTH[name]
    first = text.index("add") + 3
    assert every_cut(name, text[:first]) == (text[:first], [])
    content, calls = every_cut(name, text[: text.index("say")])
    assert calls in ([ADD], []) and (not content if calls else content == text[: text.index("say")])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": }}\n</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 100_000),
        ("llama3_json", '{"name": "Zoë", "age": 3}'),
        ("llama3_json", 'So: {"name": "add", "parameters": {}}'),
        ("qwen3_coder", "<tool_call>\nadd(2)\n</tool_call>"),
        ("mistral", "[TOOL_CALLS]add 2"),
        ("openai", "<|start|>assistant<|channel|>commentary to=functions.add<|message|>a = 2"),
    ],
)
def test_what_is_no_call_is_content(name, text):
    assert read(name, [text]) == read(name, [*text]) == (text, [])


def test_arguments_may_hold_the_tags_of_calls():
    text = BOTH["hermes"].replace("</x>", "</tool_call><tool_call></tool_call>")
    _, (_, (_, arguments)) = every_cut("hermes", text)
    assert arguments["text"] == _TEXT.replace("</x>", "</tool_call><tool_call></tool_call>")
    text = BOTH["qwen3_coder"].replace("</x>", "</tool_call>")
    assert every_cut("qwen3_coder", text)[1][1][1]["text"] == _TEXT.replace("</x>", "</tool_call>")


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45", "deepseek_v3"])
def test_thoughts_are_told_apart_and_hold_no_calls(name):
    thought = f"I could say {BOTH[name]}.\n"
    text = f"{thought}</think>\n\n{BOTH[name]}"
    assert every_cut(name, text, thinks=True, thought=thought) == ("", [ADD, SAY])
    assert every_cut(name, f"<think>{text}", thought=thought) == ("", [ADD, SAY])
    assert every_cut(name, f"{thought}</thi", thinks=True, thought=f"{thought}</thi") == ("", [])
    assert every_cut("none", '<think>a</think>{"a": 1}', thought="a") == ('{"a": 1}', [])
    assert every_cut("none", '{"a": "<think>"}') == ('{"a": "<think>"}', [])


OBJECTS = {name: schema | {"required": [*schema["properties"]][:2]} for name, schema in SCHEMAS.items()}
COUNT = {"type": "object", "properties": {"n": {"type": "integer"}}}
OBJECTS["say"]["properties"]["tags"] = {"type": "array", "items": {"anyOf": [{"type": "string"}, COUNT]}}
LISTS = f'[{{"name": "add", "arguments": {_ADD}}}, {{"name": "say", "arguments": {_SAY}}}]'


@pytest.mark.parametrize("name", FORMS)
def test_calls_that_have_to_be_made_are_written_as_the_model_writes_them(name):
    """The regex holds what is read, and nothing else; where special tokens cannot be written, a list of JSON."""
    text = LISTS if name in ("openai", "mistral") else BOTH[name].replace("True", "true")
    several, one = (re.compile(written(FORMS[name], OBJECTS, parallel)) for parallel in (True, False))
    assert several.fullmatch(text) and not one.fullmatch(text) and every_cut(name, text) == ("", [ADD, SAY])
    assert re.fullmatch(written(FORMS[name], {"say": OBJECTS["say"]}, True), text) is None
    for wrong in (text.replace("-3.5", '"x"'), text.replace("add", "sub"), text[:-1], f"{text} ", "Hello"):
        assert not several.fullmatch(wrong), wrong
    outlines_core.Index(written(FORMS[name], OBJECTS, True), BYTES)  # Rust's syntax


@pytest.mark.parametrize("text", ["", "a<", "</", "<</parameter", "a</parameter >", "</p>", "<</<//</param</parameter"])
def test_a_text_without_quotes_is_any_without_its_end(text):
    tools = {"say": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}}
    regex = written(FORMS["qwen3_coder"], tools, parallel=False)
    call = "<tool_call>\n<function=say>\n<parameter=text>\n{}\n</parameter>\n</function>\n</tool_call>"
    assert re.fullmatch(regex, call.format(text))
    assert not re.fullmatch(regex, call.format(f"{text}</parameter>"))
    assert every_cut("qwen3_coder", call.format(text)) == ("", [("say", {"text": text})])


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, "properties.a.uniqueItems"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
    ],
)
def test_a_part_of_a_schema_without_a_regex_is_named(schema, named):
    with pytest.raises(ValueError, match=rf"^tools\.add\.parameters\.{named}: got .*, expected"):
        written(FORMS["hermes"], {"add": schema}, parallel=True)
    unquoted = {"type": "object", "properties": {"a": {"type": "string", "minLength": 2}}}
    with pytest.raises(ValueError, match=r"^tools\.add\.parameters\.properties\.a: got \['minLength'\], expected of"):
        written(FORMS["glm45"], {"add": unquoted}, parallel=True)


def test_a_call_without_arguments():
    assert read("glm45", ["<tool_call>add\n</tool_call>"]) == ("", [("add", {})])
    assert read("qwen3_coder", ["<tool_call>\n<function=add>\n</function>\n</tool_call>"]) == ("", [("add", {})])


@pytest.mark.slow
@examples(200)
@given(st.data())
def test_any_text_is_the_same_in_any_pieces(data):
    name = data.draw(st.sampled_from(list(BOTH)))
    form = FORMS[name]
    parts = [*form.starts, form.end or "}", "<think>", "</think>", "{", "[", "\n", " x", BOTH[name]]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=6)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    thinks = data.draw(st.booleans())
    whole = Reader(form, SCHEMAS, thinks=thinks).add(text, last=True)
    assert read(name, pieces, thinks=thinks, thought=whole[1]) == read(name, [text], thinks=thinks, thought=whole[1])


GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden/templates.json").read_text())


def test_qwen_3_s_own_template_writes_what_is_read():
    (call, _) = GOLDEN["families"]["qwen3"]["rendered"]["calls"]["said"]
    found = every_cut("hermes", call.removesuffix("<|im_end|>"), thought="\nA sum.\n")
    assert found == ("", [("add", {"a": 2, "b": 3})])


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{'<|start|>assistant<|channel|>analysis'}}{{'to=functions.' + name}}", "openai"),
        ("<tool_call>{name}<arg_key>k</arg_key><arg_value>", "glm45"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=", "qwen3_coder"),
        ('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}', "hermes"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral"),
        ("<｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n' + '```json'", "deepseek_v3"),
        ("<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'", "deepseek_v31"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}.', "llama3_json"),
        ("<seed:tool_call>\n<function=", None),
        ("<|im_start|>{{ message.content }}", None),
    ],
)
def test_a_template_tells_its_form(template, name):
    assert form_of(template) == (FORMS[name] if name else None)
