"""The scheduler: continuous batching of requests on the device, turn by turn.

A turn admits requests that fit, in the order of arrival, and dispatches stretches of prompts and some rounds. While the
device works on these, it delivers the tokens of the turn before. Requests join and leave between two dispatches, which
are short while a request waits. Caches are paged and allocated once: a request is admitted when the pages of its whole
answer are free, so no running request is ever preempted.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import threading
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from eagle3_jax.decoding.adapt.api import AdaptStats, Learner
from eagle3_jax.decoding.choice.tiers import TierChoice
from eagle3_jax.decoding.device import calls, shapes
from eagle3_jax.decoding.device.calls import Call, PromptChunk
from eagle3_jax.decoding.device.report import progress
from eagle3_jax.decoding.device.runner import Runner
from eagle3_jax.decoding.pages import PagePool
from eagle3_jax.decoding.params import MAX_LOGPROBS
from eagle3_jax.decoding.request import FinishReason, Output, QueueFullError, Request, format_error
from eagle3_jax.decoding.rounds.constraint import ConstraintRows
from eagle3_jax.decoding.rounds.state import RequestRows
from eagle3_jax.decoding.structured.pool import CHUNK, TablePool
from eagle3_jax.decoding.tier import Tier
from eagle3_jax.models.target import TargetModel

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class EngineStats:
    """Counters of an engine since it was made, and its state now.

    Attributes:
        programs: programs compiled for it.
        ready_programs, planned_programs: those that the warm-up made for requests, and how many it will have made at
            most; they are equal once it is complete, and 0 without one.
        dispatches: programs given to the device.
        rounds: rounds of all requests together.
        tiers: dispatches of rounds by tier.
        tier: tier of the latest rounds; None before the first.
        prompt_tokens: tokens of all prompts.
        cached_tokens: tokens of prompts that an earlier request had read already (prefix reuse).
        finished: requests by finish reason.
        refused: requests that never began.
        running, waiting: requests now.
        free_pages, pages: pages of the caches.
        stalled: seconds since work last came back from the device, 0 while no thread works. It grows where a device
            hangs, and during a compilation.
        adapt: what the head has learnt; None where it does not learn.
    """

    programs: int = 0
    ready_programs: int = 0
    planned_programs: int = 0
    dispatches: int = 0
    rounds: int = 0
    tiers: dict[str, int] = dataclasses.field(default_factory=dict)
    tier: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finished: dict[str, int] = dataclasses.field(default_factory=dict)
    refused: int = 0
    running: int = 0
    waiting: int = 0
    free_pages: int = 0
    pages: int = 0
    stalled: float = 0.0
    adapt: AdaptStats | None = None


class Scheduler:
    """Queue, slots and pages of an engine. Any thread may `add`, `abort` and ask; one thread at a time runs `turn`.

    Of its arguments, `eos` are the token ids that end an answer; the others are `Engine`'s.

    Attributes:
        changes: guards the queue; notified after every turn. Reentrant: a finalizer may abort inside `add`.
        ended: requests that have ended so far.
        delivered: the time (time.monotonic) at which work last came back from the device.
        aborted: whether requests were aborted since the last `sweep`.
        target: the next turn's, see `replace_target`; None once a turn has begun with it.
    """

    def __init__(
        self,
        runner: Runner,
        choice: TierChoice,
        eos: frozenset[int],
        prefix_cache: bool,
        queue_limit: int | None,
        learner: Learner | None = None,
    ) -> None:
        self.changes = threading.Condition()
        self.ended = 0
        self.delivered = -math.inf
        self._runner, self._choice, self._eos, self.queue_limit = runner, choice, eos, queue_limit
        self._learner = learner
        sizes = runner.sizes
        self._pool = PagePool(sizes.pages, sizes.page_size, reuse=prefix_cache, states=sizes.kept_states)
        self._tables = TablePool(sizes.tables, runner.target.config.vocab_size)
        self._stats, self._finished = EngineStats(pages=sizes.pages), collections.Counter[str]()
        self._best = min(MAX_LOGPROBS, runner.target.config.vocab_size)
        tiers = choice.tiers
        self._steps, self._nodes = max(tier.depth for tier in tiers), max(tier.nodes for tier in tiers)
        self._scratch, self._copies = max(tier.scratch for tier in tiers), any(tier.copies for tier in tiers)
        self._waiting: collections.deque[Request] = collections.deque()
        self._slots: list[Request | None] = [None] * sizes.batch
        # Whether a waiting request was aborted, and the first deadline: `sweep` scans the queue for these alone.
        self.aborted, self._first_deadline = False, math.inf
        self.target: TargetModel | None = None
        self._failure: Exception | None = None  # see `fail`
        self._cancelled: set[int] = set()  # slots whose request ended on the host while the device still runs it
        # Unread reports, which numpy waits for; the request of each row; the tier, None of prompts.
        self._reports: collections.deque[tuple[Any, dict[int, Request], Tier | None]] = collections.deque()

    # For any thread.

    def add(self, requests: Iterable[Request], *, limited: bool = False) -> None:
        """Puts requests at the end of the queue; `limited` keeps to `queue_limit`.

        Raises QueueFullError: the queue is full, and nothing was added; or the error that ended all (`fail`).
        """
        with self.changes:
            if self._failure is not None:
                raise self._failure
            if limited and self.queue_limit is not None and len(self._waiting) >= self.queue_limit:
                self._stats.refused += 1
                raise QueueFullError(f"queue: got {len(self._waiting)} waiting requests, expected less than the limit")
            for request in requests:
                self._waiting.append(request)
                if request.deadline is not None:
                    self._first_deadline = min(self._first_deadline, request.deadline)

    def fail(self, error: Exception) -> None:
        """Ends all requests with an error, now and from now on; the device may never answer the working thread."""
        with self.changes:
            self._failure, self._learner = error, None
            requests = self.requests
            self._waiting.clear()
            for request in requests:
                if not request.done:
                    request.failure = error
                    request.publish(request.finish("error", format_error(error)))
            self.changes.notify_all()

    def mark_aborted(self, requests: Iterable[Request]) -> None:
        """Lets the next `sweep` end these requests."""
        with self.changes:
            for request in requests:
                request.aborted = self.aborted = True

    def replace_target(self, target: TargetModel) -> None:
        """Lets the next turn begin with another target (`ModelRunner.packed_target`); no later request reuses pages."""
        with self.changes:
            self.target = target

    @property
    def requests(self) -> list[Request]:
        """The requests that wait or run."""
        with self.changes:
            return [*self._waiting, *filter(None, self._slots)]

    @property
    def has_requests(self) -> bool:
        """True if a request waits or runs."""
        return bool(self.requests)

    @property
    def has_work(self) -> bool:
        """True if a request waits or runs, or a report is unread."""
        return self.has_requests or bool(self._reports)

    @property
    def learns_on(self) -> bool:
        """True while a live head has something to learn."""
        return self._learner is not None and self._learner.learns_on

    def left(self, prompt: Sequence[int] = ()) -> int:
        """See `Engine.left`."""
        with self.changes:
            return len(prompt) - self._pool.cached(prompt) + sum(request.left for request in self.requests)

    def stats(self) -> EngineStats:
        """Copies the counters, but for those of the warm-up and of the engine loop."""
        with self.changes:
            return dataclasses.replace(
                self._stats,
                programs=self._runner.compiled,
                dispatches=self._runner.dispatches,
                tiers=dict(self._choice.dispatches),
                tier=self._choice.latest,
                finished=dict(self._finished),
                running=sum(request is not None for request in self._slots),
                waiting=len(self._waiting),
                free_pages=self._pool.available,
                adapt=None if self._learner is None else dataclasses.replace(self._learner.stats),
            )

    # For the one thread that works.

    def turn(self) -> None:
        """Sweeps, admits, dispatches, then delivers the reports of the turn before.

        Raises an interruption, or a failure before any request began; other failures end in the requests' outputs.
        """
        start = time.monotonic()
        try:
            self._change_target()
            self.sweep()
            self._admit()
            unread = len(self._reports)
            self._dispatch()
            if len(self._reports) == unread:
                unread += 1  # nothing new was dispatched: wait for the newest report
            for _ in range(min(unread, len(self._reports))):
                self._deliver(*self._reports[0])
                self._reports.popleft()
            if not self._reports and not any(self._slots):
                self._pool.check_idle()
            self.learn(busy=time.monotonic() - start)
        except BaseException as error:
            if not self._give_up(error) or not isinstance(error, Exception):
                raise
            if self._failure is None:
                _log.exception("a dispatch failed")
        with self.changes:
            self.changes.notify_all()

    def sweep(self) -> None:
        """Ends requests that were aborted or are past their deadline."""
        now, ended = time.monotonic(), []
        with self.changes:
            if self.aborted or now >= self._first_deadline:  # rebuilt: a verb that stops aborts thousands
                ended = [request for request in self._waiting if request.aborted or request.is_late(now)]
                gone = set(map(id, ended))
                kept = [request for request in self._waiting if id(request) not in gone]
                self._waiting.clear()  # in place: a finalizer may abort inside `add`, in this thread
                self._waiting.extend(kept)
                deadlines = [request.deadline for request in self._waiting if request.deadline is not None]
                self.aborted, self._first_deadline = False, min(deadlines, default=math.inf)
        for request in [*ended, *filter(None, self._slots)]:
            if request.aborted or request.is_late(now):
                self._end(request, "abort" if request.aborted else "timeout")

    def learn(self, *, busy: float = 0.0, idle: float = 0.0) -> None:
        """Lets a live head learn, after seconds of turns and without any; the next dispatch drafts with a better one.

        A failure ends the learning alone.
        """
        if self._learner is None:
            return
        try:
            better = self._learner.learn(busy, idle, self._wait)
        except Exception:
            _log.exception("the head stays as it is: learning failed")
            self._learner = None
            return
        if better is not None:
            self._runner.replace_draft(better)
            self._choice.renew()

    def _wait(self) -> None:
        """Waits for the end of the newest dispatch."""
        if self._reports:
            np.asarray(self._reports[-1][0])

    def forget_device(self) -> None:
        """Resets the state on the device, and begins with empty caches."""
        self._cancelled.clear()
        self._runner.reset()
        pool = self._pool
        self._pool = PagePool(pool.pages, pool.page_size, reuse=pool.reuse, states=pool.states)
        self._tables = self._tables.empty()

    def _change_target(self) -> None:
        with self.changes:
            target, self.target = self.target, None
        if target is None:
            return
        self._runner.replace_target(target)
        self._pool.forget()
        for request in filter(None, self._slots):
            if request.allocation is not None:
                request.allocation.registering = False

    def _admit(self) -> None:
        """Gives slots, pages and places of tables to waiting requests, in the order of arrival."""
        sizes = self._runner.sizes
        for slot in range(len(self._slots)):
            if self._slots[slot] is not None:
                continue
            with self.changes:
                if not self._waiting:
                    return
                request = self._waiting[0]
                request.allocation = self._pool.allocate(request.ids, len(request.ids) + request.limit + self._scratch)
                if request.allocation is None:
                    return  # no request overtakes the first one
                if request.table is not None and (place := self._tables.hold(request.table)) is None:
                    self._pool.release(request.allocation)
                    request.allocation = None
                    return
                self._waiting.popleft()
            if request.table is not None and place is not None:
                request.place, fresh = place
                words = request.table.words[: None if fresh else 0]
                for start in range(0, len(words), CHUNK):
                    self._runner.run(calls.write_table(sizes, request.place + start, words[start : start + CHUNK]))
            request.slot, request.read = slot, request.allocation.reused
            request.acceptance.in_prefix = not request.allocation.drafted
            if request.allocation.state is not None:
                self._runner.run(calls.copy_state(sizes, sizes.batch + request.allocation.state, slot))
            self._slots[slot] = request
            self._stats.prompt_tokens += len(request.ids)
            self._stats.cached_tokens += request.read

    def _dispatch(self) -> None:
        """Dispatches stretches of prompts, then rounds of the requests whose prompt is read."""
        room = shapes.MOST_READ
        while unread := [r for r in self._slots if r is not None and r.read < len(r.ids)]:
            unread.sort(key=lambda request: request.number)
            left = [self._stop(request) - request.read for request in unread]
            count, length = self._runner.sizes.prefill_shape_for(left, self._runner.prefill_shapes)
            room -= count * length
            if room < 0:
                break
            self._read_prompts(unread, count, length)
        held = {slot: request for slot, request in enumerate(self._slots) if request is not None}
        running = {slot: request for slot, request in held.items() if request.read == len(request.ids)}
        if not running:
            return
        # The fewer requests run, the shorter the dispatch: waiting prompts are read sooner, and wide rounds cost less.
        rounds = max(1, shapes.ROUNDS * len(running) // len(held))
        greedy = all(request.params.greedy for request in running.values())
        with self.changes:  # a waiting request gets the first free slot: the dispatch ends there
            enough = 1 if self._waiting else len(self._slots)
        sizes, slots = self._runner.sizes, list(running)
        width = next(width for width in self._runner.widths if width >= len(slots))
        tier = self._next_tier(running, rounds, greedy=greedy, width=width)
        call = calls.decode(sizes, self._cancelled, slots, rounds, enough, width=width, tier=tier, greedy=greedy)
        report, rows = self._runner.run(call), range(len(slots)) if width < sizes.batch else slots
        self._cancelled.clear()
        self._reports.append((report, dict(zip(rows, running.values(), strict=True)), tier))

    def _next_tier(self, running: Mapping[int, Request], rounds: int, *, greedy: bool, width: int) -> Tier:
        """Chooses the tier of the next rounds; lets a head that rested catch up first where the tier needs it."""
        requests = running.values()
        behind = [slot for slot, request in running.items() if request.acceptance.resting]
        seen = [request.acceptance for request in requests]
        drafts = any(request.drafts for request in requests)
        length = sum(request.length for request in requests) / len(requests)
        how = {"greedy": greedy, "rounds": rounds, "width": width, "length": length, "drafts": drafts}
        tier = self._choice.choose(seen, behind=bool(behind), **how)
        if tier.head and behind:
            for slot in behind:
                self._runner.run(calls.catch_up(self._runner.sizes, self._cancelled, slot))
        for request in requests:
            request.acceptance.resting = self._runner.draft is not None and not tier.head
        return tier

    def _read_prompts(self, requests: Sequence[Request], count: int, length: int) -> None:
        """Reads on in prompts, one after the other, by the program for `count` stretches of `length` tokens."""
        sizes, stretches, kept = self._runner.sizes, list[PromptChunk](), list[Call]()
        ended: dict[int, Request] = {}
        for request in requests:
            if len(stretches) == count:
                break
            if request.read == request.cached and (request.params.penalises or self._copies):
                self._runner.run(calls.note_prompt(sizes, request.slot, request.ids))
            assert request.allocation is not None
            asked, pages, stop = _row(request, self._eos, sizes), request.allocation.pages, self._stop(request)
            while len(stretches) < count and request.read < stop:
                own = request.slot, request.ids, request.read, pages, asked, stop
                stretch = PromptChunk.stretch(sizes, length, *own)
                request.read += int(stretch.counts[0])
                if stretch.ends[0]:
                    ended[len(stretches)] = request
                    self._cancelled.discard(request.slot)
                stretches.append(stretch)
            self._pool.register(request.allocation, request.ids[: request.read + 1])
            if request.read == stop < len(request.ids):
                state = self._pool.keep_state(request.allocation, stop)
                kept += [] if state is None else [calls.copy_state(sizes, request.slot, sizes.batch + state)]
        # Kept even where no prompt ends: reports bound the work on the device, and show that it still answers.
        report = self._runner.run(calls.prefill(sizes, stretches, rows=count, length=length))
        self._reports.append((report, ended, None))
        for call in kept:
            self._runner.run(call)

    def _stop(self, request: Request) -> int:
        """Returns where reading on in a prompt stops: at its end, or where a recurrent state is to be kept."""
        end = len(request.ids)
        return min(end, self._pool.next_state(request.read)) if self._pool.states else end

    def _deliver(self, report: Any, requests: dict[int, Request], tier: Tier | None) -> None:
        """Reads one report (the only transfer of its dispatch) and gives each request its tokens."""
        rows, seen, drafted = np.asarray(report), [], 0
        self.delivered = time.monotonic()
        for row, request in requests.items():
            if request.done:
                continue
            best = None if request.params.logprobs is None else self._best
            found = progress(rows[row], None if tier is None else (self._steps, self._nodes), best)
            self._stats.rounds += found.rounds
            seen.append((request.acceptance, found.rounds, sum(found.accepted)))
            drafted += found.drafted
            ending = request.take(found, self._eos)
            if ending is None:
                request.tell()
            else:
                self._end(request, *ending, still_runs=not found.done)
        if tier is not None:
            greedy = all(request.params.greedy for request in requests.values())
            self._choice.learn(tier, seen, drafted, greedy=greedy)

    def _end(
        self, request: Request, reason: FinishReason, error: str | None = None, *, still_runs: bool = True
    ) -> None:
        """Ends a request: frees its slot and pages, then publishes its output. The device `still_runs` it, or not."""
        output = request.finish(reason, error)
        self._leave(request, output, still_runs=still_runs)
        request.publish(output)
        self.ended += 1

    def _leave(self, request: Request, output: Output, *, still_runs: bool) -> None:
        self._finished[output.finish_reason] += 1
        if request.allocation is None:
            return
        failed = output.finish_reason == "error"
        if request.read == len(request.ids) and not failed:  # the last chosen token is not in the caches
            self._pool.register(request.allocation, request.tokens, drafted=not request.acceptance.unread)
            observed = self._runner.observed if request.adapt else None
            if self._learner is not None and observed is not None and len(request.tokens) > len(request.ids) + 1:
                self._learner.keep(observed, request.slot, request.tokens[:-1], request.cached, len(request.ids))
        self._pool.release(request.allocation, forget=failed)
        if request.table is not None:
            self._tables.release(request.table)
        self._slots[request.slot] = None
        if still_runs:
            self._cancelled.add(request.slot)

    def _give_up(self, error: BaseException) -> bool:
        """Ends every request that had begun, if any: after a failure or an interruption the device's state is lost."""
        dispatched = [request for _, rows, _ in self._reports for request in rows.values()]
        begun = dict.fromkeys([*filter(None, self._slots), *dispatched])
        self._slots = [None] * len(self._slots)
        self._reports.clear()
        self.forget_device()
        failure = error if isinstance(error, Exception) else RuntimeError(f"interrupted by {type(error).__name__}")
        for request in begun:
            request.allocation = None
            if not request.done:
                request.failure = failure
                self._end(request, "error", format_error(failure), still_runs=False)
        return bool(begun)


def _row(request: Request, eos: frozenset[int], sizes: shapes.Sizes) -> RequestRows:
    """Makes the row of a request that programs read."""
    params, digest = request.params, zlib.crc32(np.asarray(request.ids, np.int32).tobytes())
    if request.sample:
        digest = zlib.crc32(b"%d" % request.sample, digest)
    stop_ids = {*params.stop_token_ids} | (frozenset() if params.ignore_eos else eos)
    own: Any = {"limit": request.limit, "stop_ids": stop_ids, "prompt_length": len(request.ids), "digest": digest}
    constraint = ConstraintRows.of(request.table, request.place) if sizes.tables else None
    return RequestRows.of(params, **own, constraint=constraint)
