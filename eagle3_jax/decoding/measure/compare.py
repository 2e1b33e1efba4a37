"""Compares speculative with vanilla decoding of the same prompts: acceptance, losslessness and speed.

Both engines answer every prompt in one run, group by group in turn, so that a machine that slows down slows both.
A call that compiles is repeated, and only the repetition counts.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from tqdm import tqdm

from eagle3_jax.acceptance import AcceptanceCounts
from eagle3_jax.decoding.device import programs
from eagle3_jax.decoding.measure.near_tie import NearTie
from eagle3_jax.runs import processes
from eagle3_jax.runs.command import stop_point

_MOST_REPETITIONS = 3
_REFILLS = 4


# (token ids before the first difference, the two tokens there) -> the near-tie, or None for a mismatch.
Judge = Callable[[Sequence[int], tuple[int, int]], NearTie | None]
Timed = tuple[Sequence[Any], float]  # answers, and their seconds


@runtime_checkable
class Decoder(Protocol):
    """Answers prompts as `Engine` does, and returns with the tokens on the host."""

    def generate(self, prompts: Any, params: Any) -> Sequence[Any]: ...


@dataclasses.dataclass
class Tally:
    """Sums over some prompts; `ties` and `mismatches` say where two answers first differ, see `near_tie`."""

    prompts: int = 0
    counts: AcceptanceCounts = dataclasses.field(default_factory=AcceptanceCounts)  # of the speculative answers
    tokens: int = 0
    seconds: float = 0.0
    vanilla_tokens: int = 0
    vanilla_seconds: float = 0.0
    ties: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    mismatches: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def add(
        self, group: Sequence[Mapping[str, Any]], vanilla: Timed, speculative: Timed, judge: Judge | None = None
    ) -> None:
        """Adds a group of prompts, with both engines' answers and seconds."""
        self.prompts += len(group)
        self.vanilla_seconds += vanilla[1]
        self.seconds += speculative[1]
        for prompt, plain, fast in zip(group, vanilla[0], speculative[0], strict=True):
            self.vanilla_tokens += len(plain.token_ids)
            self.tokens += len(fast.token_ids)
            self.counts += fast.stats.counts
            position = first_difference(plain.token_ids, fast.token_ids)
            if position is None:
                continue
            where, tie = {"id": prompt["id"], "position": position}, None
            if judge is not None and position < min(len(plain.token_ids), len(fast.token_ids)):
                prefix = [*prompt["prompt"], *plain.token_ids[:position]]
                tie = judge(prefix, (plain.token_ids[position], fast.token_ids[position]))
            if tie is None:
                self.mismatches.append(where)
            else:
                self.ties.append(where | dataclasses.asdict(tie))

    def report(self, *, exact: bool) -> dict[str, Any]:
        """Returns the figures, ready for JSON, `tau` and `alpha` as of `AcceptanceCounts`; None is a ratio to nothing.

        Where answers need not be equal (`exact`, greedy), `identical`, `ties` and `mismatches` are None.
        """
        vanilla, speculative = _ratio(self.vanilla_tokens, self.vanilla_seconds), _ratio(self.tokens, self.seconds)
        same = self.prompts - len(self.ties) - len(self.mismatches)
        equal = {"identical": same, "ties": self.ties, "mismatches": self.mismatches}
        found: dict[str, Any] = {"prompts": self.prompts} | (equal if exact else dict.fromkeys(equal))
        found |= {"tokens": self.tokens, "rounds": self.counts.rounds, "accepted_per_position": self.counts.accepted}
        found |= {"tau": self.counts.tau if self.counts.rounds else None, "alpha": self.counts.alpha}
        found["tokens_per_second"] = {"vanilla": vanilla, "speculative": speculative}
        found["seconds"] = {"vanilla": self.vanilla_seconds, "speculative": self.seconds}
        return found | {"speedup": None if vanilla is None or speculative is None else _ratio(speculative, vanilla)}


def total(tallies: Sequence[Tally]) -> Tally:
    """Sums tallies."""
    sums = ("prompts", "tokens", "seconds", "vanilla_tokens", "vanilla_seconds")
    return Tally(
        **{field: sum(getattr(tally, field) for tally in tallies) for field in sums},
        counts=AcceptanceCounts.total(tally.counts for tally in tallies),
        ties=[tie for tally in tallies for tie in tally.ties],
        mismatches=[mismatch for tally in tallies for mismatch in tally.mismatches],
    )


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Returns the first position where two answers differ, the end of the shorter included; None if they are equal."""
    return next((i for i, (x, y) in enumerate(itertools.zip_longest(a, b)) if x != y), None)


def compare(
    vanilla: Decoder,
    speculative: Decoder,
    prompts: Sequence[Mapping[str, Any]],
    params: Any,
    batch_size: int,
    judge: Judge | None = None,
    *,
    progress: bool = True,
) -> dict[str, Tally]:
    """Lets both engines answer all prompts, in groups of one category each, so that seconds belong to a category.

    A group is one prompt at batch size 1, else enough prompts to refill freed slots. Categories take turns; so do the
    engines in answering first. Prompts have an "id", a "category" and a "prompt": token ids, where a judge tells
    near-ties from mismatches. Returns a tally per category, in order of first appearance.
    """
    tallies = {prompt["category"]: Tally() for prompt in prompts}
    with tqdm(total=len(prompts), desc="evaluate", unit="prompt", disable=not progress) as bar:
        for number, group in enumerate(_groups(prompts, batch_size)):
            stop_point()
            asked = [prompt["prompt"] for prompt in group]
            order = [vanilla, speculative] if number % 2 == 0 else [speculative, vanilla]
            if number == 0:  # the first group also warms threads, allocators and caches
                for engine in order:
                    engine.generate(asked, params)
            answers = {engine is speculative: timed(engine, asked, params) for engine in order}
            tallies[group[0]["category"]].add(group, answers[False], answers[True], judge)
            so_far = total(list(tallies.values()))
            vanilla_rate, rate = so_far.vanilla_tokens / so_far.vanilla_seconds, so_far.tokens / so_far.seconds
            bar.set_postfix_str(f"{vanilla_rate:.1f} tokens/s vanilla, {rate:.1f} speculative")
            bar.update(len(group))
    return tallies


def _groups(prompts: Sequence[Mapping[str, Any]], batch_size: int) -> list[list[Mapping[str, Any]]]:
    """Splits prompts into groups of one category each; the categories take turns."""
    size = 1 if batch_size == 1 else _REFILLS * batch_size
    by_category: dict[str, list[Mapping[str, Any]]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt["category"], []).append(prompt)
    turns = []
    for members in by_category.values():
        parts = max(1, round(len(members) / size))  # of even size: a small remainder would leave slots empty
        cuts = [i * len(members) // parts for i in range(parts + 1)]
        turns += [(turn, members[cuts[turn] : cuts[turn + 1]]) for turn in range(parts)]
    return [group for _, group in sorted(turns, key=lambda item: item[0])]


def timed(engine: Decoder, messages: Sequence[Any], params: Any) -> Timed:
    """Returns answers and seconds of a call in which nothing was compiled."""
    for _ in range(_MOST_REPETITIONS):
        before, start = programs.compiled(every=True), time.perf_counter()
        answers = engine.generate(messages, params)
        seconds, compiled = time.perf_counter() - start, programs.compiled(every=True) - before
        if not processes.agree(lambda compiled=compiled: compiled):
            return answers, seconds
    raise RuntimeError(f"the engine still compiles after {_MOST_REPETITIONS} calls with the same prompts")


def _ratio(part: int | float, whole: int | float) -> float | None:
    return part / whole if whole else None
