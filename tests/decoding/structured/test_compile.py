"""Shapes of answers: what their tables allow, against plain references on the host."""

import json
import random
from typing import Any

import numpy as np
import pytest
import regex
import tiny
from letters import Letters
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from eagle3_jax.decoding.structured.compile import Compiler, Table, bytes_automaton, mask_words
from eagle3_jax.decoding.structured.params import StructuredOutputsParams as Shape
from eagle3_jax.decoding.structured.pool import CHUNK, TablePool


def fits(shape: Shape, text: str) -> bool:
    moves, ends = bytes_automaton(shape.pattern)
    state = 1
    for byte in text.encode():
        state = moves[state, byte]
    return bool(ends[state])


def halves(words: np.ndarray) -> np.ndarray:
    return words.view(np.uint16).astype(int)


class Walker:
    """Reads a table as the device does."""

    def __init__(self, table: Table, size: int) -> None:
        classes, transitions, masks = table.parts
        self.records = table.words[:classes].reshape(-1, 2)
        self.classes = halves(table.words[classes:transitions])[:size]
        self.moves = halves(table.words[transitions:masks])[: len(self.records) * table.columns].reshape(
            -1, table.columns
        )
        masks = table.words[masks:].view(np.uint32).reshape(-1, mask_words(size))
        self.masks = ((masks[:, None] >> np.arange(32, dtype=np.uint32)[:, None]) & 1).reshape(len(masks), -1)[:, :size]
        self.state, self.start = table.start, table.start

    def allowed(self) -> set[int]:
        return set(np.flatnonzero(self.masks[self.records[self.state, 0]]).tolist())

    def add(self, token: int) -> None:
        self.state = self.moves[self.state, self.classes[token]]


