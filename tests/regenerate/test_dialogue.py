"""A dialogue on its way to a conversation: what goes with it, and what is counted."""

from __future__ import annotations

from typing import Any

from eagle3_jax.regenerate.dialogue import Answer, Counts, Dialogue

PROMPT: dict[str, Any] = {
    "id": "code-1",
    "category": "code",
    "source": "jsonl:in.jsonl",
    "license": "mit",
    "messages": [{"role": "user", "content": "Hi"}],
}


def answered(prompt: dict[str, Any], *lengths: int) -> Dialogue:
    dialogue = Dialogue.begin(prompt)
    for turn, length in enumerate(lengths):
        dialogue.take(Answer(prompt["id"], turn, "Hello.", [7] * length, truncated=False))
    return dialogue


def test_where_a_prompt_comes_from_goes_to_its_conversation():
    record = answered(PROMPT, 3).conversation()
    assert (record["source"], record["license"], record["answer_ids"]) == ("jsonl:in.jsonl", "mit", [[7, 7, 7]])
    plain = {name: value for name, value in PROMPT.items() if name not in ("source", "license")}
    assert "license" not in answered(plain, 3).conversation(), "prompts of earlier versions have neither"
    given = PROMPT | {"messages": [*PROMPT["messages"], {"role": "assistant", "content": "Ho."}], "truncated": False}
    assert Dialogue.begin(given).conversation()["license"] == "mit"


def test_lengths_of_answers_are_counted_by_category():
    counts = Counts()
    for prompt, length in ((PROMPT, 1), (PROMPT, 64), (PROMPT, 65), (PROMPT | {"category": "chat"}, 3)):
        counts.add(answered(prompt, length))
    assert counts.summary()["answer_lengths"] == {"code": {"1": 1, "64": 1, "128": 1}, "chat": {"4": 1}}
