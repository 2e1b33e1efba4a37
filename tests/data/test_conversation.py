"""Training sequences: sampled ids exactly as they were drawn, text with the marks of its template."""

import json
from typing import Any

import numpy as np
import pytest
import tiny

from eagle3_jax.data import chat
from eagle3_jax.data.conversation import Rejected, read_conversation
from eagle3_jax.models.chat_template import prompt_ids

TOKENIZER = tiny.make_tokenizer()
END = TOKENIZER.eos_token_id
# Drops the thoughts of every turn but the last.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def letters(text: str) -> list[int]:
    """The same text in other tokens: a token a letter."""
    return [token for letter in text for token in ids(letter)]


def line(turns: list[str], answer_ids: list[list[int]] | None, truncated: bool = False) -> str:
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return json.dumps({"id": "x", "messages": messages, "truncated": truncated, "answer_ids": answer_ids})


def read(text: str, max_length: int = 512, tokenizer: object = TOKENIZER) -> list[tuple[str, list[int], list[int]]]:
    """(name, token ids, those of them that count in the loss)."""
    found = read_conversation(text, tokenizer, max_length)
    return [(c.name, c.token_ids.tolist(), c.token_ids[c.loss_mask == 1].tolist()) for c in found]


def prompt(*turns: str, tokenizer: object = TOKENIZER) -> list[int]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return prompt_ids(tokenizer, messages)


def test_an_answer_is_trained_on_as_it_was_sampled():
    """Also where its text would be tokenised otherwise, has a special token without text, or was cut."""
    whole = [*ids(" bird cloud"), END], [*letters(" bird cloud"), END], [*ids(" bird"), 1, *ids(" cloud"), END]
    for answer in (*whole, letters(" bird cl")):
        text, cut = TOKENIZER.decode(answer, skip_special_tokens=True), answer[-1] != END
        assert read(line(["apple", str(text)], [answer], truncated=cut)) == [("x", prompt("apple") + answer, answer)]
    retokenised, _ = chat.encode(TOKENIZER, json.loads(line(["apple", " bird cloud"], None))["messages"])
    assert retokenised[: len(prompt("apple"))].tolist() == prompt("apple")
    assert letters(" bird cloud") != ids(" bird cloud")


def test_turns_whose_history_is_rendered_as_it_was_sampled_are_one_sequence():
    first, second = [*ids(" bird"), END], [*letters(" egg"), END]
    whole = prompt("apple", " bird", "cloud") + second
    assert read(line(["apple", " bird", "cloud", " egg"], [first, second])) == [("x", whole, first + second)]
    assert whole[: len(prompt("apple")) + len(first)] == prompt("apple") + first


def test_turns_whose_history_was_sampled_otherwise_are_sequences_of_their_own():
    """What the target attended to in its second turn was the first one's text, tokenised: that is the context."""
    first, second, third = [*letters(" bird"), END], [*ids(" egg"), END], [*ids(" garden"), END]
    turns = ["apple", " bird", "cloud", " egg", "fish", " garden"]
    later = prompt(*turns[:5]) + third
    assert read(line(turns, [first, second, third])) == [
        ("x/0", prompt("apple") + first, first),
        ("x/1", later, second + third),  # its own second and third turn agree
    ]
    # The history is context: counted are the answers at their places, not wherever their tokens stand.
    (_, conversation) = read_conversation(line(turns, [first, second, third]), TOKENIZER, 512)
    start = len(prompt(*turns[:3]))
    assert not conversation.loss_mask[:start].any() and conversation.loss_mask[start : start + len(second)].all()


def test_thoughts_that_the_template_drops_were_sampled_and_are_trained_on():
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = THINKING
    first, second = [*ids("tree</think> bird"), END], [*ids("moon</think> egg"), END]
    turns = ["apple", "tree</think> bird", "cloud", "moon</think> egg"]
    assert read(line(turns, [first, second]), tokenizer=tokenizer) == [
        ("x/0", prompt("apple", tokenizer=tokenizer) + first, first),
        ("x/1", prompt("apple", " bird", "cloud", tokenizer=tokenizer) + second, second),
    ]


def test_sequences_are_cut_and_left_out_where_no_answer_remains():
    first, second = [*letters(" bird"), END], [*ids(" egg"), END]
    text = line(["apple", " bird", "cloud", " egg"], [first, second])
    start, end = len(prompt("apple")), len(prompt("apple") + first)
    assert read(text, end - 2) == [("x", prompt("apple") + first[:-2], first[:-2])]
    assert [name for name, *_ in read(text, len(prompt("apple", " bird", "cloud")) + 1)] == ["x/0", "x/1"]
    with pytest.raises(Rejected, match=rf"no answer within extract\.max_length = {start} tokens"):
        read(text, start)


def test_given_text_is_tokenised_and_cut():
    """Text that was cut off ends where the target stopped."""
    start = prompt("apple")
    assert read(line(["apple", " bird"], None)) == [
        ("x", [*start, *ids(" bird"), END, *ids("\n")], [*ids(" bird"), END])
    ]
    assert read(line(["apple", " bird"], None, truncated=True)) == [("x", start + ids(" bird"), ids(" bird"))]
    assert read(line(["apple", " bird cloud"], None), len(start) + 1) == [("x", start + ids(" bird"), ids(" bird"))]
    with pytest.raises(Rejected, match="got none of .* tokens as the assistant's"):
        read(line(["apple"], None))


