"""Chooses the conversations of a mix of categories.

A mix counts tokens of answers, which `prepare` cannot know. What is left out stays in its folder, so another mix needs
no new answer. A conversation is kept by a hash of its id, below a limit of its category. The limits are chosen on what
is trained on; with the same ones the held-out conversations have the same mix.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from eagle3_jax.data import lines
from eagle3_jax.models import chat_template
from eagle3_jax.runs import disk

Limits = Mapping[str, int]  # of a category's 64-bit hashes


def wanted(mix: Mapping[str, float] | str) -> dict[str, Any]:
    """Reads `extract.mix` into {"by": "tokens" or "conversations", "shares": they add up to 1}. Raises ValueError."""
    if not isinstance(mix, str):
        return {"by": "tokens", "shares": dict(mix)}
    counts: dict[str, int] = {}
    expected = 'lines such as {"category": "code", "count": 12}'
    try:
        for number, line in lines.read(mix):
            try:
                record = json.loads(line)
                category, count = record["category"], record.get("count", 1)
            except (ValueError, KeyError, TypeError, AttributeError):
                category, count = None, 0
            if not isinstance(category, str) or type(count) is not int or count < 1:
                raise ValueError(f"extract.mix: got {mix!r} with another line {number}, expected {expected}")
            counts[category] = counts.get(category, 0) + count
    except OSError as error:
        raise ValueError(f"extract.mix: got {mix!r} ({error.strerror}), expected a file with {expected}") from error
    if not counts:
        raise ValueError(f"extract.mix: got {mix!r} without a line, expected {expected}")
    total = sum(counts.values())
    return {"by": "conversations", "shares": {category: count / total for category, count in sorted(counts.items())}}


def choose(
    wanted: Mapping[str, Any], conversations: disk.Path, tokenizer: Any
) -> tuple[dict[str, int], dict[str, Any]]:
    """Chooses as many conversations of a file as the mix, with the run's "seed", allows.

    Returns the limits, and of each category {"share", "kept", "of"}. Raises ValueError: one has no conversation.
    """
    hashes: dict[str, array[int]] = {}
    amounts: dict[str, array[int]] = {}
    for values in disk.read_jsonl(conversations):
        category = values["category"]
        amount = 1 if wanted["by"] == "conversations" else _answer_tokens(values, tokenizer)
        hashes.setdefault(category, array("Q")).append(_hash(wanted["seed"], values["id"]))
        amounts.setdefault(category, array("Q")).append(amount)
    shares: Mapping[str, float] = wanted["shares"]
    if missing := sorted(shares.keys() - hashes.keys()):
        found = ", ".join(sorted(hashes))
        raise ValueError(f"extract.mix: got {', '.join(missing)}, expected categories of the conversations: {found}")
    most = min(sum(amounts[category]) / share for category, share in shares.items())
    limits, summary = {}, {}
    for category, share in shares.items():
        order = np.argsort(np.asarray(hashes[category]))
        kept = np.cumsum(np.asarray(amounts[category])[order])
        number = max(1, int(np.searchsorted(kept, share * most * (1 + 1e-9), side="right")))
        limits[category] = hashes[category][order[number - 1]] + 1
        summary[category] = {"share": share, "kept": int(kept[number - 1]), "of": int(kept[-1])}
    return limits, summary


def select(conversations: Iterable[bytes], limits: Limits | None, seed: int) -> Iterator[str]:
    """Yields the lines of a conversations file that belong to the mix; all of them without limits."""
    for line in conversations:
        if limits is not None:
            values = json.loads(line)
            if _hash(seed, values["id"]) >= limits.get(values["category"], 0):
                continue
        yield line.decode()


def _hash(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big")


def _answer_tokens(values: Mapping[str, Any], tokenizer: Any) -> int:
    if values["answer_ids"] is not None:
        return sum(map(len, values["answer_ids"]))
    texts = [
        message.get("reasoning_content", "") + message["content"]
        for message in values["messages"]
        if message["role"] == "assistant"
    ]
    return sum(len(chat_template.tokenize(tokenizer, text)) for text in texts)
