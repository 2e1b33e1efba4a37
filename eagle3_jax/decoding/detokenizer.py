"""Text of an answer while it is being written, and stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagle3_jax.decoding.channels import Channels

_CUT = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet one
_LONGEST = 4  # bytes of a character in UTF-8: no more tokens have a part in one


class Detokenizer:
    """Turns tokens into text as they come: the same text, wherever they are cut into pieces.

    A character's bytes are held back until it is complete. Those of one that never is, at the end, are left out, as
    vLLM leaves them out. The work is linear: few tokens are decoded again, whatever they are.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # The last tokens that were shown, which decide on spaces, and those behind them.
        self._context: list[int] = []
        self._held: list[int] = []
        self._given = 0  # characters of their text that were given

    def add(self, ids: Sequence[int], last: bool) -> str:
        """The text that these tokens add; `last`: no more follow."""
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
        """All is given. The fewest last tokens that show something whole stay, as context."""
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
        """Gives what is held, complete or not, but for a last character's first bytes."""
        rest = min(len(text) - len(text.rstrip(_CUT)), _LONGEST - 1)
        self._context, self._held = self._held, []
        self._given = max(0, len(self._decode(self._context)) - rest)
        return text[: len(text) - rest]

    def _is_silent(self, token: int) -> bool:
        """Whether it shows nothing wherever it stands, as special tokens; a space that is a text's first may vanish."""
        return not self._decode([token, token])

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True) if ids else ""


class StopScanner:
    """Looks for stop strings in an answer, wherever its tokens begin and end; not in its reasoning.

    Args:
        prompt: see `Channels`.

    Attributes:
        text: so far, cut in front of a stop string that was found.
        settled: characters of it that no stop string can begin in any more.
    """

    def __init__(self, tokenizer: Any, stops: tuple[str, ...], prompt: Sequence[int]) -> None:
        self.text, self.settled = "", 0
        self._stops, self._found = stops, False
        self._channels, self._detokenizer = Channels(tokenizer, prompt), Detokenizer(tokenizer)

    def add(self, token: int, look: bool) -> bool:
        """Adds a token; True where it completes a stop string. `look`: False lets stop strings pass."""
        answer, _ = self._channels.split([token])
        return self._extend(self._detokenizer.add(answer, last=False), look)

    def end(self) -> str:
        """The whole text."""
        if not self._found:
            self._extend(self._detokenizer.add([], last=True), look=True)
        self.settled = len(self.text)
        return self.text

    def _extend(self, added: str, look: bool) -> bool:
        before = len(self.text)
        self.text += added
        if look:
            places = [self.text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stops]
            if found := [place for place in places if place >= 0]:
                self.text = self.text[: min(found)]
                self.settled, self._found = len(self.text), True
                return True
        held = (
            max(n for n in range(min(len(stop), len(self.text) + 1)) if self.text.endswith(stop[:n]))
            for stop in self._stops
        )
        self.settled = len(self.text) - max(held)
        return False
