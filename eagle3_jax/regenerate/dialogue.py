"""Turns a prompt into a conversation, turn by turn, with answers of an engine in this process or of a server."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eagle3_jax.config import RegenerateConfig
from eagle3_jax.models import chat_template
from eagle3_jax.runs import disk

# What `rejects.jsonl` says of a prompt that no conversation begins with; of a failed answer, its own reason.
_REASONS = {
    "empty": "the answer has no text",
    "too_long": "the first turn does not fit: regenerate.max_length",
    "refused": "the chat template refuses it",
}


@dataclasses.dataclass(frozen=True)
class Answer:
    """The target's answer in one turn; a line of the log."""

    id: str
    turn: int
    text: str  # without the `reasoning`; the history of later turns has no more of it
    token_ids: list[int] | None  # as sampled, the end of sequence included; None: a server kept them to itself
    truncated: bool
    failed: bool = False  # nobody gave an answer to train on; `why` says what they gave
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] | None = None
    server: str = ""  # its URL; empty for an engine of this process
    why: str = ""


Known = Mapping[tuple[str, int], Answer]


class Answers(Mapping[tuple[str, int], Answer], contextlib.AbstractContextManager["Answers"]):
    """The answers in some logs, none of which grows, by prompt and turn; in memory lie only their places.

    An answer that stands twice counts as it stands last. Raises JsonError: a whole line was altered.
    """

    def __init__(self, logs: Sequence[disk.Path]) -> None:
        self._open = contextlib.ExitStack()
        self._places: dict[tuple[str, int], tuple[io.BufferedIOBase, int]] = {}
        with contextlib.ExitStack() as opening:
            for log in logs:
                lines = opening.enter_context(disk.open_log(log))
                for place, value in disk.log_values(lines, log):
                    self._places[value["id"], value["turn"]] = lines, place
            self._open = opening.pop_all()

    def __getitem__(self, key: tuple[str, int]) -> Answer:
        lines, place = self._places[key]
        lines.seek(place)
        return Answer(**disk.log_value(lines.readline(), f"{key}"))

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __exit__(self, *_: object) -> None:
        self._open.close()


@dataclasses.dataclass
class Dialogue:
    """A prompt on its way to a conversation.

    `end` is why no more turns follow: "complete", "truncated" (the last answer reached max_tokens), "empty" (the next
    answer had no text, and was not cut off in its reasoning), "failed" (in the next answer), "too_long" (the next turn
    does not fit), "refused" (by the chat template), "called" (the last answer calls tools, and nobody here answers for
    them), "given" (answered before, by another engine).
    """

    prompt: dict[str, Any]
    answers: list[Answer] = dataclasses.field(default_factory=list)
    end: str | None = None
    why: str = ""  # of a failed answer

    @classmethod
    def begin(cls, prompt: dict[str, Any]) -> Dialogue:
        roles = {message["role"] for message in prompt["messages"]}
        return cls(prompt, end="given" if "assistant" in roles else None if "user" in roles else "refused")

    @property
    def is_conversation(self) -> bool:
        return bool(self.answers) or self.end == "given"

    @property
    def turns(self) -> int:
        return sum(message["role"] == "user" for message in self.prompt["messages"])

    @property
    def turn(self) -> int:
        """The turn that is to be answered, from 0."""
        return len(self.answers)

    def history(self) -> list[dict[str, Any]]:
        """The messages that the next answer follows."""
        return self._messages(self.turn + 1)

    def next_prompt(self, known: Known, tokenizer: Any, settings: RegenerateConfig) -> list[int] | None:
        """Takes the answers that are known; the token ids of the first turn that has none, or None behind the end."""
        while self.end is None and (answer := known.get((self.prompt["id"], self.turn))) is not None:
            self.take(answer)
        if self.end is not None:
            return None
        try:
            ids = chat_template.prompt_ids(tokenizer, self.history(), self.prompt.get("tools"))
        except chat_template.RefusedError:
            self.end = "refused"
            return None
        self.end = "too_long" if len(ids) > settings.max_length - settings.max_tokens else None
        return ids if self.end is None else None

    def take(self, answer: Answer) -> None:
        """Continues with an answer, or ends."""
        if answer.failed:
            self.end, self.why = "failed", answer.why
            return
        calls = bool(answer.tool_calls)
        if not answer.text.strip() and not calls and not (answer.truncated and answer.reasoning.strip()):
            self.end = "empty"
            return
        self.answers.append(answer)
        if answer.truncated:  # this turn has no end, so nothing can follow it
            self.end = "truncated"
        elif calls:
            self.end = "called"
        elif len(self.answers) == self.turns:
            self.end = "complete"

    def conversation(self) -> dict[str, Any]:
        """A line of the output; `answer_ids`, the token ids of each answer, is None where only text was given."""
        if self.end == "given":
            return self.prompt | {"answer_ids": None}
        messages, answers = self._messages(self.turn), iter(self.answers)
        ids, kept = [answer.token_ids for answer in self.answers], ("id", "category", "source", "license", "tools")
        found = {name: self.prompt[name] for name in kept if name in self.prompt}
        found["messages"] = [m | _more(next(answers)) if m["role"] == "assistant" else m for m in messages]
        return found | {"truncated": self.answers[-1].truncated, "answer_ids": None if None in ids else ids}

    def reject(self) -> dict[str, Any]:
        """A line of `rejects.jsonl`, of a dialogue that is no conversation."""
        why = self.why or _REASONS.get(self.end or "", "")
        return {"id": self.prompt["id"], "category": self.prompt["category"], "end": self.end, "reason": why}

    def _messages(self, turns: int) -> list[dict[str, Any]]:
        """The prompt's messages up to the user's turn number `turns` (from 1), with the answers that are there."""
        messages, answers = [], iter(self.answers)
        for message in self.prompt["messages"]:
            messages.append(message)
            if message["role"] == "user":
                turns -= 1
                if (answer := next(answers, None)) is not None:
                    messages.append({"role": "assistant", "content": answer.text})
                if turns == 0:
                    break
        return messages


