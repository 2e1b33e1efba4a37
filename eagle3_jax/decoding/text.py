"""The text of an answer: its channels, its characters, its stop strings, and the tokens that end it.

Tokens come piece by piece; the text is the same however they are cut. gpt-oss answers in OpenAI's harmony format:
`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>`. The channel
`final` is the answer; SGLang and vLLM call the other channels the reasoning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagle3_jax.models.chat_template import THOUGHT, THOUGHT_END
from eagle3_jax.models.target_config import ModelConfig

_CUT = "\ufffd"  # a decoder's mark for bytes that are no character, or not yet one
_LONGEST = 4  # bytes of a character in UTF-8, and so most tokens that share one
START, CHANNEL, MESSAGE, CALLED = "<|start|>", "<|channel|>", "<|message|>", "to=functions."
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
ANSWER = "final"


def end_ids(config: ModelConfig, tokenizer: Any) -> frozenset[int]:
    """Returns the token ids that end an answer: the model's, and the tokenizer's, where fine-tunes may add one."""
    own = getattr(tokenizer, "eos_token_id", None)
    return frozenset(config.eos_token_ids) | ({own} if own is not None and own < config.vocab_size else set())


def answer_opening(tokenizer: Any, prompt: Sequence[int]) -> str | None:
    """Returns the text behind which the answer begins, where the prompt ends in an open thought or before a channel."""
    end = tokenizer.decode(prompt[-16:]).rstrip()
    if end.endswith(f"{START}assistant"):
        return f"{CHANNEL}{ANSWER}{MESSAGE}"
    return THOUGHT_END if end.endswith(THOUGHT) else None


class Channels:
    """Sorts tokens into answer and reasoning as they come. Without channels all tokens are the answer's.

    The prompt's token ids stand in front of the answer; they may leave a channel open. `calls` keeps each call of a
    function in the answer as the model writes it, headers included; without it calls are reasoning.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], calls: bool = False) -> None:
        self._tokenizer, self._calls, self._marks = tokenizer, calls, dict[int, str]()
        channel = tokenizer.convert_tokens_to_ids(CHANNEL)
        if channel is not None and channel != tokenizer.unk_token_id:
            names = (START, CHANNEL, MESSAGE, *_ENDS)
            self._marks = {tokenizer.convert_tokens_to_ids(name): name for name in names}
        # A message's header so far; None inside of the message. Whether its text is the answer's; whether it is a call.
        self._header: list[int] | None = None
        self._answers, self._called = True, False
        if self._marks:
            starts = (index for index in reversed(range(len(prompt))) if self._marks.get(prompt[index]) == START)
            self.split(prompt[next(starts, len(prompt)) :])

    def split(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns (tokens of the answer, tokens of the reasoning); tokens between messages belong to neither."""
        if not self._marks:
            return list(ids), []
        answer: list[int] = []
        reasoning: list[int] = []
        for token in ids:
            mark = self._marks.get(token)
            if mark == MESSAGE:
                header = [*(self._header or []), token]
                text = self._tokenizer.decode(header)
                self._called = self._calls and CALLED in text
                name = text.rpartition(CHANNEL)[2].removesuffix(MESSAGE).split()[:1] if CHANNEL in text else []
                self._header, self._answers = None, self._called or name in ([], [ANSWER])
                answer += header if self._called else []
            elif mark is not None:
                answer += [token] if self._called else []  # ends the call
                self._called = False
                self._header = [*(self._header or []), token] if mark == CHANNEL else [token] * (mark == START)
            elif self._header is not None:
                self._header.append(token)
            else:
                (answer if self._answers else reasoning).append(token)
        return answer, reasoning


class Detokenizer:
    """Turns tokens into text as they come: the same text, wherever they are cut into pieces.

    Bytes of an incomplete character are held back until it is complete; at the end of the text they are dropped, as
    vLLM drops them. The work is linear in the tokens: few of them are decoded again. `special`: special tokens have
    text too.
    """

    def __init__(self, tokenizer: Any, special: bool = False) -> None:
        self._tokenizer, self._special = tokenizer, special
        # The last tokens whose text was returned, which decide on spaces; the tokens behind them.
        self._context: list[int] = []
        self._held: list[int] = []
        self._given = 0  # characters of their text that were returned

    def add(self, ids: Sequence[int], last: bool) -> str:
        """Returns the text that these tokens add. `last`: no more tokens follow."""
        text = self._decode([*self._context, *self._held, *ids])[self._given :]
        if text and _CUT not in text:
            self._held += ids
            self._settle()
        else:
            text = "".join(map(self._add, ids))
        return text + self._decode([*self._context, *self._held])[self._given :].rstrip(_CUT) if last else text

    def _add(self, token: int) -> str:
        self._held.append(token)
        text = self._decode([*self._context, *self._held])[self._given :]
        if text and not text.endswith(_CUT):
            self._settle()
            return text
        if self._is_silent(token):
            self._held.pop()
        elif len(self._held) > _LONGEST:  # a first space, which does not show, may be one of them
            return self._release(text)
        return ""

    def _settle(self) -> None:
        """Keeps, once all text is returned, the fewest last tokens with complete text as context."""
        known, context, text = [*self._context, *self._held], [], ""
        while known:
            context.insert(0, known.pop())
            text = self._decode(context)
            if text and not text.endswith(_CUT):
                break
            if self._is_silent(context[0]):
                context.pop(0)
        self._context, self._held, self._given = context, [], len(text)

    def _release(self, text: str) -> str:
        """Returns the held text, complete or not, without a last character's first bytes."""
        rest = min(len(text) - len(text.rstrip(_CUT)), _LONGEST - 1)
        self._context, self._held = self._held, []
        self._given = max(0, len(self._decode(self._context)) - rest)
        return text[: len(text) - rest]

    def _is_silent(self, token: int) -> bool:
        """Tells whether a token never has text, as special tokens; decodes it twice, since a first space may vanish."""
        return not self._decode([token, token])

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=not self._special) if ids else ""


class StopScanner:
    """Finds stop strings in an answer, across the borders of its tokens; not in its reasoning.

    Attributes:
        text: text so far, cut in front of a found stop string.
        settled: characters of `text` in which no stop string can begin any more.
    """

    def __init__(self, tokenizer: Any, stops: tuple[str, ...], prompt: Sequence[int], special: bool = False) -> None:
        self.text, self.settled = "", 0
        self._stops, self._found = stops, False
        self._channels, self._detokenizer = Channels(tokenizer, prompt, special), Detokenizer(tokenizer, special)

    def add(self, token: int, look: bool) -> bool:
        """Adds a token; returns whether it completes a stop string. `look`: False ignores stop strings."""
        answer, _ = self._channels.split([token])
        return self._extend(self._detokenizer.add(answer, last=False), look)

    def end(self) -> str:
        """Returns the whole text."""
        if not self._found:
            self._extend(self._detokenizer.add([], last=True), look=True)
        self.settled = len(self.text)
        return self.text

    def _extend(self, added: str, look: bool) -> bool:
        before = len(self.text)
        self.text += added
        if look:
            starts = [self.text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stops]
            if found := [start for start in starts if start >= 0]:
                self.text = self.text[: min(found)]
                self.settled, self._found = len(self.text), True
                return True
        begun = [n for stop in self._stops for n in range(len(stop)) if self.text.endswith(stop[:n])]
        self.settled = len(self.text) - max(begun)
        return False
