"""What makes prompts fit to train on: one spelling, no duplicates, no personal data, a stable split."""

from __future__ import annotations

import collections
import hashlib
import json
import pathlib
import re
import unicodedata
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import datasketch

from eagle3_jax.data import lines, personal

Messages = list[dict[str, str]]

_EXCERPT = 200
_OPENING_WORDS = 12
# C0 and C1 controls but tab and newline; zero-width space, word joiner, byte order mark. Joiners that Hindi, Persian
# and emoji are written with stay.
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u2060\ufeff]")
# Words; each letter by itself where a script (Thai, Lao, Khmer, Chinese, Japanese) writes no spaces between them.
_WORD = re.compile(
    r"[\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]|[^\W\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]+"
)
# Of most templates, DeepSeek's, Gemma's and Llama 2's. <s> and </s> strike through in HTML, which opens before it ends
# and seldom begins again at once.
_MARKER = re.compile(
    r"<([|｜])[^|｜<>\s]{1,40}\1>|<(?:start|end)_of_turn>|\[/?INST\]|<</?SYS>>"
    r"|</s>\s*<s>|\A[^<]*(?:<(?!s[ >])[^<]*)*</s>"
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|([bfnrt])|(.))")


def normalise(text: str) -> str:
    """NFC, "\\n" line ends, no control or invisible characters, no space at the ends."""
    text = unicodedata.normalize("NFC", text).replace("\r\n", "\n").replace("\r", "\n")
    return _INVISIBLE.sub("", text).strip()


def excerpt(text: str) -> str:
    """The beginning of a rejected text, without personal data."""
    # Redacted before it is cut, since half an address is still one. JSON's escapes are undone, since they hide where a
    # word begins ("\\n555-...") or what it is made of ("\\u0040").
    text = _ESCAPE.sub(_unescape, text[: 10 * _EXCERPT])
    text = text.encode("utf-8", errors="replace").decode("utf-8")
    return personal.redact(text)[0][:_EXCERPT]


def asked(messages: Messages) -> Messages:
    """What the target is asked, without the answers that a conversation holds."""
    return [message for message in messages if message["role"] != "assistant"]


def content(messages: Messages) -> str:
    """All that is said, as one text."""
    return "\n".join(message["content"] for message in messages)


def _questions(messages: Messages) -> tuple[str, str]:
    """(system prompt, all that the users say): what many prompts share, and what tells them apart."""
    system = [message for message in messages if message["role"] == "system"]
    return content(system), content([message for message in messages if message["role"] == "user"])


def content_hash(messages: Messages) -> str:
    """sha256 in hex over roles and contents, blind to letter case and to the amount of white space."""
    parts = [f"{message['role']}:{' '.join(message['content'].casefold().split())}" for message in messages]
    return hashlib.sha256("\n".join(parts).encode("utf-8")).hexdigest()


def refuse(messages: Messages, max_chars: int) -> str | None:
    """The reason why these messages cannot be used, or None. Answers may have any length."""
    if len(content(asked(messages))) > max_chars:
        return f"longer than {max_chars} characters"
    if _MARKER.search(content(messages)):
        return "holds a chat-template marker"  # the tokenizer would take it for a turn of its own
    return None


def redact(messages: Messages) -> tuple[Messages, collections.Counter[str]]:
    """Messages without personal data, and how often each kind was found."""
    redacted: Messages = []
    found: collections.Counter[str] = collections.Counter()
    for message in messages:
        text, kinds = personal.redact(message["content"])
        redacted.append(message | {"content": text})
        found += kinds
    return redacted, found


class Duplicates:
    """Remembers what it has seen. The first of several alike stays; the result depends on the order alone.

    Exact: by `content_hash`. Near: candidates by MinHash over 3-word shingles and banded lookup (datasketch), confirmed
    by the Jaccard similarity of the shingles themselves. Shingles are of the users' turns: a long system prompt would
    make all that stands under it alike. Under another system prompt none is the same.

    Args:
        near: Jaccard similarity from which two texts count as alike.
    """

    def __init__(self, near: float, num_perm: int = 128) -> None:
        self._near = near
        self._template = datasketch.MinHash(num_perm=num_perm, seed=1, hashfunc=_hash32)
        # Candidates are confirmed, so one too many costs little and one too few is a duplicate that stays. Near 1 there
        # would be too few bands.
        self._lsh = datasketch.MinHashLSH(threshold=min(near, 0.9), num_perm=num_perm, weights=(0.1, 0.9))
        self._shingles: dict[Hashable, frozenset[bytes]] = {}

    def check(self, messages: Messages) -> str | None:
        """Returns "exact duplicate", "near duplicate", or None, and then the messages are remembered."""
        key = content_hash(messages)
        if key in self._shingles:
            return "exact duplicate"
        system, questions = _questions(messages)
        shingles = _shingles(questions, under=system)
        sketch = self._template.copy()
        sketch.update_batch(list(shingles))
        if any(_jaccard(shingles, self._shingles[other]) >= self._near for other in self._lsh.query(sketch)):
            return "near duplicate"
        self._lsh.insert(key, sketch)
        self._shingles[key] = shingles
        return None


