"""Filters prompts: normalisation, identity, benchmarks, personal data."""

from __future__ import annotations

import collections
import hashlib
import json
import pathlib
import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

from eagle3_jax.data import lines, personal
from eagle3_jax.runs import disk

Messages = list[dict[str, Any]]

_EXCERPT = 200
_OPENING_WORDS = 12
# C0 and C1 controls except tab and newline; zero-width space, word joiner, byte order mark. The joiners of Hindi,
# Persian and emoji are kept.
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u2060\ufeff]")
# Words; single letters in scripts without spaces between words (Thai, Lao, Khmer, Chinese, Japanese).
_WORD = re.compile(
    r"[\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]|[^\W\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]+"
)
# Markers of most templates, of DeepSeek's, Gemma's and Llama 2's. <s> and </s> are HTML's strike-through too, which
# opens before it closes and rarely opens again at once.
_MARKER = re.compile(
    r"<([|｜])[^|｜<>\s]{1,40}\1>|<(?:start|end)_of_turn>|\[/?INST\]|<</?SYS>>"
    r"|</s>\s*<s>|\A[^<]*(?:<(?!s[ >])[^<]*)*</s>"
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|([bfnrt])|(.))")


def normalise(text: str) -> str:
    """Normalises text: NFC, "\\n" line ends, no control or invisible characters, no space at the ends."""
    text = unicodedata.normalize("NFC", text).replace("\r\n", "\n").replace("\r", "\n")
    return _INVISIBLE.sub("", text).strip()


def excerpt(text: str) -> str:
    """Returns the beginning of a rejected text, without personal data."""
    # Redaction comes before the cut, since half an address is still personal. JSON's escapes are undone first: they
    # hide the start of a word ("\\n555-...") or its characters ("\\u0040").
    text = _ESCAPE.sub(lambda x: chr(int(x[1], 16)) if x[1] else " " if x[2] else x[3], text[: 10 * _EXCERPT])
    text = text.encode("utf-8", errors="replace").decode("utf-8")
    return personal.redact(text)[0][:_EXCERPT]


def asked(messages: Messages, tools: Sequence[dict[str, Any]] = ()) -> Messages:
    """Drops the assistant's messages and its tools'; definitions of tools stand in front, as a system message."""
    defined = [{"role": "system", "content": json.dumps(tools, ensure_ascii=False)}] if tools else []
    return defined + [message for message in messages if message["role"] not in ("assistant", "tool")]


def content(messages: Messages) -> str:
    """Joins the texts of all messages: reasoning and arguments of tool calls too."""
    texts: list[str] = []
    for message in messages:
        calls = message.get("tool_calls")
        more = message.get("reasoning_content"), calls and json.dumps(calls, ensure_ascii=False)
        texts += [message["content"], *filter(None, more)]
    return "\n".join(texts)


def questions(messages: Messages) -> tuple[str, str]:
    """Returns (system prompt, all user turns): the part that many prompts share, and the part that differs."""
    system = [message for message in messages if message["role"] == "system"]
    return content(system), content([message for message in messages if message["role"] == "user"])


def content_hash(messages: Messages) -> str:
    """Hashes roles and contents, ignoring letter case and the amount of white space; sha256 in hex."""
    parts = [f"{message['role']}:{' '.join(message['content'].casefold().split())}" for message in messages]
    return hashlib.sha256("\n".join(parts).encode("utf-8")).hexdigest()


def refuse(messages: Messages, max_chars: int, tools: Sequence[dict[str, Any]] = ()) -> str | None:
    """Returns the reason to refuse these messages, or None. Answers may have any length."""
    prompt = content(asked(messages, tools))
    if len(prompt) > max_chars:
        return f"longer than {max_chars} characters"
    if _MARKER.search(prompt) or _MARKER.search(content(messages)):
        return "holds a chat-template marker"  # the tokenizer would read it as a new turn
    return None


def redact(messages: Messages, redact_text: personal.Redact) -> tuple[Messages, collections.Counter[str]]:
    """Removes personal data. Returns the messages, and the count of each kind."""
    redacted, found = [], collections.Counter[str]()
    for message in messages:
        texts = {name: message[name] for name in ("content", "reasoning_content", "tool_calls") if name in message}
        changed, kinds = redact_json(texts, redact_text)
        found += kinds
        redacted.append(message | changed)
    return redacted, found


def redact_json(value: Any, redact_text: personal.Redact) -> tuple[Any, collections.Counter[str]]:
    """Redacts every string in a JSON value; keys stay."""
    if isinstance(value, str):
        return redact_text(value)
    if not isinstance(value, dict | list):
        return value, collections.Counter()
    parts = [redact_json(item, redact_text) for item in (value.values() if isinstance(value, dict) else value)]
    changed = [part for part, _ in parts]
    found = sum((kinds for _, kinds in parts), collections.Counter())
    return (dict(zip(value, changed, strict=True)) if isinstance(value, dict) else changed), found


class Benchmarks:
    """Decontamination: keeps benchmark questions out of training, by runs of eight words in any text of their records.

    `reasons`: what `check` returns, for each file. Raises ValueError: a file that cannot be read, or a line that is no
    JSON.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._reasons: dict[bytes, str] = {}  # of each run of words
        self.reasons = tuple(f"eight words in a row of the benchmark {pathlib.Path(path).name}" for path in paths)
        for path, reason in zip(map(disk.path_of, paths), self.reasons, strict=True):
            try:
                for _, line in lines.read(path):
                    for text in _texts(json.loads(line)):
                        for run in shingles(normalise(text), 8):
                            self._reasons.setdefault(run, reason)
            except (OSError, ValueError) as error:
                raise ValueError(f"prepare.benchmarks: got {str(path)!r} ({error}), expected a JSONL file") from error

    def check(self, messages: Messages) -> str | None:
        """Returns the reason to drop these messages, or None. They must not be redacted, as benchmarks are not."""
        runs = (run for message in messages for run in shingles(message["content"], 8))
        return next((self._reasons[run] for run in runs if run in self._reasons), None)


def opening_hash(messages: Messages) -> str:
    """Hashes the user's first words, so that several questions on one passage share a hash; sha256 in hex."""
    words = questions(messages)[1].casefold().split()[:_OPENING_WORDS]
    return hashlib.sha256(" ".join(words).encode()).hexdigest()


def _texts(record: Any) -> Iterator[str]:
    """Yields all strings of more than one word in a JSON value."""
    if isinstance(record, str):
        if len(_WORD.findall(record)) > 1:
            yield record
    elif isinstance(record, dict | list):
        for part in record.values() if isinstance(record, dict) else record:
            yield from _texts(part)


def shingles(text: str, size: int = 3, under: str = "") -> frozenset[bytes]:
    """Hashes all runs of `size` words; the hashes depend on the system prompt, `under`."""
    words = _WORD.findall(text.casefold()) or [text]
    runs = (" ".join(words[i : i + size]) for i in range(max(1, len(words) - size + 1)))
    key = hashlib.blake2b(under.encode("utf-8")).digest() if under else b""
    return frozenset(hashlib.blake2b(run.encode("utf-8"), digest_size=8, key=key).digest() for run in runs)
