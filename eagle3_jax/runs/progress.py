"""Shows the progress of long work: a bar on a terminal, lines in a log."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from tqdm import tqdm

from eagle3_jax.runs import processes

# True: a bar on a terminal, else lines on stderr. False: nothing. A function: it gets the lines, such as
# "compile: 12 of 60 programs".
Progress = bool | Callable[[str], Any]
T = TypeVar("T")

_SECONDS = 15.0  # least time between two lines
_PATIENCE = 2.0  # seconds without a word


def shown(items: Sequence[T], name: str, unit: str, progress: Progress) -> Iterator[T]:
    """Yields the items and shows how many are done. Only a function is told at the beginning, too."""
    if progress is False or (progress is True and sys.stderr.isatty()):
        yield from tqdm(items, desc=name, unit=unit, disable=not progress or processes.index() > 0)
        return
    tell = progress if callable(progress) else processes.say
    shown_at = float("-inf") if callable(progress) else time.monotonic()
    for number, item in enumerate(items):
        if time.monotonic() - shown_at >= _SECONDS:
            tell(f"{name}: {number} of {len(items)} {unit}s")
            shown_at = time.monotonic()
        yield item


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """Says on stderr what is done where it takes longer than two seconds, now and then, and how long it took."""
    ended, start = threading.Event(), time.monotonic()

    def tell() -> None:
        wait = _PATIENCE
        while not ended.wait(wait):
            processes.say(f"eagle3_jax: {what} ... {time.monotonic() - start:.0f} s so far")
            wait = _SECONDS

    teller = threading.Thread(target=tell, name="eagle3_jax progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
    if (seconds := time.monotonic() - start) >= _PATIENCE:
        processes.say(f"eagle3_jax: {what}: {seconds:.0f} s")