def _more(answer: Answer) -> dict[str, Any]:
    """What a server says beside the text, as the source `conversations` names it; an engine's ids say the same."""
    more = {"reasoning_content": answer.reasoning, "tool_calls": answer.tool_calls} if answer.server else {}
    return {name: value for name, value in more.items() if value}


def sampling(settings: RegenerateConfig, seed: int, name: str, turn: int) -> dict[str, Any]:
    """How a turn is sampled, whoever answers: `temperature`, the same in all turns, `max_tokens`, `seed`."""

    def number(text: str) -> int:
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")

    temperature = settings.temperatures[number(name) % len(settings.temperatures)]
    return {"temperature": temperature, "max_tokens": settings.max_tokens, "seed": number(f"{seed}/{name}/{turn}")}


class Counts:
    """What the manifest says of the dialogues of a split."""

    def __init__(self) -> None:
        self._totals = collections.Counter(prompts=0, conversations=0, answers=0, tokens=0, without_ids=0)
        self._ended, self._dropped, self._servers = (collections.Counter[str | None]() for _ in range(3))
        # Answers of each category, by the least power of two that is no less than their tokens.
        self._lengths: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)

    def add(self, dialogue: Dialogue) -> None:
        """Counts one that has ended. Those with no answer at all are not conversations."""
        kept = dialogue.is_conversation
        (self._ended if kept else self._dropped)[dialogue.end] += 1
        self._totals.update(prompts=1, conversations=int(kept))
        for answer in dialogue.answers:
            count = len(answer.token_ids or ())
            self._totals.update(answers=1, tokens=count, without_ids=int(answer.token_ids is None))
            if answer.server:
                self._servers[answer.server] += 1
            if count:
                self._lengths[dialogue.prompt["category"]][str(1 << (count - 1).bit_length())] += 1

    def summary(self) -> dict[str, Any]:
        """The counts; where servers answered, how often each did, and how many answers came without token ids."""
        found: dict[str, Any] = dict(self._totals)
        without_ids, given = found.pop("without_ids"), self._ended["given"]
        found["answered_by"] = {"target": found["conversations"] - given, "given": given}
        found["answer_lengths"] = {category: dict(lengths) for category, lengths in self._lengths.items()}
        found |= {"ended": {end: n for end, n in self._ended.items() if n}, "dropped": dict(self._dropped)}
        return found | ({"servers": dict(self._servers), "without_ids": without_ids} if self._servers else {})
