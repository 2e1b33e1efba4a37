"""Converts the lines of a conversations file into training sequences of token ids.

Answers that `regenerate` sampled keep the prompt ids and the drawn ids. Tokenising the text again may give other
tokens, with other states and another most likely token.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from eagle3_jax.data import chat
from eagle3_jax.data.sources import UNSTATED
from eagle3_jax.models.chat_template import THOUGHT_END, Tools, prompt_ids


@dataclasses.dataclass(frozen=True)
class Conversation:
    """One tokenised conversation: `token_ids` int32 [L], `loss_mask` uint8 [L], and where its prompt comes from."""

    name: str
    token_ids: np.ndarray
    loss_mask: np.ndarray
    category: str = ""
    source: str = UNSTATED
    license: str = UNSTATED


class Rejected(ValueError):
    """A conversation that cannot be trained on."""


def read_conversation(line: str, tokenizer: Any, max_length: int) -> list[Conversation]:
    """Tokenises one line of a conversations file, see `regenerate.dialogue.Dialogue.conversation`.

    "answer_ids" is None where only text is known; "tools", "category", "source" and "license" may be missing. Sequences
    are cut to `max_length` tokens; those then without an answer are dropped. There is one if the rendered history
    equals the sampled tokens, else several. Raises Rejected: no token remains in the loss mask.
    """
    values = json.loads(line)
    messages, tools = values["messages"], values.get("tools")
    try:
        if values["answer_ids"] is None:
            sequences = list(_tokenised(tokenizer, messages, tools, truncated=values["truncated"]))
        else:
            sequences = list(_sampled(tokenizer, messages, tools, values["answer_ids"]))
    except ValueError as error:
        raise Rejected(str(error)) from error
    cut = [(ids[:max_length], mask[:max_length]) for ids, mask in sequences if any(mask[:max_length])]
    if not cut:
        raise Rejected(f"no answer within extract.max_length = {max_length} tokens")
    names = [values["id"]] if len(cut) == 1 else [f"{values['id']}/{number}" for number in range(len(cut))]
    origin = values.get("category", ""), values.get("source", UNSTATED), values.get("license", UNSTATED)
    return [
        Conversation(name, np.asarray(ids, np.int32), np.asarray(mask, np.uint8), *origin)
        for name, (ids, mask) in zip(names, cut, strict=True)
    ]


def _sampled(
    tokenizer: Any, messages: chat.Messages, tools: Tools | None, answers: Sequence[list[int]]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yields (token ids, loss mask) of the target's prompts and drawn answers.

    A later turn's prompt is rendered from the earlier answers' text, as at sampling. If that does not yield the drawn
    ids again (another tokenisation, thoughts that the template drops), a new sequence begins, with its history masked.
    """
    ids, mask = list[int](), list[int]()
    for index, answer in zip(_turns(messages), answers, strict=True):
        prompt = prompt_ids(tokenizer, messages[:index], tools)
        if prompt[: len(ids)] != ids:
            yield ids, mask
            mask = []
        mask = mask + [0] * (len(prompt) - len(mask)) + [1] * len(answer)
        ids = prompt + answer
    yield ids, mask


def _tokenised(
    tokenizer: Any, messages: chat.Messages, tools: Tools | None, *, truncated: bool
) -> Iterator[tuple[list[int], list[int]]]:
    """Yields (token ids, loss mask) of text.

    Templates drop the reasoning of earlier turns. Where that happens a sequence ends with its turn, reasoning included,
    and the next begins with the history as the template has it then, masked. A truncated answer loses the end-of-turn
    token that the template appends: the target did not choose it.
    """
    turns = _turns(messages)
    answers = [messages[index] for index in turns]
    if not any(answer.get("reasoning_content") or THOUGHT_END in answer["content"] for answer in answers):
        turns = [len(messages) - 1]  # one rendering holds all
    ids, mask = list[int](), list[int]()
    for index in turns:
        whole = messages if index == turns[-1] else messages[: index + 1]
        next_ids, next_mask = (x.tolist() for x in chat.encode(tokenizer, whole, tools))
        if next_ids[: len(ids)] == ids:
            mask = mask + next_mask[len(mask) :]
        else:
            yield ids, mask
            begins = int(np.flatnonzero(np.diff(np.asarray([0, *next_mask])) == 1)[-1])  # the last answer
            mask = [0] * begins + next_mask[begins:]
        end = len(next_mask) if index == turns[-1] else max(np.flatnonzero(next_mask)) + 1
        ids, mask = next_ids[:end], mask[:end]
    if truncated:
        end = int(np.flatnonzero(mask)[-1]) + 1
        last = tokenizer.added_tokens_decoder.get(int(ids[end - 1]))
        if last is not None and last.special:
            end -= 1
        ids, mask = ids[:end], mask[:end]
    yield ids, mask


def _turns(messages: chat.Messages) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]
