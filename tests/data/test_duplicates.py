"""Duplicates: what counts as one, and that the first stays."""

import random

import pytest

from eagle3_jax.data import filters
from eagle3_jax.data.duplicates import Duplicates

PASSAGE = (
    "The lighthouse on the northern cape was built of grey stone and stood for a hundred years before the sea took the "
    "ground from under it one winter night while the keeper and his daughter were safe in the village below the hill."
)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_exact_duplicates_ignore_case_and_space():
    duplicates = Duplicates(near=0.8)
    assert duplicates.check(user("Why is the sky  blue?")) is None
    assert duplicates.check(user("why is the\nSKY blue?")) == "exact duplicate"
    assert duplicates.check([{"role": "system", "content": "Why is the sky blue?"}, *user("Why?")]) is None


def test_near_duplicates():
    duplicates = Duplicates(near=0.8)
    assert duplicates.check(user(PASSAGE)) is None
    assert duplicates.check(user(PASSAGE.replace("one winter", "one summer"))) == "near duplicate"
    assert duplicates.check(user(" ".join(reversed(PASSAGE.split())))) is None
    assert duplicates.check(user(" ".join(PASSAGE.split()[:12]) + " fell, and nobody knows why it did so")) is None


@pytest.mark.parametrize("near", [0.01, 0.5, 0.95, 1.0])
def test_any_threshold(near):
    duplicates = Duplicates(near=near)
    assert duplicates.check(user(PASSAGE)) is None
    assert duplicates.check(user(PASSAGE.replace(" a ", ", a "))) == "near duplicate"  # the same words
    changed = duplicates.check(user(PASSAGE.replace("one winter", "one summer")))  # Jaccard 0.86
    assert changed == ("near duplicate" if near < 0.86 else None)


def test_a_shared_system_prompt_makes_nothing_alike():
    """Behind hundreds of words the questions decide. Under another system prompt none is the same."""
    duplicates = Duplicates(near=0.8)
    system = {"role": "system", "content": 5 * PASSAGE}
    asked = [[system, *user(question)] for question in ("Who kept the lamp?", "Where did the village stand?")]
    assert [duplicates.check(messages) for messages in asked] == [None, None]
    assert duplicates.check([system, *user(PASSAGE)]) is None
    assert duplicates.check([system, *user(PASSAGE.replace("one winter", "one summer"))]) == "near duplicate"
    assert duplicates.check([{"role": "system", "content": "Be brief."}, *user(PASSAGE)]) is None
    assert len({filters.opening_hash(messages) for messages in asked}) == 2


def test_near_duplicates_in_scripts_without_spaces():
    text = "请用简单的话解释什么是人工智能以及它如何改变我们每天的生活和工作方式并举出三个例子说明"
    duplicates = Duplicates(near=0.8)
    assert duplicates.check(user(text)) is None
    assert duplicates.check(user(text + "吧")) == "near duplicate"
    assert duplicates.check(user("写一首关于秋天的短诗并说明它的意思")) is None


def test_templated_questions_with_other_numbers_stay():
    duplicates = Duplicates(near=0.8)
    for a, b in [(3, 4), (5, 7), (8, 2)]:
        assert duplicates.check(user(f"Anna has {a} apples and buys {b} more. How many does she have?")) is None


def test_duplicates_are_deterministic():
    generator = random.Random(0)
    texts = [" ".join(generator.choices(PASSAGE.split(), k=12)) for _ in range(100)]
    runs = []
    for _ in range(2):
        duplicates = Duplicates(near=0.5)
        runs.append([duplicates.check(user(text)) for text in texts])
    assert runs[0] == runs[1]