class Benchmarks:
    """Questions of benchmarks, to be kept out of training: all texts of their records, in runs of eight words.

    Attributes:
        reasons: what `check` says, of each file.

    Raises:
        ValueError: a file that cannot be read, or a line that is no JSON.
    """

    _WORDS = 8

    def __init__(self, paths: Sequence[str]) -> None:
        self._names: dict[bytes, str] = {}
        self.reasons = tuple(self._reason(pathlib.Path(path).name) for path in paths)
        for path in map(pathlib.Path, paths):
            try:
                for _, line in lines.read(path):
                    for text in _texts(json.loads(line)):
                        for run in _shingles(normalise(text), self._WORDS):
                            self._names.setdefault(run, path.name)
            except (OSError, ValueError) as error:
                raise ValueError(f"prepare.benchmarks: got {str(path)!r} ({error}), expected a JSONL file") from error

    def check(self, messages: Messages) -> str | None:
        """The reason to leave these messages out, or None. They must not be redacted yet: the questions are not."""
        runs = (run for message in messages for run in _shingles(message["content"], self._WORDS))
        found = next((self._names[run] for run in runs if run in self._names), None)
        return None if found is None else self._reason(found)

    @staticmethod
    def _reason(name: str) -> str:
        return f"eight words in a row of the benchmark {name}"


def opening_hash(messages: Messages) -> str:
    """sha256 of how the user begins (the first words), so that several questions on one passage have the same."""
    words = _questions(messages)[1].casefold().split()[:_OPENING_WORDS]
    return hashlib.sha256(" ".join(words).encode("utf-8")).hexdigest()


def split(hashes: Sequence[str], held_out: float) -> list[bool]:
    """Which prompts are held out, by hash: a prompt keeps its side when others are added.

    A small set that hashing would leave on one side gives all of its lowest hash to the held-out side, or all of its
    highest to training.

    Args:
        hashes: hex digests; prompts with the same one stay together.
        held_out: share that is held out on average.

    Raises:
        ValueError: fewer than two different ones.
    """
    if (found := len(set(hashes))) < 2:
        raise ValueError(f"prepare: got {found} usable prompts, expected at least 2 (one to train, one held out)")
    chosen = [int(digest[:16], 16) / 2**64 < held_out for digest in hashes]
    lowest, highest = min(hashes), max(hashes)
    if not any(chosen):
        chosen = [digest == lowest for digest in hashes]
    if all(chosen):
        chosen = [digest != highest for digest in hashes]
    return chosen


def _unescape(match: re.Match[str]) -> str:
    code_point, white_space, other = match.groups()
    return chr(int(code_point, 16)) if code_point else " " if white_space else other


def _texts(record: Any) -> Iterator[str]:
    """All strings in a JSON value that are more than a name."""
    if isinstance(record, str):
        if len(_WORD.findall(record)) > 1:
            yield record
    elif isinstance(record, dict | list):
        for part in record.values() if isinstance(record, dict) else record:
            yield from _texts(part)


def _shingles(text: str, size: int = 3, under: str = "") -> frozenset[bytes]:
    """Digests of all runs of `size` words; others `under` another system prompt."""
    words = _WORD.findall(text.casefold()) or [text]
    runs = (" ".join(words[i : i + size]) for i in range(max(1, len(words) - size + 1)))
    key = hashlib.blake2b(under.encode("utf-8")).digest() if under else b""
    return frozenset(hashlib.blake2b(run.encode("utf-8"), digest_size=8, key=key).digest() for run in runs)


def _jaccard(a: frozenset[bytes], b: frozenset[bytes]) -> float:
    return len(a & b) / len(a | b)


def _hash32(shingle: bytes) -> int:
    return int.from_bytes(shingle[:4], "little")
