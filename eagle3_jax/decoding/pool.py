"""Replicas: engines of one target behind one queue, each on its own row of the mesh."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eagle3_jax.decoding.data_parallel import together
from eagle3_jax.decoding.engine import GREEDY, Engine
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.prompt import Prompt
from eagle3_jax.decoding.request import QueueFullError, Request
from eagle3_jax.runs import processes
from eagle3_jax.runs.progress import Progress


class EnginePool:
    """Answers requests with the engine that has the least to do before; any thread may call.

    The `engines` are of one target and one draft, with the same sizes. At most `queue_limit` requests wait, in all of
    them together; None leaves each engine its own limit.
    """

    def __init__(self, engines: Sequence[Engine], queue_limit: int | None = None) -> None:
        self.engines, self._queue_limit = list(engines), queue_limit
        self._lock = threading.Lock()
        self._resting: set[int] = set()  # numbers of the replicas that `drained` took out

    @property
    def tokenizer(self) -> Any:
        return self.engines[0].tokenizer

    @property
    def max_length(self) -> int:
        """Most tokens of a prompt and its answer."""
        return self.engines[0].max_length

    @property
    def batch_size(self) -> int:
        """Sequences decoded together, by all replicas."""
        return sum(engine.batch_size for engine in self.engines)

    @property
    def running(self) -> int:
        """Requests in the batches of all replicas."""
        return sum(engine.stats().running for engine in self.engines)

    @property
    def stalled(self) -> float:
        """The longest `EngineStats.stalled` of a replica, in seconds."""
        return max(engine.stats().stalled for engine in self.engines)

    def encode(
        self,
        prompt: Prompt,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Encodes a prompt, see `Engine.encode`."""
        return self.engines[0].encode(prompt, chat_template_kwargs, tools)

    def submit(self, prompt: Prompt, params: SamplingParams = GREEDY, **options: Any) -> Request:
        """Queues a request, see `Engine.submit`, at the replica with the fewest tokens to read and write.

        One that holds the prompt's prefix need not read it, so the request goes there, unless more tokens wait there
        than the prefix has. Raises QueueFullError: `queue_limit` requests wait already.
        """
        ids = self.encode(prompt)
        with self._lock:  # the next request finds this one counted
            if self._queue_limit is not None:
                waiting = sum(engine.stats().waiting for engine in self.engines)
                if waiting >= self._queue_limit:
                    raise QueueFullError(f"queue: got {waiting} waiting requests, expected less than the limit")
            serving = [engine for number, engine in enumerate(self.engines) if number not in self._resting]
            return min(serving, key=lambda engine: engine.left(ids)).submit(ids, params, **options)

    def abort(self, *requests: Request) -> None:
        """Ends requests with the tokens that they have; a finished request stays as it is."""
        for request in requests:
            request.abort()

    @contextlib.contextmanager
    def drained(self, number: int) -> Iterator[Engine]:
        """Takes a replica out for a `with` block, once its requests are answered; the others serve on.

        Yields the idle engine at this place of `engines`, for instance for `Engine.replace_draft`. Raises ValueError:
        it is out already, or the last one that serves.
        """
        with self._lock:
            serving = {*range(len(self.engines))} - self._resting
            if number not in serving or len(serving) == 1:
                raise ValueError(f"number: got {number}, expected one of several that serve: {sorted(serving)} do")
            self._resting.add(number)
        try:
            self.engines[number].finish()
            yield self.engines[number]
        finally:
            with self._lock:
                self._resting.discard(number)

    @property
    def compiling(self) -> str | None:
        """How far the warm-up is; None where it is complete."""
        stats = [engine.stats() for engine in self.engines]
        ready, planned = sum(one.ready_programs for one in stats), sum(one.planned_programs for one in stats)
        return f"{ready} of {planned} programs are ready" if ready < planned else None

    def warm_up(
        self, cache: str | pathlib.Path | None = None, *, progress: Progress = True, background: bool = False
    ) -> None:
        """Warms up all replicas, see `Engine.warm_up`; what the first one measured holds for all, where it is kept.

        Each replica compiles its own programs: those of other devices are others. With a folder, all but the first
        compile at the same time. The first one alone has bars.
        """
        first, *others = self.engines
        first.warm_up(cache, progress=progress, background=background)

        def warm(number: int, engine: Engine) -> None:
            def say(line: str) -> None:
                if callable(progress):
                    progress(f"replica {number} of {len(self.engines)}: {line}")

            engine.warm_up(cache, progress=say, background=background)

        works = [functools.partial(warm, *place) for place in enumerate(others, 2)]
        if cache is None or processes.count() > 1:  # each measures, or all processes do the same
            for work in works:
                work()
        else:
            together(works)
