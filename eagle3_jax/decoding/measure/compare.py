"""Acceptance, losslessness and speed of speculative decoding, against vanilla decoding of the same prompts.

Both engines answer every prompt in the same run, group by group in turn, so that a machine that slows down slows both.
A call in which something was compiled is no measurement: it is repeated, and the repetition counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
from tqdm import tqdm

from eagle3_jax.decoding.measure.near_tie import NearTie
from eagle3_jax.runs import processes
from eagle3_jax.runs.command import stop_point

_COMPILING = "/jax/core/compile/"
_MOST_REPETITIONS = 3
_REFILLS = 4


# (token ids in front of a first difference, the two tokens there) -> what makes it a near-tie, or None.
Judge = Callable[[Sequence[int], tuple[int, int]], NearTie | None]


@runtime_checkable
class Decoder(Protocol):
    """What is measured: anything that answers prompts as `Engine` does, host-side tokens in hand when it returns."""

    def generate(self, prompts: Any, params: Any) -> Sequence[Any]: ...


@dataclasses.dataclass
class Tally:
    """Counts over some prompts, and what follows from them.

    Attributes:
        rounds: verifications by the target; the first token of an answer comes from the prefill, not from a round.
        accepted: per draft position, the rounds in which it was accepted (it and all before it).
        ties: prompts whose two answers differ first at a near-tie: where, and its gap and bound (see `near_tie`).
        mismatches: prompts whose two answers differ, and where first, with no such excuse.
    """

    prompts: int = 0
    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0
    vanilla_tokens: int = 0
    vanilla_seconds: float = 0.0
    accepted: list[int] = dataclasses.field(default_factory=list)
    ties: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    mismatches: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def add(
        self,
        group: Sequence[Mapping[str, Any]],
        vanilla: Sequence[Any],
        speculative: Sequence[Any],
        seconds: tuple[float, float],
        judge: Judge | None = None,
    ) -> None:
        """Counts one group of prompts, which the engines answered in `seconds` (vanilla, speculative)."""
        self.prompts += len(group)
        self.vanilla_seconds += seconds[0]
        self.seconds += seconds[1]
        for prompt, plain, fast in zip(group, vanilla, speculative, strict=True):
            self.vanilla_tokens += len(plain.token_ids)
            self.tokens += len(fast.token_ids)
            self.rounds += fast.stats.rounds
            self.accepted = _sum([self.accepted, fast.stats.accepted_per_position])
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
        """JSON-ready numbers; None stands for a ratio to nothing.

        tau: tokens per round, bonus token included, as engines count: a round that ends on an
        accepted end-of-sequence token or at the limit counts a bonus that is not in the answer. alpha: share of
        acceptance per draft position, of those rounds that accepted all positions before it.

        Args:
            exact: greedy decoding, where both must say the same; else `identical`, `ties` and `mismatches` are None.
        """
        vanilla, speculative = _ratio(self.vanilla_tokens, self.vanilla_seconds), _ratio(self.tokens, self.seconds)
        return {
            "prompts": self.prompts,
            "identical": self.prompts - len(self.ties) - len(self.mismatches) if exact else None,
            "ties": self.ties if exact else None,
            "mismatches": self.mismatches if exact else None,
            "tokens": self.tokens,
            "rounds": self.rounds,
            "accepted_per_position": self.accepted,
            "tau": _ratio(self.rounds + sum(self.accepted), self.rounds),
            "alpha": [_ratio(n, given) for n, given in zip(self.accepted, [self.rounds, *self.accepted], strict=False)],
            "tokens_per_second": {"vanilla": vanilla, "speculative": speculative},
            "seconds": {"vanilla": self.vanilla_seconds, "speculative": self.seconds},
            "speedup": None if vanilla is None or speculative is None else _ratio(speculative, vanilla),
        }


def total(tallies: Sequence[Tally]) -> Tally:
    """The sum of tallies."""
    counts = ("prompts", "rounds", "tokens", "seconds", "vanilla_tokens", "vanilla_seconds")
    return Tally(
        **{field: sum(getattr(tally, field) for tally in tallies) for field in counts},
        accepted=_sum([tally.accepted for tally in tallies]),
        ties=[tie for tally in tallies for tie in tally.ties],
        mismatches=[mismatch for tally in tallies for mismatch in tally.mismatches],
    )


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """First position where two answers differ, the shorter one's end included; None when they are the same."""
    shorter = min(len(a), len(b))
    different = (i for i in range(shorter) if a[i] != b[i])
    return next(different, None if len(a) == len(b) else shorter)


