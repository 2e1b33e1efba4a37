"""Normalisation, duplicates, refusals, the split."""

import hashlib
import random
import unicodedata

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from eagle3_jax.data import filters

PASSAGE = (
    "The lighthouse on the northern cape was built of grey stone and stood for a hundred years before the sea took the "
    "ground from under it one winter night while the keeper and his daughter were safe in the village below the hill."
)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_normalise():
    assert filters.normalise(" a\r\nb\rc\x00\u200b\ufeff e\u0301 ") == "a\nb\nc \u00e9"
    assert filters.normalise("नमस्ते\u200d👩\u200d💻") == "नमस्ते\u200d👩\u200d💻"  # joiners belong to the writing


@examples(100)
@given(st.text())
def test_normalise_is_idempotent_and_nfc(text):
    once = filters.normalise(text)
    assert filters.normalise(once) == once
    assert unicodedata.is_normalized("NFC", once)


def test_exact_duplicates_ignore_case_and_space():
    duplicates = filters.Duplicates(near=0.8)
    assert duplicates.check(user("Why is the sky  blue?")) is None
    assert duplicates.check(user("why is the\nSKY blue?")) == "exact duplicate"
    assert duplicates.check([{"role": "system", "content": "Why is the sky blue?"}, *user("Why?")]) is None


def test_near_duplicates():
    duplicates = filters.Duplicates(near=0.8)
    assert duplicates.check(user(PASSAGE)) is None
    assert duplicates.check(user(PASSAGE.replace("one winter", "one summer"))) == "near duplicate"
    assert duplicates.check(user(" ".join(reversed(PASSAGE.split())))) is None
    assert duplicates.check(user(" ".join(PASSAGE.split()[:12]) + " fell, and nobody knows why it did so")) is None


@pytest.mark.parametrize("near", [0.01, 0.5, 0.95, 1.0])
def test_any_threshold(near):
    duplicates = filters.Duplicates(near=near)
    assert duplicates.check(user(PASSAGE)) is None
    assert duplicates.check(user(PASSAGE.replace(" a ", ", a "))) == "near duplicate"  # the same words
    changed = duplicates.check(user(PASSAGE.replace("one winter", "one summer")))  # Jaccard 0.86
    assert changed == ("near duplicate" if near < 0.86 else None)


def test_a_shared_system_prompt_makes_nothing_alike():
    """Behind hundreds of words the questions decide. Under another system prompt none is the same."""
    duplicates = filters.Duplicates(near=0.8)
    system = {"role": "system", "content": 5 * PASSAGE}
    asked = [[system, *user(question)] for question in ("Who kept the lamp?", "Where did the village stand?")]
    assert [duplicates.check(messages) for messages in asked] == [None, None]
    assert duplicates.check([system, *user(PASSAGE)]) is None
    assert duplicates.check([system, *user(PASSAGE.replace("one winter", "one summer"))]) == "near duplicate"
    assert duplicates.check([{"role": "system", "content": "Be brief."}, *user(PASSAGE)]) is None
    assert len({filters.opening_hash(messages) for messages in asked}) == 2


def test_near_duplicates_in_scripts_without_spaces():
    text = "请用简单的话解释什么是人工智能以及它如何改变我们每天的生活和工作方式并举出三个例子说明"
    duplicates = filters.Duplicates(near=0.8)
    assert duplicates.check(user(text)) is None
    assert duplicates.check(user(text + "吧")) == "near duplicate"
    assert duplicates.check(user("写一首关于秋天的短诗并说明它的意思")) is None


def test_templated_questions_with_other_numbers_stay():
    duplicates = filters.Duplicates(near=0.8)
    for a, b in [(3, 4), (5, 7), (8, 2)]:
        assert duplicates.check(user(f"Anna has {a} apples and buys {b} more. How many does she have?")) is None


def test_duplicates_are_deterministic():
    generator = random.Random(0)
    texts = [" ".join(generator.choices(PASSAGE.split(), k=12)) for _ in range(100)]
    runs = []
    for _ in range(2):
        duplicates = filters.Duplicates(near=0.5)
        runs.append([duplicates.check(user(text)) for text in texts])
    assert runs[0] == runs[1]


def test_refuse():
    assert filters.refuse(user("short"), max_chars=10) is None
    assert filters.refuse(user("x" * 11), max_chars=10) == "longer than 10 characters"
    assert filters.refuse(user("a <| b |> c, p <|> q, x[INSTANCE] <<EOF"), max_chars=100) is None


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


def test_what_html_strikes_through_is_no_marker():
    for text in ("<s>old</s> new", '<s class="x">old</s> and <s>older</s>', "What is <s>?", "<strong>a</strong>"):
        assert filters.refuse(user(text), max_chars=100) is None


@pytest.mark.slow
def test_redact_counts_over_messages():
    messages = [{"role": "system", "content": "You serve bob@example.org."}, *user("I am ann@example.org")]
    redacted, found = filters.redact(messages)
    assert [message["content"] for message in redacted] == ["You serve <EMAIL_ADDRESS>.", "I am <EMAIL_ADDRESS>"]
    assert dict(found) == {"EMAIL_ADDRESS": 2}
    assert messages[1]["content"] == "I am ann@example.org"  # the input is left as it is


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


@examples(30)
@given(st.sets(st.text(min_size=1), min_size=3, max_size=40), st.floats(0.05, 0.95))
def test_split_is_stable_when_prompts_are_added(texts, held_out):
    hashes = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest() for text in sorted(texts)]
    whole = dict(zip(hashes, filters.split(hashes, held_out), strict=True))
    assert set(whole.values()) == {True, False}
    by_hash = {digest: int(digest[:16], 16) / 2**64 < held_out for digest in hashes}
    if set(by_hash.values()) == {True, False}:
        assert whole == by_hash


def test_split_share_and_minimum():
    hashes = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(2000)]
    assert abs(sum(filters.split(hashes, 0.1)) / 2000 - 0.1) < 0.02
    assert sorted(filters.split(hashes[:2], 0.001)) == [False, True]
    assert sorted(filters.split(hashes[:2], 0.999)) == [False, True]
    with pytest.raises(ValueError, match="got 1 usable prompts, expected at least 2"):
        filters.split(hashes[:1], 0.5)
    for held_out in (0.001, 0.999):  # prompts that begin alike stay together there too
        first, second, third = filters.split([hashes[0], hashes[1], hashes[0]], held_out)
        assert first == third != second


def test_questions_on_one_passage_stay_together():
    questions = ["Who kept the lamp?", "How many steps were there, and why did the keepers climb them at night?"]
    hashes = [filters.opening_hash(user(f"{PASSAGE}\n\n{question}")) for question in questions]
    assert hashes[0] == hashes[1] != filters.opening_hash(user(questions[0]))
