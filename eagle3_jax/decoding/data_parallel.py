"""Several engines in one process, each on a row of the mesh: a target for each, prompts dealt over them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from eagle3_jax.decoding.engine import Asked, Engine, Name, Output, SamplingParams
from eagle3_jax.decoding.prompt import Prompt
from eagle3_jax.mesh import Replica, on_row
from eagle3_jax.models.checkpoint.fetch import Target

Result = TypeVar("Result")


def targets(target: Target, replica: Replica) -> list[Target]:
    """Makes the target of each engine of a replica, a view of the arrays on its row; `target` is on its mesh."""
    rows = replica.rows
    if len(rows) == 1:
        return [target]
    return [dataclasses.replace(target, model=on_row(target.model, row)) for row in rows]


def converse(
    engines: Sequence[Engine], asked: Iterator[Asked[Name]], on_output: Callable[[Name, Output], Asked[Name] | None]
) -> None:
    """Answers a stream of prompts as `Engine.converse` does; the engine that has room takes the next one.

    A conversation stays with its engine, whose caches hold it. One thread at a time calls `asked` and `on_output`. An
    exception ends the other engines at their next answer.
    """
    lock, ended = threading.Lock(), threading.Event()

    def dealt() -> Iterator[Asked[Name]]:
        while True:
            with lock:
                item = next(asked, None)
            if item is None:
                return
            yield item

    def report(name: Name, output: Output) -> Asked[Name] | None:
        with lock:
            if ended.is_set():
                raise _Ended
            return on_output(name, output)

    def work(engine: Engine) -> None:
        try:
            engine.converse(dealt(), report)
        except BaseException:
            ended.set()
            raise

    together([functools.partial(work, engine) for engine in engines])


def generate(
    engines: Sequence[Engine],
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    on_output: Callable[[int, Output], object],
) -> None:
    """Answers prompts, one answer each; see `converse`. `on_output` gets the prompt's index, and its answer."""

    def report(index: int, output: Output) -> None:
        on_output(index, output)

    converse(engines, zip(range(len(prompts)), prompts, params, strict=True), report)


def answers(engines: Sequence[Engine], prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Output]:
    """The answers of `generate`, in the prompts' order."""
    found: dict[int, Output] = {}
    generate(engines, prompts, params, found.__setitem__)
    return [found[index] for index in range(len(prompts))]


def together(works: Sequence[Callable[[], Result]]) -> list[Result]:
    """Runs each work in a thread, a single one in this thread; returns the results, or raises the first exception."""
    if len(works) < 2:
        return [work() for work in works]
    with concurrent.futures.ThreadPoolExecutor(len(works), "eagle3_jax row") as threads:
        running = [threads.submit(work) for work in works]
        failures = [future.exception() for future in concurrent.futures.as_completed(running)]
    for failure in failures:
        if failure is not None and not isinstance(failure, _Ended):
            raise failure
    return [future.result() for future in running]


class _Ended(Exception):
    """Another engine failed."""