def compare(
    vanilla: Decoder,
    speculative: Decoder,
    prompts: Sequence[Mapping[str, Any]],
    params: Any,
    batch_size: int,
    judge: Judge | None = None,
) -> dict[str, Tally]:
    """Lets both engines answer all prompts.

    A group holds prompts of one category, so that its seconds are that category's; one prompt at batch size 1, else
    enough to refill slots that fall free. Categories take turns, and so do the engines in going first.

    Args:
        prompts: each with "id", "category" and "prompt", which is what the engines are given.
        params: sampling parameters, the same for both.
        batch_size: of the engines.
        judge: tells near-ties from mismatches where greedy answers differ; the prompts must then be token ids.

    Returns:
        A tally per category, in order of first appearance.
    """
    tallies = {prompt["category"]: Tally() for prompt in prompts}
    with tqdm(total=len(prompts), desc="evaluate", unit="prompt", disable=processes.index() > 0) as bar:
        for number, group in enumerate(_groups(prompts, batch_size)):
            stop_point()
            asked = [prompt["prompt"] for prompt in group]
            order = [vanilla, speculative] if number % 2 == 0 else [speculative, vanilla]
            if number == 0:  # wakes threads, allocators and caches
                for engine in order:
                    engine.generate(asked, params)
            answers = {engine is speculative: timed(engine, asked, params) for engine in order}
            (plain, plain_seconds), (fast, fast_seconds) = answers[False], answers[True]
            tally = tallies[group[0]["category"]]
            tally.add(group, plain, fast, (plain_seconds, fast_seconds), judge)
            so_far = total(list(tallies.values()))
            vanilla_rate, rate = so_far.vanilla_tokens / so_far.vanilla_seconds, so_far.tokens / so_far.seconds
            bar.set_postfix_str(f"{vanilla_rate:.1f} tokens/s vanilla, {rate:.1f} speculative")
            bar.update(len(group))
    return tallies


def _groups(prompts: Sequence[Mapping[str, Any]], batch_size: int) -> list[list[Mapping[str, Any]]]:
    """Groups of one category each, the categories in turn."""
    size = 1 if batch_size == 1 else _REFILLS * batch_size
    by_category: dict[str, list[Mapping[str, Any]]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt["category"], []).append(prompt)
    turns = []
    for members in by_category.values():
        parts = max(1, round(len(members) / size))  # of even size: a small rest would leave slots empty
        cuts = [i * len(members) // parts for i in range(parts + 1)]
        turns += [(turn, members[cuts[turn] : cuts[turn + 1]]) for turn in range(parts)]
    return [group for _, group in sorted(turns, key=lambda item: item[0])]


def timed(engine: Decoder, messages: Sequence[Any], params: Any) -> tuple[Sequence[Any], float]:
    """Answers and seconds of a call in which nothing was compiled."""
    for _ in range(_MOST_REPETITIONS):
        with _compilations() as compiled:
            start = time.perf_counter()
            answers = engine.generate(messages, params)
            seconds = time.perf_counter() - start
        if not processes.agree(lambda: list(compiled)):
            return answers, seconds
    raise RuntimeError(f"the engine still compiles after {_MOST_REPETITIONS} calls with the same prompts: {compiled}")


@contextlib.contextmanager
def _compilations() -> Iterator[list[str]]:
    """Yields a list that grows with every compilation, of whatever in this process."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.startswith(_COMPILING):
            events.append(event.removeprefix(_COMPILING))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def _sum(rows: Sequence[Sequence[int]]) -> list[int]:
    """Adds rows of counts; an empty row counts nothing."""
    return [sum(column) for column in zip(*[row for row in rows if row], strict=True)]


def _ratio(part: int | float, whole: int | float) -> float | None:
    return part / whole if whole else None
