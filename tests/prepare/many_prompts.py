"""Synthetic prompts by the thousand: chains of near duplicates, copies, personal data, system prompts, broken lines."""

from __future__ import annotations

import itertools
import json
import pathlib
import random

# Words of no language; none of them is personal data, and they begin no marker.
_WORDS = ["".join(letters) for letters in itertools.product("bdfgklmnprst", "aeiou", "bdfgklmnprst", "aeiou")]
_SYSTEM = ("Be brief.", "be  brief.", "Be kind.")  # the first two are one for the identity alone


def write(path: pathlib.Path, count: int, seed: int = 0) -> None:
    """Writes a JSONL file of `count` lines."""
    draw = random.Random(seed)
    recent: list[list[str]] = []
    with path.open("w") as stream:
        for number in range(count):
            kind, words = draw.random(), draw.choices(_WORDS, k=draw.randrange(8, 120))
            if recent and kind < 0.15:  # the next of a chain
                words = list(draw.choice(recent))
                words[draw.randrange(len(words))] = draw.choice(_WORDS)
            if recent and 0.15 < kind < 0.2:
                words = [word.upper() for word in draw.choice(recent)]
            else:
                recent = [*recent[-400:], [*words]]
            text = " ".join(words)
            if kind > 0.98:
                text += f" write to u{number}@example.org"
            messages = [{"role": "user", "content": text}]
            if 0.85 < kind < 0.95:
                messages = [{"role": "system", "content": draw.choice(_SYSTEM)}, *messages]
            stream.write('{"prompt": "half' if kind > 0.997 else json.dumps({"messages": messages}))
            stream.write("\n")
