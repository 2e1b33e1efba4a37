"""Duplicates: what counts as one, and that the first stays."""

import pytest

from eagle3_jax.data import filters
from eagle3_jax.data.duplicates import Duplicates, signature

PASSAGE = (
    "The lighthouse on the northern cape was built of grey stone and stood for a hundred years before the sea took the "
    "ground from under it one winter night while the keeper and his daughter were safe in the village below the hill."
)
CHINESE = "请用简单的话解释什么是人工智能以及它如何改变我们每天的生活和工作方式并举出三个例子说明"


def system(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": text}]


def found(*prompts: str | list[dict[str, str]], near: float = 0.8) -> list[str | None]:
    """The reason to drop each prompt in turn, or None; a text is the user's."""
    duplicates, reasons = Duplicates(near), []
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        reasons.append(duplicates.check(filters.content_hash(messages), lambda: signature(messages, near)))  # noqa: B023
    return reasons


def test_exact_and_near_duplicates():
    """Case and space count for neither, word order does; templates with other numbers and a common beginning stay."""
    assert found("Why is the sky  blue?", "why is the\nSKY blue?", system("Why is the sky blue?")) == [
        None,
        "exact duplicate",
        None,
    ]
    beginning = " ".join(PASSAGE.split()[:12]) + " fell, and nobody knows why it did so"
    others = PASSAGE.replace("one winter", "one summer"), " ".join(reversed(PASSAGE.split())), beginning
    assert found(PASSAGE, *others) == [None, "near duplicate", None, None]
    assert found(CHINESE, CHINESE + "吧", "写一首关于秋天的短诗并说明它的意思") == [None, "near duplicate", None]
    apples = (f"Anna has {a} apples and buys {b} more. How many does she have?" for a, b in [(3, 4), (5, 7), (8, 2)])
    assert found(*apples) == [None] * 3


@pytest.mark.parametrize("near", [0.01, 0.5, 0.95, 1.0])
def test_any_threshold(near):
    same_words, changed = PASSAGE.replace(" a ", ", a "), PASSAGE.replace("one winter", "one summer")  # Jaccard 0.86
    near_duplicate = "near duplicate" if near < 0.86 else None
    assert found(PASSAGE, same_words, changed, near=near) == [None, "near duplicate", near_duplicate]


def test_a_shared_system_prompt_makes_nothing_alike():
    """Behind hundreds of words the questions decide. Under another system prompt none is the same."""

    def asked(question: str, under: str = 5 * PASSAGE) -> list[dict[str, str]]:
        return [*system(under), {"role": "user", "content": question}]

    questions = [asked("Who kept the lamp?"), asked("Where did the village stand?"), asked(PASSAGE)]
    changed = asked(PASSAGE.replace("one winter", "one summer"))
    assert found(*questions, changed, asked(PASSAGE, "Be brief.")) == [None, None, None, "near duplicate", None]
    assert len({filters.opening_hash(messages) for messages in questions}) == 3


def test_every_second_of_a_chain_stays():
    """What went takes nothing with it: each is near its neighbours alone."""
    words, chain = [f"word{number}" for number in range(60)], []
    for step in range(20):
        words[3 * step] = f"changed{step}"
        chain.append(" ".join(words))
    assert found(*chain, near=0.85) == [None, "near duplicate"] * 10
