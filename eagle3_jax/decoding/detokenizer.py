"""Text of an answer while it is being written, and stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagle3_jax.decoding.channels import Channels


class Detokenizer:
    """Turns tokens into text as they come; a character's bytes are held back until it is complete."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.start = self.read = 0  # ids[start:read] were shown last; they are the context that decides on spaces

    def add(self, ids: list[int], last: bool) -> str:
        """The text that these tokens add; `last` releases what was held back."""
        self.ids += ids
        shown = self.tokenizer.decode(self.ids[self.start : self.read], skip_special_tokens=True)
        text = self.tokenizer.decode(self.ids[self.start :], skip_special_tokens=True)
        # Nothing to see yet: half a character, or a special token, which as the context's first would eat a space.
        if (text.endswith("\ufffd") or len(text) <= len(shown)) and not last:
            return ""
        self.start, self.read = self.read, len(self.ids)
        return text[len(shown) :]


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
        """The whole text, with what was held back."""
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
