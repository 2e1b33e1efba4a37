"""Prompts of every form become the ids that training and measuring use; anything else is refused by its place."""

import types
from typing import Any

import numpy as np
import pytest

from eagle3_jax.decoding.prompt import encode


class Tokenizer:
    """A token a letter; the template writes a line a message."""

    chat_template = "a line a message"

    def apply_chat_template(self, messages: Any, *, add_generation_prompt: bool, **_: Any) -> str:
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: " * add_generation_prompt

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


def test_strings_and_messages_go_through_the_template_and_ids_stay():
    assert "".join(map(chr, encode(Tokenizer(), "Hi"))) == "user: Hi\nassistant: "
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert "".join(map(chr, encode(Tokenizer(), messages))) == "system: Be brief.\nuser: Hi\nassistant: "
    for ids in ([3, 1, 2], (3, 1, 2), np.array([3, 1, 2]), [np.int32(3), 1, np.int64(2)]):
        assert encode(Tokenizer(), ids) == [3, 1, 2]
    assert encode(Tokenizer(), []) == []


def test_places_of_ids_are_written_for_errors_alone():
    """There may be a hundred thousand of them."""

    class Name(str):
        def __format__(self, _: str) -> str:
            raise AssertionError

    for ids in ([3, 1], (3, 1), np.array([3, 1]), [np.int32(3), 1]):
        assert encode(Tokenizer(), ids, Name("prompt")) == [3, 1]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, 2.5], r"prompts\[4\]\[1\]: got 2.5, expected a token id or a message"),
        (["one", 2], r"prompts\[4\]\[0\]: got 'one', expected a token id or a message"),
        ([True], r"prompts\[4\]\[0\]: got True, expected a token id"),
        (np.array([1.0]), r"prompts\[4\]\[0\]: got .*1.0.*, expected a token id"),
        ([{"role": "user"}], r"prompts\[4\]\[0\].content: got None, expected text"),
        ([{"role": "user", "content": ["parts"]}], r"prompts\[4\]\[0\].content: got \['parts'\], expected text"),
        ([{"content": "Hi"}], r"prompts\[4\]\[0\].role: got None, expected text"),
        ([{"role": "user", "content": "Hi"}, 7], r"prompts\[4\]\[1\]: got 7 among messages"),
        ({"role": "user", "content": "Hi"}, r"prompts\[4\]: got dict, expected a string, messages or token ids"),
        (
            [{"role": "usr", "content": "Hi"}],
            r"prompts\[4\]\[0\].role: got 'usr', expected one of system, developer, us",
        ),
        ("a\ud800b", r"prompts\[4\]: got '\\ud800' at character 1, half a surrogate pair, expected text"),
        ([{"role": "user", "content": "\udc00"}], r"prompts\[4\]\[0\].content: got '\\udc00' at character 0, half"),
        (b"Hi", r"prompts\[4\]: got bytes"),
        (None, r"prompts\[4\]: got NoneType"),
    ],
)
def test_what_is_no_prompt_is_refused_by_its_place(prompt, message):
    with pytest.raises(ValueError, match=message):
        encode(Tokenizer(), prompt, "prompts[4]")


def test_a_base_model_without_a_template_takes_ids_alone():
    base = types.SimpleNamespace(chat_template=None, name_or_path="base")
    assert encode(base, [1, 2]) == [1, 2]
    with pytest.raises(ValueError, match=r"prompt: tokenizer 'base': got no chat_template, expected one"):
        encode(base, "Hi")
