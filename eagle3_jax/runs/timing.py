"""Times several functions in turns, so that a slow phase of the machine affects all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from eagle3_jax.runs import processes

_TURNS = 9
_SECONDS = 2.0  # enough time for a long work


def in_turns(works: Sequence[Callable[[], object]], prepare: Callable[[], object], turns: int = _TURNS) -> list[float]:
    """Measures works in turns, `prepare` before each; returns the lower quartile of each one's seconds.

    The first call of each, which compiles, does not count. A single process takes fewer turns of long works. Several
    processes must call a work of their mesh equally often.
    """
    times: list[list[float]] = [[] for _ in works]
    for turn in range(-1, turns):
        for work, taken in zip(works, times, strict=True):
            if turn > 1 and sum(taken) > _SECONDS and processes.count() == 1:
                continue
            prepare()
            start = time.perf_counter()
            work()
            if turn >= 0:
                taken.append(time.perf_counter() - start)
    return [sorted(taken)[len(taken) // 4] for taken in times]
