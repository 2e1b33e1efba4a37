"""Runs the engine requests of one HTTP request: submits, merges pieces, aborts when the client is gone."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.pool import EnginePool
from eagle3_jax.decoding.request import Output, Piece, QueueFullError, Request
from eagle3_jax.serve.bodies import ApiError, stops
from eagle3_jax.serve.limits import queue_full
from eagle3_jax.serve.metrics import Metrics

_log = logging.getLogger(__name__)
_access = logging.getLogger("uvicorn.error")  # shown where `serve.access_log` is on, see `startup.http_settings`


AnyEngine = Engine | EnginePool


def submit(
    engine: AnyEngine, prompts: Sequence[list[int]], params: SamplingParams, count: int, until: float, **options: bool
) -> list[Request]:
    """Submits `count` answers to each prompt, or none at all. Slow: call it outside the event loop's thread.

    `until` is a time of time.monotonic, the options are those of `Engine.submit`. Raises ApiError: the queue is full.
    ValueError: the engine refuses a prompt or the parameters.
    """
    requests: list[Request] = []
    try:
        samples: collections.Counter[tuple[int, ...]] = collections.Counter()
        for ids in prompts:
            key = tuple(ids)
            for _ in range(count):
                left = max(until - time.monotonic(), 1e-3)
                requests.append(engine.submit(ids, params, timeout=left, sample=samples[key], **options))
                samples[key] += 1  # equal prompts draw further samples
    except BaseException as error:
        engine.abort(*requests)
        if isinstance(error, QueueFullError):
            raise queue_full() from error
        raise
    return requests


async def submitted(engine: AnyEngine, submitting: concurrent.futures.Future[list[Request]]) -> list[Request]:
    """Awaits a `submit` in another thread; a cancelled wait aborts its requests."""

    def abort(done: concurrent.futures.Future[list[Request]]) -> None:
        if not done.cancelled() and done.exception() is None:
            engine.abort(*done.result())

    try:
        return await asyncio.wrap_future(submitting)
    except asyncio.CancelledError:
        submitting.add_done_callback(abort)
        raise


class Answers:
    """The answers of one HTTP request, by index; those to one prompt are consecutive.

    A task for each answer, one of all the server's `tasks`, takes its pieces at the engine's pace, however slowly the
    client reads; pieces that wait for the client are bounded by the longest answer. Leaving the context aborts
    unfinished answers. `count` is of each prompt, `arrived` the HTTP request's time.monotonic.
    """

    def __init__(
        self,
        engine: AnyEngine,
        metrics: Metrics,
        tasks: set[asyncio.Task[None]],
        requests: Sequence[Request],
        count: int,
        arrived: float,
    ) -> None:
        self.requests, self.count = requests, count
        self._engine, self._metrics, self._arrived = engine, metrics, arrived
        self._news: asyncio.Queue[tuple[int, Piece] | None] = asyncio.Queue()  # None: a reader failed
        for index, request in enumerate(self.requests):
            task = asyncio.create_task(self._take(index, request))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def __aenter__(self) -> Answers:
        return self

    async def __aexit__(self, *_: Any) -> None:
        self.abort()
        seconds, written = time.monotonic() - self._arrived, sum(len(x.tokens) - len(x.ids) for x in self.requests)
        ends = ", ".join(sorted({"abort" if x.output is None else x.output.finish_reason for x in self.requests}))
        read = sum(len(request.ids) for request in self.requests[:: self.count])
        shown = "read %d tokens, wrote %d in %.2f s, %.1f tokens/s: %s"
        _access.info(shown, read, written, seconds, written / seconds, ends)

    @property
    def whole(self) -> bool:
        """True once all answers have ended."""
        return all(request.done for request in self.requests)

    def abort(self) -> None:
        """Ends the answers with the tokens that they have."""
        self._engine.abort(*[request for request in self.requests if not request.done])

    async def wait(self) -> None:
        """Waits for the end of all answers. Raises as `pieces` does."""
        async for _ in self.pieces():
            pass

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yields pieces of all answers as they arrive; the last one of each answer has a finish reason.

        Raises ApiError: an answer ended by timeout, abortion or an error; the task that takes its pieces failed.
        """
        left = len(self.requests)
        while left:
            news = await self._news.get()
            if news is None:
                raise ApiError(500, "request: the server failed; its log says why", code="internal_error")
            index, piece = news
            if piece.finish_reason is not None:
                left -= 1
            if piece.finish_reason == "timeout":
                raise ApiError(504, "request: got no whole answer in the time that this server gives", code="timeout")
            if piece.finish_reason == "abort":
                raise stops()
            if piece.finish_reason == "error":
                raise ApiError(500, f"request: {self.output(index).error}", code="engine_error")
            yield index, piece

    def output(self, index: int) -> Output:
        """Returns a finished answer."""
        output = self.requests[index].output
        assert output is not None
        return output

    def usage(self, written: int | None = None) -> dict[str, Any]:
        """Counts tokens in OpenAI's shape, of the answers so far `written`; None, for finished answers, is all of them.

        A prompt counts once, however many answers it has.
        """
        prompts = self.requests[:: self.count]
        read = sum(len(request.ids) for request in prompts)
        if written is None:
            written = sum(len(self.output(index).token_ids) for index in range(len(self.requests)))
        details = {"cached_tokens": sum(request.cached for request in prompts)}
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        return usage | {"prompt_tokens_details": details}

    async def _take(self, index: int, request: Request) -> None:
        before = None
        try:
            async for piece in request:
                now = time.monotonic()
                if piece.token_ids and before is None:
                    self._metrics.began(now - self._arrived)
                self._metrics.delivered(len(piece.token_ids), None if before is None else now - before)
                before = now if piece.token_ids else before
                self._news.put_nowait((index, piece))
            self._metrics.ended(self.output(index))
        except (Exception, asyncio.CancelledError):
            _log.exception("reading an answer's pieces failed")
            self._news.put_nowait(None)  # no further piece will arrive