PATTERNS = [
    "(?:ab|a)(?:c|bcd)*",
    "a|ab|abc",
    "[a-h]{2,5}k?",
    "(?:abc)+d",
    "(?:ab){3}|(?:ba){2}e*",
    "[^a]b*",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_table_allows_what_a_text_may_go_on_with(pattern):
    tokenizer = Letters()
    table = Compiler(tokenizer, 40, {23}).table(Shape(regex=pattern))
    for seed in range(20):
        walker, text, rng = Walker(table, 40), "", random.Random(seed)
        for _ in range(12):
            names = dict(enumerate(tokenizer.names))
            expected = {
                t for t, name in names.items() if t != 23 and regex.fullmatch(pattern, text + name, partial=True)
            }
            expected |= {23} if regex.fullmatch(pattern, text) else set()
            assert walker.allowed() == expected
            forced = walker.records[walker.state, 1]
            if forced >= 0:
                ways = {tokenizer.names[t] for t in expected}
                assert forced in expected and all(
                    tokenizer.names[forced].startswith(way) for way in ways if len(way) == 1
                )
            token = rng.choice(sorted(expected))
            if token == 23:
                break
            walker.add(token)
            text += tokenizer.names[token]


def test_the_end_is_allowed_where_the_shape_may_end_alone():
    walker = Walker(Compiler(Letters(), 40, {23, 39}).table(Shape(choice=["a", "ab"])), 40)
    seen = [walker.allowed() & {23, 39}]
    for token in (0, 1):
        walker.add(token)
        seen.append(walker.allowed())
    assert seen == [set(), {23, 39, 1}, {23, 39}]


def test_an_added_token_is_its_text_and_a_special_one_is_none():
    """As Qwen's <tool_call>, a token of its own in the vocabulary."""
    tokenizer: Any = tiny.make_byte_tokenizer(None, eos_token="<|end|>", additional_special_tokens=["<|call|>"])
    tokenizer.add_tokens(["<tool_call>"])
    end, added = tokenizer.convert_tokens_to_ids(["<|end|>", "<tool_call>"])
    shape = Shape(regex="<(?:tool_call>|.call.>)?")
    walker = Walker(Compiler(tokenizer, len(tokenizer), {end}).table(shape), len(tokenizer))
    assert walker.allowed() == {tokenizer.convert_tokens_to_ids("<"), added}
    walker.add(added)
    assert walker.allowed() == {end}


def test_a_shape_begins_behind_a_text():
    """Anything goes before, the beginnings of that text too."""
    tokenizer = Letters()
    walker = Walker(Compiler(tokenizer, 40, {23}).table(Shape(choice=["b"], after="aac")), 40)
    for letter in "caakaaac":
        assert walker.allowed() == {*range(40)}
        walker.add(tokenizer.names.index(letter))
    assert walker.allowed() == {1}
    walker.add(1)
    assert walker.allowed() == {23}


def test_a_table_of_500_states_over_152_thousand_tokens_takes_20_mb_at_most():
    rng, names = random.Random(0), {}
    letters = pre_tokenizers.ByteLevel.alphabet()
    for letter in sorted(letters):
        names[letter] = len(names)
    words = [*"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJ", "Ġ", "Ċ", *'0123456789{}[]":,.-']
    while len(names) < 152_000:
        names.setdefault("".join(rng.choices(words, k=rng.randint(2, 9))), len(names))
    backend = Tokenizer(models.BPE(names, []))
    backend.decoder = decoders.ByteLevel()
    compiler = Compiler(Letters(backend, list(names)), len(names), {0})
    fields = {
        f"{name}{i}": {"type": kind}
        for i in range(7)
        for name, kind in {"title": "string", "amount": "number", "open": "boolean", "numbers": "integer"}.items()
    }
    shape = Shape(json={"type": "object", "properties": fields, "required": list(fields)})
    moves, _ = bytes_automaton(shape.pattern)
    table = compiler.table(shape)
    assert len(moves) > 500
    assert table.words.nbytes <= 20e6, table.words.nbytes


def test_constraints_share_the_pool_and_give_way():
    size = CHUNK * 3 // 2  # two chunks each
    a, b, c = (Table(np.zeros(size, np.int32), 1, 1, (0, 0, 0)) for _ in range(3))
    pool = TablePool(6 * CHUNK, 100)
    assert pool.most == 5 * CHUNK
    assert pool.hold(a) == (CHUNK, True) and pool.hold(b) == (3 * CHUNK, True) and pool.hold(a) == (CHUNK, False)
    assert pool.hold(c) is None  # all are needed
    pool.release(a)
    assert pool.hold(c) is None
    pool.release(b)
    assert pool.hold(c) == (3 * CHUNK, True)
    pool.release(a)
    assert pool.hold(b) == (CHUNK, True)
    assert pool.empty().hold(c) == (CHUNK, True)


NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["v", "next"],
}


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        (
            {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["b"]},
            ['{"b":"x"}', '{"a": -10, "b": "é\\n"}', '{"a":1,"b":""}'],
            ["{}", '{"a":1}', '{"b":"x","a":1}', '{"b":"\n"}', '{"b":"x"'],
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"const": 1}, "b": {"enum": ["x.y", None]}, "c": {"type": "boolean"}},
            },
            ["{}", '{"b":"x.y"}', '{"a":1, "c":true}', '{"a":1,"b":null,"c":false}'],
            ["{,}", '{"b":"xzy"}', '{"a":2}'],
        ),
        (
            {"type": "integer", "minimum": -5, "maximum": 120},
            ["-5", "0", "7", "99", "120"],
            ["-6", "121", "007", "1200"],
        ),
        ({"type": "integer", "exclusiveMinimum": 9}, ["10", "99", "12345"], ["9", "0", "-10"]),
        (
            {"type": "number", "exclusiveMinimum": 0, "maximum": 10},
            ["0.5", "9.99", "10", "10.0", "9.123456"],
            ["0", "0.0", "10.1", "-1", "0.00000000000000001"],
        ),
        # float64 reads 20.00000000000000001 as 20, and 29.99999999999999999 as 30.
        (
            {"type": "number", "exclusiveMinimum": 20, "exclusiveMaximum": 30},
            ["20.000001", "29.999999"],
            ["20", "30", "20.00000000000000001", "29.99999999999999999", "20.000000"],
        ),
        ({"type": "number", "minimum": -3}, ["-3", "-2.5", "0", "1234567.5"], ["-3.1", "-4"]),
        ({"type": "number"}, ["1", "-0.5", "1e9", "2.5E-3"], ["01", ".5", "1."]),
        ({"type": "string", "pattern": r"^[A-Z]{2}\d+$"}, ['"AB12"'], ['"A12"', '"AB12 "', '"AB"']),
        ({"type": "string", "pattern": "a.c"}, ['"xxabcx"', '"abc"'], ['"ac"', '"a"c"', '"a\nc"']),
        ({"type": "string", "pattern": r'^\S+@[^@"]+\.\S+$'}, ['"a@b.c"'], ['"a@b"', '"a b@b.c"']),
        ({"type": "string", "pattern": '^"\\\\$'}, ['"\\"\\\\"'], ['""\\"', '"""']),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"é漢\\n"'], ['"a"', '"abcd"']),
        ({"type": "string", "maxLength": 500}, ['"\\"' + 'a"'[:1] * 199 + '"'], ['"' + "a" * 201 + '"']),
        ({"type": "string", "format": "date"}, ['"2024-02-28"'], ['"2024-13-01"', '"2024-02-31"']),
        ({"items": {"type": "integer"}, "minItems": 2, "maxItems": 3}, ["[1,2]", "[1, 2,3]"], ["[1]", "[1,2,3,4]"]),
        ({"prefixItems": [{"type": "null"}], "items": {"type": "integer"}}, ["[null]", "[null,2]"], ["[]", "[1]"]),
        ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
        ({"type": "object", "additionalProperties": {"type": "null"}}, ["{}", '{"x":null, "y":null}'], ['{"x":1}']),
        ({"type": ["string", "null"]}, ['"a"', "null"], ["1"]),
        (True, ["1", '{"a":[1]}', "[[],{}]"], ['{"a":[[1]]}', "nul"]),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["1", '"a"'], ["null"]),
        (
            {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
            ['{"v":1,"next":null}', '{"v":1,"next":{"v":2,"next":null}}'],
            ['{"v":1}'],
        ),
    ],
)
def test_a_schema_allows_its_values_alone(schema, yes, no):
    shape = Shape(json=schema)
    assert [fits(shape, text) for text in yes] == [True] * len(yes)
    assert [fits(shape, text) for text in no] == [False] * len(no)


