"""A request: its parameters, its answer so far, and the callers that wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np

from eagle3_jax.acceptance import AcceptanceCounts
from eagle3_jax.decoding.choice.policy import Acceptance
from eagle3_jax.decoding.device.report import Advance, RoundTree
from eagle3_jax.decoding.pages import PageAllocation
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.structured.compile import Table
from eagle3_jax.decoding.text import Channels, Detokenizer, StopScanner

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]
Ending = tuple[FinishReason, str | None]  # the finish reason, and the message of an "error"

Name = TypeVar("Name")

_log = logging.getLogger(__name__)


class QueueFullError(RuntimeError):
    """The queue is full (`queue_limit`): the request was refused before any work."""


@dataclasses.dataclass(frozen=True)
class Stats:
    """Acceptance and latency of one request.

    Attributes:
        rounds: target passes after prefill.
        accepted_per_position: rounds in which the draft at depth 1, 2, ... was accepted.
        cached_tokens: tokens of the prompt that an earlier request had read already (prefix reuse).
        seconds_to_first_token: time from `submit` to the first token; None where there is no token.
    """

    rounds: int
    accepted_per_position: list[int]
    cached_tokens: int = 0
    seconds_to_first_token: float | None = dataclasses.field(default=None, compare=False)

    @property
    def counts(self) -> AcceptanceCounts:
        return AcceptanceCounts(self.rounds, self.accepted_per_position)

    @property
    def acceptance_length(self) -> float:
        """Tokens per round, the bonus token included (tau): 1 without a draft."""
        return self.counts.tau


@dataclasses.dataclass(frozen=True)
class Logprob:
    """Natural log-probabilities of one output token under the target.

    Attributes:
        token_id: the token.
        logprob: before rules, temperature and filters (vLLM's raw_logprobs).
        top: the best tokens with theirs, best first.
        processed: under the distribution that the token was drawn from, behind rules, temperature and filters (vLLM's
            processed_logprobs); 0 at temperature 0, which has one choice. Reinforcement learning divides by this one.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    processed: float


@dataclasses.dataclass(frozen=True)
class Output:
    """One answer.

    Attributes:
        token_ids: tokens of the answer, without the prompt; a stop token that ended it is the last one.
        text: the answer without special tokens, without the stop token's text, cut in front of a stop string, and
            without an incomplete last character. The pieces of a stream join to the same text.
        finish_reason: "stop": end of sequence, a stop token or string; "length": `max_tokens`, or the engine's
            `max_length`; "abort"; "timeout": the deadline passed; "error": see `error`.
        stats: rounds, accepted drafts, reused tokens of the prompt, and the time to the first token.
        logprobs: one for each token, where the request asked for them, else None.
        error: the failure that ended the answer, as one sentence; None without one. The tokens before it stay.
        reasoning: text in other channels than the answer's (gpt-oss), see `Channels`.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stats: Stats
    logprobs: list[Logprob] | None = None
    error: str | None = None
    reasoning: str = ""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a streamed answer; the last one has the finish reason. Text never ends inside a character.

    Attributes:
        text: text that became complete with these tokens; the pieces' texts join to the `Output`'s.
        token_ids: the new tokens; may be empty in the last piece.
        finish_reason: None before the last piece; see `Output`.
        depths: depth of each token's draft in its round's tree; 0 where the token is the target's own. A round gives
            its accepted drafts (1, 2, ...), then one of the target's own, unless the answer ends before.
        tree: the tree of the latest round; None before the first one.
        logprobs: one for each of the tokens, where the request asked for them, else None.
        reasoning: new text in other channels, see `Output`.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    depths: list[int]
    tree: RoundTree | None
    logprobs: list[Logprob] | None = None
    reasoning: str = ""


@runtime_checkable
class Driver(Protocol):
    """The engine loop as requests see it: it works while a caller waits."""

    def drive(self, ready: Callable[[], bool]) -> None: ...
    def drive_in_background(self) -> None: ...
    def abort(self, *requests: Request) -> None: ...


_numbers = itertools.count()


class Request:
    """A submitted request: iterate over it for pieces of its answer, or ask for the `result`.

    The engine works while a caller waits: in `result`, in a loop over pieces, in `Engine.generate`. The asynchronous
    forms (`await request`, `async for`) leave the work to a thread, which ends when no work is left. A caller that
    leaves an asynchronous form early (cancelled, by an error, by `break`) aborts the request, unless others await it.
    """

    def __init__(
        self,
        driver: Driver,
        tokenizer: Any,
        ids: list[int],
        params: SamplingParams,
        limit: int,
        sample: int,
        *,
        drafts: bool = True,
        adapt: bool = True,
        timeout: float | None = None,
        table: Table | None = None,
    ) -> None:
        self.ids, self.params, self.limit, self.sample, self.drafts = ids, params, limit, sample, drafts
        self.adapt, self.table = adapt, table
        self._submitted = time.monotonic()
        self.deadline = None if timeout is None else self._submitted + min(timeout, threading.TIMEOUT_MAX)
        self.output: Output | None = None
        self.failure: Exception | None = None  # a failure of the device, or around it, that ended the request
        # The scheduler's notes.
        self.number = next(_numbers)
        self.aborted = False
        self.allocation: PageAllocation | None = None
        self.slot = 0  # in the batch
        self.place = 0  # of its constraint's table
        self.read = 0  # tokens of the prompt that were reused, or dispatched to be read
        self.acceptance = Acceptance()
        self._driver, self._tokenizer = driver, tokenizer
        self._special = not params.skip_special_tokens
        self._scanner = StopScanner(tokenizer, params.stop, ids, self._special) if params.stop else None
        self._first: float | None = None
        self._token_ids: list[int] = []
        self._spoken = 0  # tokens whose text is the answer's: all but a stop token
        self._depths: list[int] = []
        self._tree: np.ndarray | None = None
        self._logprobs: list[Logprob] = []
        self._counts = AcceptanceCounts()
        self._listeners: set[Callable[[], object]] = set()  # called at all news, by the working thread
        # State of the iteration over pieces.
        self._channels = Channels(tokenizer, ids, self._special)
        self._detokenizer, self._reasoning = Detokenizer(tokenizer, self._special), Detokenizer(tokenizer)
        self._ready = self._taken = 0  # tokens so far, and tokens taken
        self._taken_text = 0
        self._ended = False

    # For callers.

    @property
    def done(self) -> bool:
        """True once the answer is whole."""
        return self.output is not None

    def result(self) -> Output:
        """Waits for the whole answer; a failure of the device is its `error`."""
        self._driver.drive(lambda: self.done)
        assert self.output is not None
        return self.output

    def abort(self) -> None:
        """Ends the request with the tokens so far ("abort"); a finished one stays as it is. No wait is needed."""
        self._driver.abort(self)

    def __iter__(self) -> Iterator[Piece]:
        """Yields the pieces not taken yet, as they come."""
        while not self._ended:
            self._driver.drive(self._has_news)
            yield self._piece()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        with self._listening() as news:
            while not self._ended:
                await self._until(self._has_news, news)
                yield self._piece()

    def __await__(self) -> Generator[Any, None, Output]:
        return self._whole().__await__()

    async def _whole(self) -> Output:
        with self._listening() as news:
            await self._until(lambda: self.done, news)
        assert self.output is not None
        return self.output

    async def _until(self, ready: Callable[[], bool], news: asyncio.Event) -> None:
        while not ready():
            self._driver.drive_in_background()
            await news.wait()
            news.clear()

    @contextlib.contextmanager
    def _listening(self) -> Iterator[asyncio.Event]:
        """Yields an event of the running loop, set at all news; the last listener that leaves early aborts."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(news.set)

        self._listeners.add(wake)
        try:
            yield news
        finally:
            self._listeners.discard(wake)
            if not self.done and not self._listeners:
                self.abort()

    def _has_news(self) -> bool:
        return self.done or self._ready > self._taken

    def _piece(self) -> Piece:
        output = self.output  # read before the tokens: an ended request has all of them
        new = slice(self._taken, self._ready)
        ids = self._token_ids[new]
        logprobs = None if self.params.logprobs is None else self._logprobs[new]
        answer, thoughts = self._channels.split(self._token_ids[self._taken : min(self._spoken, new.stop)])
        reasoning = self._reasoning.add(thoughts, last=output is not None)
        if self._scanner is None:
            text = self._detokenizer.add(answer, last=output is not None)
        else:
            text = self._scanner.text[self._taken_text : None if output else self._scanner.settled]
            self._taken_text += len(text)
        self._taken, self._ended = new.stop, output is not None
        reason = None if output is None else output.finish_reason
        tree = None if self._tree is None else RoundTree.of(self._tree)
        return Piece(text, ids, reason, self._depths[new], tree, logprobs, reasoning)

    # For the engine.

    def is_late(self, now: float) -> bool:
        return self.deadline is not None and now >= self.deadline

    @property
    def cached(self) -> int:
        """Tokens of the prompt that were reused."""
        return 0 if self.allocation is None else self.allocation.reused

    @property
    def left(self) -> int:
        """Tokens still to read and, at most, to write."""
        return len(self.ids) - self.read + self.limit - len(self._token_ids)

    @property
    def length(self) -> int:
        """Number of `tokens`."""
        return len(self.ids) + len(self._token_ids)

    @property
    def tokens(self) -> list[int]:
        """Token ids of the prompt and the answer so far."""
        return self.ids + self._token_ids

    def take(self, progress: Advance, eos: frozenset[int]) -> Ending | None:
        """Adds a dispatch's tokens. Returns the ending, or None where the request goes on."""
        self._counts += AcceptanceCounts(progress.rounds, progress.accepted)
        self.acceptance.unread = progress.unread
        if progress.token_ids and self._first is None:
            self._first = time.monotonic() - self._submitted
        stops = {*self.params.stop_token_ids} | (frozenset() if self.params.ignore_eos else eos)
        by_token = progress.done and not progress.failed and progress.token_ids[-1] in stops
        try:
            count, by_string = self._until_stop_string(progress.token_ids[: len(progress.token_ids) - by_token])
        except Exception as error:
            return "error", format_error(error)
        by_token = by_token and not by_string
        count += by_token
        if (asked := self.params.logprobs) is not None:
            for token, (value, processed, best) in zip(progress.token_ids[:count], progress.logprobs, strict=False):
                self._logprobs.append(Logprob(token, value, best[:asked], processed))
        if progress.tree is not None:
            self._tree = progress.tree
        self._depths += progress.depths[:count]
        self._token_ids += progress.token_ids[:count]
        self._spoken = len(self._token_ids) - by_token
        self._ready = len(self._token_ids)  # set last: from here on another thread takes the tokens
        if by_token or by_string:
            return "stop", None
        if progress.failed:
            return "error", "logits: got values that are not finite, expected numbers"
        return ("length", None) if progress.done else None

    def finish(self, reason: FinishReason, error: str | None = None) -> Output:
        """Makes the answer of the tokens so far; callers see it from `publish` on.

        Never raises: tokens that the tokenizer cannot decode make an answer without text ("error").
        """
        try:
            channels = Channels(self._tokenizer, self.ids, self._special)
            answer, thoughts = channels.split(self._token_ids[: self._spoken])
            if self._scanner is None:
                text = Detokenizer(self._tokenizer, self._special).add(answer, last=True)
            else:
                text = self._scanner.end()
            reasoning = Detokenizer(self._tokenizer).add(thoughts, last=True)
        except Exception as failure:
            reason, error, text, reasoning = "error", error or format_error(failure), "", ""
        stats = Stats(self._counts.rounds, self._counts.accepted, self.cached, self._first)
        logprobs = None if self.params.logprobs is None else self._logprobs
        return Output(list(self._token_ids), text, reason, stats, logprobs, error, reasoning)

    def publish(self, output: Output) -> None:
        """Ends the request, and tells all listeners."""
        self.output = output
        self.tell()

    def tell(self) -> None:
        """Tells all listeners of news. Never raises: a listener that fails (its event loop was closed) is dropped."""
        for wake in list(self._listeners):
            try:
                wake()
            except Exception as error:
                self._listeners.discard(wake)
                _log.debug("a listener is dropped: %r", error)

    def _until_stop_string(self, ids: list[int]) -> tuple[int, bool]:
        """Returns how many of the new tokens count, and whether a stop string ends the answer with them."""
        if self._scanner is not None:
            for count, token in enumerate(ids, 1):
                if self._scanner.add(token, look=len(self._token_ids) + count >= self.params.min_tokens):
                    return count, True
        return len(ids), False


def format_error(error: Exception) -> str:
    """Formats an exception as an answer's error."""
    return f"{type(error).__name__}: {error}"


def report_ended(left: dict[Request, Name], on_output: Callable[[Name, Output], object] | None) -> Exception | None:
    """Takes the ended requests out of `left` and reports them all, then raises the first exception of `on_output`.

    Returns the failure of the device that ended one of them; that request is not reported.
    """
    failure, raised = None, list[BaseException]()
    for request in [request for request in left if request.done]:
        name = left.pop(request)
        if request.failure is not None:
            failure = failure or request.failure
        elif on_output is not None and request.output is not None:
            try:
                on_output(name, request.output)
            except BaseException as error:
                raised.append(error)
    if raised:
        raise raised[0]
    return failure
