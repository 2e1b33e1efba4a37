"""In what a prompt is written, told by its letters: a report's estimate, which no prompt is kept or dropped by."""

from __future__ import annotations

import re
from typing import Final

ENGLISH: Final = "English"
LATIN: Final = "other, in Latin letters"
NONE: Final = "no letters"
# Letters of a script, as the inside of a regular expression's set; Japanese and Korean mix theirs with Chinese ones.
_SCRIPTS = {
    "Japanese": "\u3040-\u30ff",
    "Korean": "\u1100-\u11ff\uac00-\ud7af",
    "Chinese": "\u3400-\u4dbf\u4e00-\u9fff",
    "Cyrillic": "\u0400-\u052f",
    "Arabic": "\u0600-\u06ff\u0750-\u077f",
    "Devanagari": "\u0900-\u097f",
    "Bengali": "\u0980-\u09ff",
    "Greek": "\u0370-\u03ff",
    "Hebrew": "\u0590-\u05ff",
    "Thai": "\u0e00-\u0e7f",
}
_LETTERS = {name: re.compile(f"[{letters}]") for name, letters in _SCRIPTS.items()}
_ANY_LETTER = re.compile(r"[^\W\d_]")
_ASCII = re.compile(r"[a-z]+")
# Words that English sentences cannot do without, and that are none in most other languages.
_ENGLISH_WORDS = frozenset(
    "the of and to is are for with that this what how why which who you your it from by be can does as at an "
    "write give explain my if have each there than between into about when will using over".split()
)
_READ = 2000  # characters
_ENGLISH_SHARE = 1 / 12  # of all words
_MIXED_SHARE = 0.1  # of kana or Hangul among the letters


def language(text: str) -> str:
    """Names the language of a text by its script: "English", "Cyrillic", "other, in Latin letters" and so on."""
    text = text[:_READ]
    if not _ANY_LETTER.search(text):
        return NONE
    if not text.isascii() and (script := _script(text)) is not None:
        return script
    words = _ASCII.findall(text.lower())
    english = sum(word in _ENGLISH_WORDS for word in words)
    return ENGLISH if words and english >= _ENGLISH_SHARE * len(words) else LATIN


def _script(text: str) -> str | None:
    """Names the script of most letters; None: Latin, or another one."""
    letters = len(_ANY_LETTER.findall(text))
    counts = {name: len(found.findall(text)) for name, found in _LETTERS.items()}
    for name in ("Japanese", "Korean"):
        if counts[name] > _MIXED_SHARE * letters:
            return name
    most = max(counts, key=counts.__getitem__)
    return most if counts[most] > letters / 2 else None