def test_json_object_is_three_containers_deep():
    deep: Any = 1
    for count in range(1, 5):
        deep = {"a": deep} if count % 2 else [deep]
        if count % 2:
            assert fits(Shape(json_object=True), json.dumps(deep, separators=(",", ":"))) == (count <= 3)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "object", "patternProperties": {"a": True}}, "json.patternProperties"),
        ({"type": "array", "items": {"type": "integer", "multipleOf": 2}}, "json.items.multipleOf"),
        ({"type": "array", "uniqueItems": True}, "json.uniqueItems"),
        ({"properties": {"a": {"type": "text"}}}, "json.properties.a.type"),
        ({"type": "string", "format": "color"}, "json.format"),
        ({"type": "string", "pattern": "(?=a)"}, "structured"),
        ({"type": "string", "pattern": r"a\b"}, "json.pattern"),
        ({"type": "string", "pattern": "^a|b$"}, "json.pattern"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "json.maxLength"),
        ({"type": "number", "minimum": 0.5}, "json.minimum"),
        ({"type": "number", "exclusiveMinimum": 10**12}, "json.exclusiveMinimum"),
        ({"allOf": [{"type": "object"}, {"required": ["a"]}]}, "json.allOf"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "json.oneOf"),
        ({"anyOf": [{"type": "integer"}], "minimum": 3}, "json.minimum"),
        ({"$ref": "http://a"}, "json.$ref"),
        ({"required": ["a"]}, "json.required"),
        ({"type": "string", "minLength": 5, "maxLength": 4}, "json.maxLength"),
        ({"not": {}}, "json.not"),
        ({"type": "array", "minItems": 201}, "json.minItems"),
        ("{", "json"),
        (False, "json"),
    ],
)
def test_a_part_without_a_regular_form_is_refused_by_its_place(schema, place):
    with pytest.raises(ValueError) as found:
        bytes_automaton(Shape(json=schema).pattern)
    assert str(found.value).startswith(f"{place}: got") and "expected" in str(found.value)
