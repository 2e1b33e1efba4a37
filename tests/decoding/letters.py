"""A tokenizer of a letter or a few a token, whose bytes can be asked for; token 23 ends an answer."""

import json
import types
from typing import Any

import toy

NAMES = [*"abcdefghijk", "ab", "abc", "bc", "ba", "cd", "de", "bb", "aa", "dd", "ee", "eee", "bcd", "#"]


class Letters(toy.Tokenizer):
    """The letters, or the tokens of a backend."""

    eos_token_id = 23

    def __init__(self, backend: Any = None, names: list[str] = NAMES) -> None:
        self.names = names
        described = {"decoder": {"type": "ByteLevel"}, "added_tokens": [{"id": 23, "special": True}]}
        self.backend_tokenizer = backend or types.SimpleNamespace(to_str=lambda: json.dumps(described))

    def __len__(self) -> int:
        return len(self.names)

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.names[token]

    def decode(self, ids, skip_special_tokens):
        return "".join("" if skip_special_tokens and token == 23 else self.names[token] for token in ids)

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [self.names.index(letter) for letter in text]}
