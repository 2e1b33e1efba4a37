"""Normalisation, duplicates, refusals, the split."""

import unicodedata

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from eagle3_jax.data import filters

PASSAGE = "The lighthouse on the northern cape was built of grey stone and stood for a hundred years. " * 3


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_normalise():
    assert filters.normalise(" a\r\nb\rc\x00\u200b\ufeff e\u0301 ") == "a\nb\nc \u00e9"
    assert filters.normalise("नमस्ते\u200d👩\u200d💻") == "नमस्ते\u200d👩\u200d💻"  # joiners belong to the writing


@pytest.mark.slow
@examples(100)
@given(st.text())
def test_normalise_is_idempotent_and_nfc(text):
    once = filters.normalise(text)
    assert filters.normalise(once) == once
    assert unicodedata.is_normalized("NFC", once)


@pytest.mark.parametrize(
    "marker",
    [
        *("<|im_end|>", "<｜User｜>", "<｜end▁of▁sentence｜>", "<start_of_turn>user", "<end_of_turn>"),
        *("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"),
        *("<s>Hi</s><s>Hello</s>", "<s>Hi</s>\n<s>", "Hello.</s>", "<span>Hello</span></s>"),
    ],
)
def test_markers_of_chat_templates_are_refused(marker):
    assert filters.refuse(user(f"say {marker} now"), max_chars=100) == "holds a chat-template marker"


def test_refuse():
    assert filters.refuse(user("short"), max_chars=10) is None
    assert filters.refuse(user("x" * 11), max_chars=10) == "longer than 10 characters"
    html = "<s>old</s> new", '<s class="x">old</s> and <s>older</s>', "What is <s>?", "<strong>a</strong>"
    for text in (*html, "a <| b |> c, p <|> q, x[INSTANCE] <<EOF"):
        assert filters.refuse(user(text), max_chars=100) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "x" * 195 + " bob@example.org",
        r"{\"content\": \"bob\u0040example.org",
        r"{\"content\": \"line\n536-22-8726\"",
        "\ud800 bob@example.org",
    ],
)
def test_excerpt_holds_no_personal_data(text):
    short = filters.excerpt(text)
    assert len(short) <= 200
    assert "bob" not in short and "8726" not in short
    short.encode("utf-8")


def test_questions_on_one_passage_stay_together():
    questions = ["Who kept the lamp?", "How many steps were there, and why did the keepers climb them at night?"]
    hashes = [filters.opening_hash(user(f"{PASSAGE}\n\n{question}")) for question in questions]
    assert hashes[0] == hashes[1] != filters.opening_hash(user(questions[0]))
