"""Times of several works, measured in turns: a slow phase of the machine affects all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from eagle3_jax.runs import processes

_TURNS = 9
_SECONDS = 2.0  # enough for one work that takes long


def in_turns(works: Sequence[Callable[[], object]], prepare: Callable[[], object]) -> list[float]:
    """The lower quartile of each work's times, in turns: what slows a machine down for a while only ever adds to them.

    Few turns of what takes long, but of one process alone: of several all have to call a work of their mesh as often.

    Args:
        works: return when their work is done; the first call of each, which compiles, does not count.
        prepare: called in front of each.
    """
    times: list[list[float]] = [[] for _ in works]
    for turn in range(-1, _TURNS):
        for work, taken in zip(works, times, strict=True):
            if turn > 1 and sum(taken) > _SECONDS and processes.count() == 1:
                continue
            prepare()
            start = time.perf_counter()
            work()
            if turn >= 0:
                taken.append(time.perf_counter() - start)
    return [sorted(taken)[len(taken) // 4] for taken in times]
