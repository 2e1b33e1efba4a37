"""Tokenises conversations and masks the assistant's tokens, for any chat template.

Most templates lack `{% generation %}` marks. The conversation is rendered several times instead, and the assistant's
spans are found by comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32, UInt8

from eagle3_jax.models.chat_template import THOUGHT_END, Tools, render, special_tokens, tokenize

Messages = list[dict[str, Any]]

# Placeholder to locate a content in the rendered text: one word that no template and no text contains.
_SENTINEL = "qzxsentinelxzq"


def user_opening_ids(tokenizer: Any, messages: Sequence[dict[str, Any]] = (), opening: str = "") -> list[int]:
    """Returns the ids up to the `opening` of the user's next content; a target that continues them prompts itself."""
    turn = {"role": "user", "content": opening + _SENTINEL}
    text = render(tokenizer, [*messages, turn], generation_prompt=False)
    start = text.find(_SENTINEL)
    if start < 0:
        raise ValueError("chat template: got no user content in the rendered text, expected it unchanged")
    return tokenize(tokenizer, text[:start])


def encode(
    tokenizer: Any, messages: Messages, tools: Tools | None = None
) -> tuple[Int32[np.ndarray, " l"], UInt8[np.ndarray, " l"]]:
    """Tokenises a conversation, with at least one assistant turn, none of them first.

    Returns token ids, and a mask that is 1 on the tokens of every assistant turn, with its `reasoning_content` and
    `tool_calls` where the template renders them, and on its end-of-turn token. The template's own text (headers, the
    line break after the end of a turn) is 0.

    Raises ValueError: the template refuses the messages, or rewrites a turn so that it cannot be found; or a turn has
    no token, or every token is the assistant's.
    """
    # Templates name it either way (gpt-oss: "thinking").
    messages = [m | {"thinking": m["reasoning_content"]} if "reasoning_content" in m else m for m in messages]
    full = render(tokenizer, messages, generation_prompt=False, tools=tools)
    spans = {
        index: _assistant_span(tokenizer, messages, tools, index, full)
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
    }
    if silent := [index for index, (start, end) in spans.items() if start >= end]:
        raise ValueError(f"loss mask: got no text of assistant turn {silent[0]}, expected some")
    if tokenizer.is_fast:
        encoded = tokenizer(full, add_special_tokens=False, return_offsets_mapping=True)
        ids, mask = encoded["input_ids"], _mask_by_offsets(encoded["offset_mapping"], list(spans.values()))
    else:
        ids = tokenize(tokenizer, full)
        mask = np.zeros(len(ids), np.uint8)
        for start, end in spans.values():
            mask[len(tokenize(tokenizer, full[:start])) : len(tokenize(tokenizer, full[:end]))] = 1
    if not mask.any() or mask.all():
        share = "all" if mask.any() else "none"
        raise ValueError(f"loss mask: got {share} of {len(mask)} tokens as the assistant's, expected some but not all")
    return np.asarray(ids, np.int32), mask


def _assistant_span(tokenizer: Any, messages: Messages, tools: Tools | None, index: int, full: str) -> tuple[int, int]:
    """Finds the characters [start, end) of `full` that the assistant generates in turn `index`."""
    if index == 0:
        raise ValueError("messages: got an assistant turn first, expected a system or user turn")
    before, text = messages[:index], messages[index]["content"]

    def with_content(content: str) -> str:
        turn = {name: x for name, x in messages[index].items() if name != "tool_calls"} | {"content": content}
        turns = [*before, turn, *messages[index + 1 :]]
        return render(tokenizer, turns, generation_prompt=False, tools=tools)

    # The text after the content equals that of `full`, even if the template changes the content (strip, drop thoughts).
    # Tool calls, which templates write after the content, are left out here and so lie in front of that text.
    _, found, after = with_content(text + _SENTINEL).rpartition(_SENTINEL)
    if not found or not full.endswith(after):
        raise ValueError(f"chat template: rewrites assistant turn {index}, expected its content unchanged")
    content_end = len(full) - len(after)

    opening = render(tokenizer, before, generation_prompt=True, tools=tools)
    if full.startswith(opening) and opening != render(tokenizer, before, generation_prompt=False, tools=tools):
        return len(opening), content_end + _end_of_turn(tokenizer, after)
    # Without a generation prompt, or with a history that renders differently now, the turn begins with its content, or
    # with the white space before it ("[/INST] content").
    head, found, _ = with_content(_SENTINEL + text).partition(_SENTINEL)
    if not found:  # dropped with the thoughts behind it
        thoughts, end, answer = text.rpartition(THOUGHT_END)
        head, found, _ = with_content(thoughts + end + _SENTINEL + answer).partition(_SENTINEL)
    if not found or not full.startswith(head):
        raise ValueError(f"chat template: rewrites the text before assistant turn {index}, expected it unchanged")
    start = len(opening) if head.startswith(opening) and not head[len(opening) :].strip() else len(head)
    return start, content_end + _end_of_turn(tokenizer, after)


def _end_of_turn(tokenizer: Any, after: str) -> int:
    """Counts the characters of `after` up to the end of the end-of-turn token; 0 if no special token comes first."""
    stripped = after.lstrip()
    tokens = special_tokens(tokenizer).values()
    token = max((token for token in tokens if stripped.startswith(token)), key=len, default=None)
    return 0 if token is None else len(after) - len(stripped) + len(token)


def _mask_by_offsets(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> UInt8[np.ndarray, " l"]:
    """Masks the tokens that overlap a span.

    Byte-level tokenizers trim white space off their offsets (to nothing for "\\n\\n"), so each token is assumed to
    begin at the end of the previous one.
    """
    mask = np.zeros(len(offsets), np.uint8)
    for start, end in spans:
        previous = 0
        for position, (token_start, token_end) in enumerate(offsets):
            mask[position] |= token_end > start and min(previous, token_start) < end
            previous = max(previous, token_end)
    return mask