def learned(line: str, tokenizer: Any) -> list[list[str]]:
    """The text of each run of tokens in the mask, for each sequence."""
    found = []
    for sequence in read_conversation(line, tokenizer, 1000):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], sequence.loss_mask, [0]]))).reshape(-1, 2)
        found.append([str(tokenizer.decode(sequence.token_ids[start:end])) for start, end in edges])
    return found


def _history(answer: str, opening: str) -> str:
    """A template of two roles: `answer` renders an assistant turn `m`, `opening` follows a prompt."""
    one = f"{{% if m.role == 'user' %}}<U>{{{{ m.content }}}}{{% else %}}{answer}{{% endif %}}"
    return f"{{% for m in messages %}}{one}{{% endfor %}}{{% if add_generation_prompt %}}{opening}{{% endif %}}"


ANSWER = "m.content.split('</think>')[-1]"
MOVED = (  # as Qwen 3's: the thoughts of a content are those of the field
    "{% set thoughts = m.reasoning_content or (m.content.split('</think>')[0].split('<think>')[-1].strip('\n')"
    " if '</think>' in m.content else '') %}"
    "<A>{% if loop.last %}<think>\n{{ thoughts }}\n</think>\n\n{% endif %}{{ ANSWER.lstrip('\n') }}<E>"
).replace("ANSWER", ANSWER)
# What the templates of these models do with thoughts, and what is learned of two answers that have some in their
# content, with and without "<think>", and as `reasoning_content`.
THINKERS = {
    "deepseek-r1": (  # no thoughts at all
        _history(f"<A>{{{{ {ANSWER} }}}}<E>", "<A><think>\n"),
        [["\n\nfive<E>", "yes<E>"]],
        [["five<E>", "yes<E>"]],
    ),
    "deepseek-v3.1": (
        _history(f"<A></think>{{{{ {ANSWER} }}}}<E>", "<A></think>"),
        [["\n\nfive<E>", "yes<E>"]],
        [["five<E>", "yes<E>"]],
    ),
    "qwq": (  # the last answer as it stands
        _history(f"<A>{{{{ m.content if loop.last else {ANSWER}.lstrip('\n') }}}}<E>", "<A><think>\n"),
        [["a sum\n</think>\n\nfive<E>"], ["checked</think>yes<E>"]],
        [["five<E>", "yes<E>"]],
    ),
    "qwen3": (
        _history(MOVED, "<A>"),
        [["<think>\na sum\n</think>\n\nfive<E>"], ["<think>\nchecked\n</think>\n\nyes<E>"]],
        [["<think>\na sum\n</think>\n\nfive<E>"], ["<think>\nchecked\n</think>\n\nyes<E>"]],
    ),
    "qwen3-thinking": (
        _history(MOVED, "<A><think>\n"),
        [["a sum\n</think>\n\nfive<E>"], ["checked\n</think>\n\nyes<E>"]],
        [["a sum\n</think>\n\nfive<E>"], ["checked\n</think>\n\nyes<E>"]],
    ),
    "plain": (  # knows no thoughts, keeps the text
        _history("<A>{{ m.content }}<E>", "<A>"),
        [["<think>\na sum\n</think>\n\nfive<E>", "checked</think>yes<E>"]],
        [["five<E>", "yes<E>"]],
    ),
}


@pytest.mark.parametrize("model", THINKERS)
def test_thoughts_in_a_content_are_learned_as_the_template_has_them(model):
    template, inside, apart = THINKERS[model]
    tokenizer = tiny.make_byte_tokenizer(template, eos_token="<E>", additional_special_tokens=["<U>", "<A>"])

    contents = [{"content": "<think>\na sum\n</think>\n\nfive"}, {"content": "checked</think>yes"}]
    fields = [{"reasoning_content": "a sum", "content": "five"}, {"reasoning_content": "checked", "content": "yes"}]
    for answers, expected in ((contents, inside), (fields, apart)):
        messages = [{"role": "user", "content": "2 + 3?"}, answers[0], {"role": "user", "content": "Sure?"}, answers[1]]
        messages = [{"role": "assistant"} | message for message in messages]
        line = json.dumps({"id": "a", "messages": messages, "truncated": False, "answer_ids": None})
        assert learned(line, tokenizer) == expected


def test_a_turn_without_a_token_in_the_mask_is_a_reject():
    """One whose place in the text cannot be told, and one of which nothing is rendered."""
    unknown = _history("<A>{{ m.content.split('[end]')[-1] }}<E>", "<A><think>\n")
    for template, answer, reason in (
        (unknown, "a sum[end]five", "rewrites the text before assistant turn 1"),
        ("{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}", "", "no text of assistant turn 1"),
    ):
        tokenizer = tiny.make_byte_tokenizer(template, eos_token="<E>", additional_special_tokens=["<U>", "<A>"])
        with pytest.raises(Rejected, match=reason):
            read(line(["2 + 3?", answer, "Sure?", "yes"], None), tokenizer=tokenizer)
