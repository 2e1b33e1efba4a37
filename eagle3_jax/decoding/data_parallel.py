"""Several engines in one process, each on a row of the mesh: a target for each, prompts dealt over them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from eagle3_jax.decoding.engine import Engine, Output, SamplingParams
from eagle3_jax.decoding.prompt import Prompt
from eagle3_jax.mesh import Replica, on_row
from eagle3_jax.models.checkpoint.fetch import Target

Result = TypeVar("Result")


def targets(target: Target, replica: Replica) -> list[Target]:
    """Makes the target of each engine of a replica, a view of the arrays on its row.

    Args:
        target: loaded on `replica.mesh`.
    """
    rows = replica.rows
    if len(rows) == 1:
        return [target]
    return [dataclasses.replace(target, model=on_row(target.model, row)) for row in rows]


def generate(
    engines: Sequence[Engine],
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    on_output: Callable[[int, Output], object],
) -> None:
    """Answers prompts as `Engine.generate` does, dealt over engines, one answer each.

    Args:
        on_output: called by one thread at a time. An exception ends the other engines at their next answer.
    """
    lock, ended = threading.Lock(), threading.Event()

    def answer(number: int) -> None:
        own = range(number, len(prompts), len(engines))

        def report(index: int, output: Output) -> None:
            with lock:
                if ended.is_set():
                    raise _Ended
                on_output(own[index], output)

        try:
            if own:
                engines[number].generate([prompts[i] for i in own], [params[i] for i in own], report)
        except BaseException:
            ended.set()
            raise

    together([lambda number=number: answer(number) for number in range(len(engines))])


def answers(engines: Sequence[Engine], prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Output]:
    """The answers of `generate`, in the prompts' order."""
    found: dict[int, Output] = {}
    generate(engines, prompts, params, found.__setitem__)
    return [found[index] for index in range(len(prompts))]


def together(works: Sequence[Callable[[], Result]]) -> list[Result]:
    """Runs each work in a thread, a single one in this thread; returns the results, or raises the first exception."""
    if len(works) == 1:
        return [works[0]()]
    with concurrent.futures.ThreadPoolExecutor(len(works), "eagle3_jax row") as threads:
        running = [threads.submit(work) for work in works]
        failures = [future.exception() for future in concurrent.futures.as_completed(running)]
    for failure in failures:
        if failure is not None and not isinstance(failure, _Ended):
            raise failure
    return [future.result() for future in running]


class _Ended(Exception):
    """Another engine failed."""
