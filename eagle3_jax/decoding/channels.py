"""Channels of an answer: gpt-oss thinks in one and answers in another (OpenAI's harmony format).

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>`: what a reader is
told is in `final`; the other channels are what SGLang and vLLM call the reasoning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_ANSWER = "final"


class Channels:
    """Sorts tokens as they come. Where the tokenizer has no channels, all of them are the answer's.

    Args:
        tokenizer: a Hugging Face tokenizer.
        prompt: what stands in front, which says whether a channel is open.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._marks = _marks(tokenizer)
        # Whether a message's header is being read, and the channel's name in it; whose the tokens behind it are.
        self._header = self._named = False
        self._channel: list[int] = []
        self._answers = True
        if self._marks:
            starts = (place for place in reversed(range(len(prompt))) if self._marks.get(prompt[place]) == _START)
            self.split(prompt[next(starts, len(prompt)) :])

    def split(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """(tokens of the answer, tokens of the reasoning); what stands between messages is in neither."""
        if not self._marks:
            return list(ids), []
        answer: list[int] = []
        reasoning: list[int] = []
        for token in ids:
            mark = self._marks.get(token)
            if mark == _MESSAGE:
                name = self._tokenizer.decode(self._channel).split()[:1]
                self._header, self._answers = False, name in ([], [_ANSWER])
            elif mark is not None:
                self._header, self._named, self._channel = True, mark == _CHANNEL, []
            elif self._header:
                self._channel += [token] * self._named  # the role, in front of the name, is none of it
            else:
                (answer if self._answers else reasoning).append(token)
        return answer, reasoning


def _marks(tokenizer: Any) -> dict[int, str]:
    """Token id -> its name; none where there are no channels."""
    channel = tokenizer.convert_tokens_to_ids(_CHANNEL)
    if channel is None or channel == tokenizer.unk_token_id:
        return {}
    return {tokenizer.convert_tokens_to_ids(name): name for name in (_START, _CHANNEL, _MESSAGE, *_ENDS)}
