"""Text of an answer while it is being written."""

from __future__ import annotations

from typing import Any


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
        if text.endswith("\ufffd") and not last:
            return ""
        self.start, self.read = self.read, len(self.ids)
        return text[len(shown) :]
