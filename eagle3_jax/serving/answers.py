"""The engine's requests behind one HTTP request: their pieces as they come, and their end when nobody is left."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.request import Output, Piece, QueueFullError, Request
from eagle3_jax.decoding.sampling import SamplingParams
from eagle3_jax.serving.errors import ApiError
from eagle3_jax.serving.limits import queue_full
from eagle3_jax.serving.metrics import Metrics


class Answers:
    """Several answers that belong together, by index: all of one prompt follow each other.

    A task for each takes its pieces at the engine's pace, however slowly the client reads: what waits for the client is
    no more than the longest answer. Leaving the context aborts what has not ended.
    """

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        tasks: set[asyncio.Task[None]],
        prompts: Sequence[list[int]],
        params: SamplingParams,
        count: int,
        timeout: float,
        *,
        drafts: bool,
    ) -> None:
        """Hands in all of them, or none.

        Args:
            tasks: of the whole server, until they end.
            count: answers to each prompt. timeout: seconds. drafts: see `Engine.submit`.

        Raises:
            ApiError: more than may wait. ValueError: what the engine refuses.
        """
        self.prompts, self.params, self.count = prompts, params, count
        self.requests: list[Request] = []
        self._engine, self._metrics = engine, metrics
        self._news: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        try:
            asked: collections.Counter[tuple[int, ...]] = collections.Counter()
            for ids in self.prompts:
                for _ in range(self.count):  # equal prompts are further samples, not the same one again
                    sample = asked[key := tuple(ids)]
                    asked[key] += 1
                    request = self._engine.submit(ids, params, timeout=timeout, sample=sample, drafts=drafts)
                    self.requests.append(request)
        except BaseException as error:
            self._engine.abort(*self.requests)
            if isinstance(error, QueueFullError):
                raise queue_full() from error
            raise
        for index, request in enumerate(self.requests):
            task = asyncio.create_task(self._take(index, request))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def __aenter__(self) -> Answers:
        return self

    async def __aexit__(self, *_: Any) -> None:
        self._engine.abort(*[request for request in self.requests if not request.done])

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """As they come, of all answers; the last one of each has a finish reason. Raises ApiError: see `check`."""
        left = len(self.requests)
        while left:
            index, piece = await self._news.get()
            if piece.finish_reason is not None:
                self.check(index)
                left -= 1
            yield index, piece

    def output(self, index: int) -> Output:
        """An answer that has ended."""
        output = self.requests[index].output
        assert output is not None
        return output

    def check(self, index: int) -> None:
        """Raises ApiError for an answer that was not ended by the model or by what was asked for."""
        output = self.output(index)
        if output.finish_reason == "timeout":
            raise ApiError(504, "request: got no whole answer in the time that this server gives", code="timeout")
        if output.finish_reason == "abort":
            raise ApiError(503, "request: aborted, the server stops", code="aborted", retry_after=1.0)
        if output.finish_reason == "error":
            raise ApiError(500, f"request: {output.error}", code="engine_error")

    def usage(self, written: int | None = None) -> dict[str, Any]:
        """Tokens, in OpenAI's shape; a prompt counts once, however many answers it has.

        Args:
            written: tokens of the answers so far; None, of answers that have ended, are all of them.
        """
        read = sum(map(len, self.prompts))
        if written is None:
            written = sum(len(self.output(index).token_ids) for index in range(len(self.requests)))
        cached = sum(self.requests[index].cached for index in range(0, len(self.requests), self.count))
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    async def _take(self, index: int, request: Request) -> None:
        before = None
        async for piece in request:
            now = time.monotonic()
            self._metrics.delivered(len(piece.token_ids), None if before is None else now - before)
            before = now if piece.token_ids else before
            self._news.put_nowait((index, piece))
        self._metrics.ended(self.output(index))
