"""A line of the first run's table: what was got, what was expected or predicted, and a verdict."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from eagle3_jax.runs.machine import TERAFLOPS
from tpu.topology import CHIPS

OK, WRONG, SLOW, SKIPPED = "ok", "WRONG", "slow", "skipped"
TOO_SLOW = 2.0  # a time is slow from this many times its prediction on


@dataclasses.dataclass(frozen=True)
class Line:
    """A check by its unique name; as printed what was got, and what was expected, predicted, or why it was skipped; its
    verdict, of which only WRONG fails the run; and the figures behind the text, JSON-ready."""

    name: str
    got: str
    expected: str
    verdict: str
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name:46}  {self.got:40}  {self.expected:30}  {self.verdict}"


HEAD = str(Line("", "got", "expected or predicted", "verdict"))


def right(name: str, got: Any, expected: Any, *, ok: bool | None = None, **numbers: Any) -> Line:
    """Makes the line of a number or a text that must be right: equal to the expected one, unless `ok` tells."""
    ok = got == expected if ok is None else ok
    return Line(name, str(got), str(expected), OK if ok else WRONG, numbers)


def within(name: str, error: float, most: float) -> Line:
    """Makes the line of an error; NaN is wrong."""
    return right(name, f"error {error:.1e}", f"at most {most:.1e}", ok=error <= most, error=error)


def time(name: str, seconds: float, predicted: float | None, more: str = "", **numbers: Any) -> Line:
    """Makes the line of a time. `predicted` is a floor in seconds; `more` is text behind the time."""
    expected = "-" if predicted is None else f"{duration(predicted)}, {predicted / seconds:.0%} of the time"
    slow = predicted is not None and seconds > TOO_SLOW * predicted
    numbers |= {"seconds": seconds, "predicted_seconds": predicted}
    return Line(name, duration(seconds) + more, expected, SLOW if slow else OK, numbers)


def duration(seconds: float) -> str:
    unit, size = next(((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if seconds >= size), ("us", 1e-6))
    return f"{seconds / size:.3g} {unit}"


def skipped(name: str, reason: str) -> Line:
    return Line(name, "-", reason, SKIPPED)


def attempt(name: str, check: Callable[[], Iterator[Line]], *, may_not_fit: bool = False) -> Iterator[Line]:
    """Yields a check's lines; an error of it becomes a line, so that the next check still runs."""
    try:
        yield from check()
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:200]}"
        full = may_not_fit and "RESOURCE_EXHAUSTED" in text
        yield skipped(name, "does not fit the devices") if full else right(name, text, "no error")


def predict(device: Any, *, read: float = 0, operations: float = 0, sent: float = 0, devices: int = 1) -> float | None:
    """Predicts the least seconds of a program from the published figures of a JAX device, None where there are none.

    Bytes read and operations are those of all devices together, `sent` those of each link.
    """
    published = TERAFLOPS.get(device.device_kind)
    chip = next((chip for chip in CHIPS.values() if chip.teraflops == published), None)
    return None if chip is None else max(chip.seconds(read, operations) / devices, sent / (chip.link * 1e9))
