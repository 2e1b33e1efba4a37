"""Progress of a long start: a bar on a terminal, lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from tqdm import tqdm

from eagle3_jax.runs.command import stop_point

# True: a bar. False: nothing. A function: it gets lines such as "compile: 12 of 60 programs".
Progress = bool | Callable[[str], Any]
T = TypeVar("T")

_SECONDS = 15.0  # least time between two lines of a stage


def steps(items: Sequence[T], name: str, unit: str, progress: Progress) -> Iterator[T]:
    """Yields the items and shows how many are done; a verb that was asked to stop ends between two."""
    if not callable(progress):
        for item in tqdm(items, desc=name, unit=unit, disable=not progress):
            stop_point()
            yield item
        return
    said = float("-inf")
    for number, item in enumerate(items):
        stop_point()
        if time.monotonic() - said >= _SECONDS:
            progress(f"{name}: {number} of {len(items)} {unit}s")
            said = time.monotonic()
        yield item
