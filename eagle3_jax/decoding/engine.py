"""Requests in, tokens out: continuous batching over a fixed number of places and a fixed set of programs.

Each turn lets in what fits (in the order of arrival), gives the device a stretch of prompts to read and some rounds to
run, and reads meanwhile what the turn before chose. Requests join and leave between dispatches; a dispatch is short
while anyone waits. Caches are paged and allocated once: a request is let in when the pages of its whole answer are
free, so nothing is ever taken back from one that runs.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import math
import pathlib
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from eagle3_jax.config import DraftTree, MeshConfig, TargetConfig
from eagle3_jax.decoding import arguments
from eagle3_jax.decoding.arguments import KVDtype
from eagle3_jax.decoding.choice import costs, pricing
from eagle3_jax.decoding.choice import modes as tiers
from eagle3_jax.decoding.choice.modes import VANILLA, Tier
from eagle3_jax.decoding.device import catch_up, shapes
from eagle3_jax.decoding.device.chunk import Chunk
from eagle3_jax.decoding.device.report import first_progress, progress
from eagle3_jax.decoding.device.runner import ModelRunner, tokens_that_fit
from eagle3_jax.decoding.device.shapes import Sizes
from eagle3_jax.decoding.pages import PagePool
from eagle3_jax.decoding.params import MAX_LOGPROBS, MAX_STOP_IDS, SamplingParams
from eagle3_jax.decoding.prompt import Prompt, encode
from eagle3_jax.decoding.request import FinishReason, QueueFullError, Request, said
from eagle3_jax.decoding.request import Output as Output
from eagle3_jax.decoding.request import Piece as Piece
from eagle3_jax.decoding.request import Stats as Stats
from eagle3_jax.decoding.rounds.state import RequestRows
from eagle3_jax.decoding.steps import Progress
from eagle3_jax.formats import mtp
from eagle3_jax.formats.heads import load_draft
from eagle3_jax.formats.mtp import MTP
from eagle3_jax.formats.packaged import AUTO, LOOKUP, load_shipped
from eagle3_jax.mesh import decoding_mesh
from eagle3_jax.models.checkpoint.fetch import Target, load_target, target_config
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.target import ModelConfig, TargetModel
from eagle3_jax.runs import processes

PAGE_SIZE = 128
GREEDY = SamplingParams()

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class EngineStats:
    """What an engine did since it was made, and what it does now.

    Attributes:
        programs: that its calls compiled.
        dispatches: given to the device. rounds: of all requests together. tiers: dispatches of rounds by tier.
        tier: of the latest rounds; None before the first.
        prompt_tokens: of all prompts. cached_tokens: of these, read by an earlier request already (prefix reuse).
        finished: requests by finish reason. refused: that never began.
        running, waiting: requests now. free_pages, pages: of the caches.
        stalled: seconds since work last came back from the device, 0 where nobody is at work; a device that hangs shows
            here, and so does a compilation.
    """

    programs: int = 0
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


class Engine:
    """Answers prompts with a target model, faster with a draft; the tokens' distribution is the target's own."""

    def __init__(
        self,
        target: TargetModel,
        tokenizer: Any,
        draft: Draft | Literal["lookup"] | None = None,
        tree: DraftTree | Sequence[DraftTree] | Literal["auto"] = "auto",
        *,
        batch_size: int = 1,
        max_length: int = 2048,
        page_size: int = PAGE_SIZE,
        kv_tokens: int | None = None,
        memory_fraction: float | None = None,
        kv_dtype: KVDtype | None = None,
        prefix_cache: bool = True,
        queue_limit: int | None = None,
        simulated_acceptance: float | None = None,
    ) -> None:
        """Takes loaded models; `load` takes names and folders.

        Args:
            tokenizer: a Hugging Face tokenizer.
            draft: a draft head or model; "lookup" copies drafts from the text so far; None is vanilla decoding.
            tree: shape of the draft, of "lookup" a chain. "auto" chooses for every dispatch, vanilla decoding included,
                by what rounds cost here and what is accepted; it takes a chain of 3 (8 of "lookup") until `warm_up` has
                measured the costs. Several trees: chooses so among these and vanilla decoding.
            batch_size: sequences decoded together.
            max_length: longest prompt and answer together, in tokens. Beyond what the draft declares
                (`max_position_embeddings`) drafting goes on, with a warning.
            page_size: tokens of a page, the unit of the caches and of prefix reuse.
            kv_tokens: room of the caches in tokens, of all requests together; the default lets the whole batch be
                `max_length` long.
            memory_fraction: instead of `kv_tokens`: weights and caches take this share of the device's memory (SGLang's
                mem_fraction_static).
            kv_dtype: of the target's keys and values; None is the weights' own. Narrower ones may change tokens.
            prefix_cache: keeps the pages of ended requests for prompts that begin alike.
            queue_limit: requests that may wait; one more is refused. None is no limit.
            simulated_acceptance: for benchmarks: drafts are accepted with this probability, whatever the target says of
                them (as SGLang's SGLANG_SIMULATE_ACC_LEN). Answers are worth nothing; `submit` and `stream` refuse.

        Raises:
            ValueError: a tree without a draft, a draft of another target, or a size out of range.
        """
        stored = arguments.stored_dtype(kv_dtype)
        arguments.check_whole_numbers(batch_size=batch_size, max_length=max_length, page_size=page_size)
        arguments.check_whole_numbers(kv_tokens=kv_tokens, queue_limit=queue_limit)
        if batch_size < 1:
            raise ValueError(f"batch_size: got {batch_size}, expected at least 1")
        if not 2 <= max_length <= target.config.max_position_embeddings:
            raise ValueError(
                f"max_length: got {max_length}, expected 2 to the target's {target.config.max_position_embeddings}"
            )
        if not 16 <= page_size <= 256 or page_size % 16:
            raise ValueError(f"page_size: got {page_size}, expected a multiple of 16 from 16 to 256")
        if queue_limit is not None and queue_limit < 1:
            raise ValueError(f"queue_limit: got {queue_limit}, expected at least 1, or None")
        self.tiers = tiers.choice_for(target.config, draft, tree, simulated_acceptance)
        if isinstance(draft, str):
            draft = None
        elif draft is not None and max_length > draft.head.config.max_position_embeddings:
            warnings.warn(
                f"max_length: got {max_length}, more than the {draft.head.config.max_position_embeddings} positions "
                "that the draft declares; behind them fewer drafts may be accepted, the tokens stay the target's",
                stacklevel=2,
            )
        self.tokenizer = tokenizer
        self.batch_size, self.max_length, self.queue_limit = batch_size, max_length, queue_limit
        if kv_tokens is not None and memory_fraction is not None:
            raise ValueError(f"kv_tokens, memory_fraction: got {kv_tokens} and {memory_fraction}, expected one of them")
        every = self.tiers.tiers
        sizes = Sizes.plan(batch_size, max_length, page_size, every)
        if memory_fraction is not None:
            kv_tokens = tokens_that_fit(target, draft, memory_fraction, sizes, every, stored)
        if kv_tokens is not None:
            sizes = Sizes.plan(batch_size, max_length, page_size, every, kv_tokens)
        self._runner = ModelRunner(target, draft, every, sizes, stored)
        self.target, self.draft = self._runner.target, self._runner.draft
        self._pool = PagePool(sizes.pages, page_size, reuse=prefix_cache)
        self._eos = end_ids(target.config, tokenizer)
        self._best = min(MAX_LOGPROBS, target.config.vocab_size)
        self._steps, self._nodes = tiers.depth_of(every), tiers.nodes_of(every)
        self._stats = EngineStats(pages=sizes.pages)
        self._scratch, self._copies = tiers.scratch_of(every), tiers.copies(every)

        self._waiting: collections.deque[Request] = collections.deque()
        self._places: list[Request | None] = [None] * batch_size
        self._ended = 0  # requests
        # Whether somebody who waits was aborted, and when the first of them is late: else none is looked at.
        self._aborted, self._first_deadline = False, math.inf
        self._cancelled: set[int] = set()  # places of requests that ended here, while the device runs them
        # Of dispatches, and whose row is which; the tier of rounds, None of prompts.
        self._reports: collections.deque[tuple[jax.Array, dict[int, Request], Tier | None]] = collections.deque()
        self._changes = threading.Condition()  # guards `_waiting`; told of when something has been delivered
        self._driver = threading.Lock()  # one thread does the work at a time
        self._thread: threading.Thread | None = None
        self._progressed: float | None = None  # when work last came back or began, while somebody is at work

    @classmethod
    def load(
        cls,
        target: TargetConfig | str | pathlib.Path | Target,
        draft: str | pathlib.Path | Draft | None = AUTO,
        tree: DraftTree | Sequence[DraftTree] | Literal["auto"] = "auto",
        batch_size: int = 1,
        max_length: int = 2048,
        *,
        dtype: Literal["float32", "bfloat16"] | None = None,
        mesh: MeshConfig | None = None,
        token_map: str | pathlib.Path | None = None,
        **options: Any,
    ) -> Engine:
        """Loads the models.

        Args:
            target: a name, a hub id, a folder, or what is loaded already.
            dtype: of weights and activations; None is the TargetConfig's, float32 for a name.
            mesh: spreads the models over its model axis; None is one device.
            draft: "auto" is the head that comes with this package for this target, vanilla decoding where none does;
                a loaded head, or its folder: that `export` wrote, or another that engines serve (see `load_draft`);
                the folder or name of a smaller model with the target's vocabulary (SGLang's STANDALONE);
                "mtp" for the layer that the target's own checkpoint holds for it (MiMo, DeepSeek-V3; SGLang's
                NEXTN);
                "lookup" for drafts that are copied from the text; None for vanilla decoding.
            token_map: of a head of EAGLE-2, given by its folder: the tokens that it drafts (FR-Spec), see `load_draft`.
            options: see `__init__`.

        Raises:
            ManifestError: the folder says that its head was trained with another target; of other weights alone a
                warning is logged, see `load_draft`.
            DraftFormatError, ValueError: see `load_draft`, `__init__`.
        """
        if not (draft is None or isinstance(draft, str | pathlib.Path | Draft)):
            expected = "a folder, a name, 'auto', 'lookup', 'mtp', a loaded head, or None for no drafts"
            raise ValueError(f"draft: got {draft!r}, expected {expected}")
        in_folder = isinstance(draft, pathlib.Path) or (isinstance(draft, str) and draft not in (AUTO, LOOKUP, MTP))
        if token_map is not None and not in_folder:
            got = repr(draft) if draft is None or isinstance(draft, str) else type(draft).__name__
            raise ValueError(f"token_map: got {token_map}, expected None beside draft {got}, which it does not cut")
        if isinstance(target, Target):
            if dtype is not None or mesh is not None:
                raise ValueError(f"dtype, mesh: got {dtype}, {mesh}, expected None for a target that is loaded already")
            loaded = target
        else:
            config = target_config(target)
            config = config if dtype is None else dataclasses.replace(config, dtype=dtype)
            loaded = load_target(config, None if mesh is None else decoding_mesh(mesh))
        of_target = loaded.model.embed[...].dtype
        if isinstance(draft, pathlib.Path) or (isinstance(draft, str) and in_folder):
            head = load_draft(draft, target=loaded, dtype=of_target, token_map=token_map)
        elif draft == MTP:
            head = mtp.load(loaded, of_target)
        elif isinstance(draft, str):
            head = LOOKUP if draft == LOOKUP else load_shipped(loaded, of_target)
        else:
            head = draft
        model = loaded.model
        if isinstance(head, Draft) and head.head.config.aux_layers != model.config.aux_layers:
            model = model.observed_at(head.head.config.aux_layers)
        return cls(model, loaded.tokenizer, head, tree, batch_size=batch_size, max_length=max_length, **options)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        on_output: Callable[[int, Output], object] | None = None,
    ) -> list[Output]:
        """Answers prompts, in their order; the n answers to one prompt follow each other.

        Args:
            prompts: each a string (one user turn), messages (both through the chat template), or token ids.
            params: for all, or one for each prompt.
            on_output: called with an answer's index and the answer as soon as it is finished. Where it raises, those
                that ended together are all reported, then the first exception is raised and the rest is aborted.

        Raises:
            ValueError: a prompt that is too long, empty or of another kind; before any work begins.
            Exception: what the device failed with, where that ended one of these requests.
        """
        each = arguments.one_for_each(params, prompts)
        requests = [
            self._request(f"prompts[{i}]", prompt, each[i], sample)
            for i, prompt in enumerate(prompts)
            for sample in range(each[i].n)
        ]
        left, ended = dict(enumerate(requests)), self._ended
        with self._changes:
            self._waiting.extend(requests)
        try:
            while left:
                try:
                    # All are looked at only when some request has ended: there may be thousands.
                    self.drive(lambda ended=ended: self._ended > ended)
                finally:
                    ended = self._ended
                    failure = _report(left, on_output)
                if failure is not None:
                    raise failure
        finally:
            self.abort(*left.values())
        return [request.output for request in requests if request.output is not None]

    def stream(self, prompt: Prompt, params: SamplingParams = GREEDY) -> Iterator[Piece]:
        """Answers one prompt piece by piece; it is aborted where nobody goes on. Raises like `generate`."""
        request = self.submit(prompt, params)
        try:
            yield from request
        finally:
            request.abort()
        if request.failure is not None:
            raise request.failure

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams = GREEDY,
        *,
        timeout: float | None = None,
        sample: int = 0,
        drafts: bool = True,
    ) -> Request:
        """Hands in a request, which waits for its turn: see `Request`.

        Args:
            timeout: seconds; what is not answered by then ends with what there is ("timeout").
            sample: which of several answers to one prompt and seed.
            drafts: False drafts nothing while all that runs asks for that, to compare with; needs an engine that may
                choose vanilla decoding (`tree="auto"`, or several).

        Raises:
            ValueError: an impossible request. QueueFullError: `queue_limit` requests wait already.
        """
        arguments.check_params(params)
        if params.n != 1:
            raise ValueError(f"n: got {params.n}, expected 1: submit each answer, with its `sample`")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout: got {timeout}, expected more than 0 seconds, or None")
        if self.tiers.simulated is not None:
            raise RuntimeError("submit: got an engine with simulated_acceptance, which is for benchmarks alone")
        if self._runner.mesh is not None and processes.count() > 1:
            raise RuntimeError("submit: got a mesh of several processes, expected one; there use `generate`")
        if not drafts and VANILLA not in self.tiers.tiers:
            raise ValueError("drafts: got False, expected an engine with a choice: this one drafts always")
        request = self._request("prompt", prompt, params, sample)
        request.drafts = drafts
        if timeout is not None:
            request.deadline = time.monotonic() + timeout
        with self._changes:
            if self.queue_limit is not None and len(self._waiting) >= self.queue_limit:
                self._stats.refused += 1
                raise QueueFullError(f"queue: got {len(self._waiting)} waiting requests, expected less than the limit")
            self._waiting.append(request)
            if request.deadline is not None:
                self._first_deadline = min(self._first_deadline, request.deadline)
        return request

    def abort(self, *requests: Request) -> None:
        """Ends requests with what there is; one that has ended stays as it is."""
        with self._changes:
            for request in requests:
                request.aborted = self._aborted = True
        self._end_aborted()

    def warm_up(
        self, cache: str | pathlib.Path | None = None, *, progress: Progress = True, greedy_alone: bool = False
    ) -> None:
        """Compiles all programs, so that no request waits for it, and measures what rounds cost (`tree="auto"`).

        Rounds are as wide as the traffic from then on. On a GPU products of few rows are padded to the rows that cost
        least, measured first. Caches are empty afterwards.

        Args:
            cache: a folder for both, which makes the next start fast: JAX's persistent compilation cache, of this
                process from now on, and the costs on this machine. None leaves it as it is, and measures.
            progress: shows bars; a function is told instead, in words, at most every 15 seconds of a stage.
            greedy_alone: without the programs of requests that have a temperature or other wishes.

        Raises:
            RuntimeError: requests are running.
        """
        folder = None if cache is None else pathlib.Path(cache).expanduser()
        with self._alone("warm_up"):
            if folder is not None:
                jax.config.update("jax_compilation_cache_dir", str(folder))
                jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            self._runner.pad_products()
            used = pricing.price(self._runner, self.tiers, folder, progress=progress, greedy_alone=greedy_alone)
            self._forget_device()
            self._runner.compile(used, progress=progress)

    def profile(self, tier: Tier) -> costs.Round:
        """What a greedy round of one of its tiers takes, stage by stage; with empty caches afterwards.

        Raises:
            RuntimeError: requests are running.
        """
        with self._alone("profile"):
            measured = self._runner.profile(tier)
            self._forget_device()
            return measured

    def replace_draft(self, draft: Draft) -> None:
        """Drafts with another head of the same shape, such as the next step of a training; nothing is compiled again.

        On a CPU a matrix is rounded to bfloat16 where the first head's was stored so, since bfloat16 held its numbers.

        Raises:
            ValueError: a head of another shape or dtype, or an engine without one.
            RuntimeError: requests are running.
        """
        before = None if self.draft is None else (self.draft.head.config, self.draft.head.dtype)
        if (got := (draft.head.config, draft.head.dtype)) != before:
            raise ValueError(f"draft: got a head of {got}, expected one of {before}")
        with self._alone("replace_draft"):
            self._runner.replace_draft(draft)
            self.draft = self._runner.draft
            self.tiers.renew()
            self._forget_device()

    def stats(self) -> EngineStats:
        """What it did and does; a copy."""
        progressed = self._progressed
        with self._changes:
            return dataclasses.replace(
                self._stats,
                programs=self._runner.compiled,
                dispatches=self._runner.dispatches,
                tiers=dict(self.tiers.dispatches),
                tier=self.tiers.latest,
                finished=dict(self._stats.finished),
                running=sum(request is not None for request in self._places),
                waiting=len(self._waiting),
                free_pages=self._pool.available,
                stalled=0.0 if progressed is None else time.monotonic() - progressed,
            )

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt (see `decoding.prompt.encode`)."""
        return encode(self.tokenizer, prompt)

    # Who works, and when.

    def drive(self, ready: Callable[[], bool]) -> None:
        """Works until `ready()`; where another thread does so already, waits for what it delivers.

        Who works is spared what others' requests end with: a failure of the device is in their outputs alone.
        """
        while not ready():
            if self._driver.acquire(blocking=False):
                self._progressed = time.monotonic()
                try:
                    while not ready():
                        self._turn()
                finally:
                    self._progressed = None
                    self._let_go()
            else:
                with self._changes:
                    self._changes.wait_for(lambda: ready() or not self._driver.locked(), timeout=1)

    def drive_in_background(self) -> None:
        """Leaves the work to a thread, until there is none."""
        with self._changes:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="eagle3_jax engine")
                self._thread.start()

    def _work(self) -> None:
        while not self._is_idle():
            try:
                self.drive(self._is_idle)
            except Exception:  # those who wait may be luckier
                _log.exception("a turn failed")

    def _is_idle(self) -> bool:
        with self._changes:
            if self._waiting or self._reports or any(self._places):
                return False
            if self._thread is threading.current_thread():
                self._thread = None  # decided under the lock: who comes later starts another
            return True

    def _let_go(self) -> None:
        """Leaves the work to whoever waits for it."""
        self._driver.release()
        self._end_aborted()

    def _end_aborted(self) -> None:
        """Ends what was aborted, where nobody works; whoever works does so in the next turn, or in letting go."""
        while self._aborted and self._driver.acquire(blocking=False):
            try:
                self._sweep()
            finally:
                self._driver.release()
        with self._changes:
            self._changes.notify_all()

    @contextlib.contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """Keeps the device for something else than requests. Raises RuntimeError at once where they are running."""
        while not self._driver.acquire(timeout=0.05):  # whoever works may be about to end
            stats = self.stats()
            if busy := stats.running + stats.waiting:  # who waits is let in while somebody works
                raise RuntimeError(f"{what}: got {busy} running requests, expected none")
        try:
            if running := self.stats().running:
                raise RuntimeError(f"{what}: got {running} running requests, expected none")
            yield
        finally:
            self._let_go()

    # One turn.

    def _turn(self) -> None:
        """Raises an interruption, or a failure where no request had begun; other failures are in requests' outputs."""
        try:
            self._sweep()
            self._admit()
            unread = len(self._reports)
            self._launch()
            if len(self._reports) == unread:
                unread += 1  # nothing new to do: what is there can be waited for
            for _ in range(min(unread, len(self._reports))):
                self._deliver(*self._reports[0])
                self._reports.popleft()
            if not self._reports and not any(self._places):
                self._pool.check_idle()
        except BaseException as error:
            if not self._give_up(error) or not isinstance(error, Exception):
                raise
            _log.exception("a dispatch failed")
        with self._changes:
            self._changes.notify_all()

    def _sweep(self) -> None:
        """Ends requests that were aborted or whose time is over."""
        now, ended = time.monotonic(), []
        with self._changes:
            if self._aborted or now >= self._first_deadline:  # by rebuilding: a verb that stops aborts thousands
                ended = [request for request in self._waiting if request.aborted or request.is_late(now)]
                gone = set(map(id, ended))
                kept = [request for request in self._waiting if id(request) not in gone]
                self._waiting.clear()  # in place: a finalizer may abort while this thread hands in a request
                self._waiting.extend(kept)
                deadlines = [request.deadline for request in self._waiting if request.deadline is not None]
                self._aborted, self._first_deadline = False, min(deadlines, default=math.inf)
        for request in [*ended, *filter(None, self._places)]:
            if request.aborted or request.is_late(now):
                self._end(request, "abort" if request.aborted else "timeout")

    def _admit(self) -> None:
        """Gives places and pages to those who wait, in the order of arrival."""
        for place in range(self.batch_size):
            if self._places[place] is not None:
                continue
            with self._changes:
                if not self._waiting:
                    return
                request = self._waiting[0]
                request.lease = self._pool.lease(request.ids, len(request.ids) + request.limit + self._scratch)
                if request.lease is None:
                    return  # the first in the queue is not overtaken
                self._waiting.popleft()
            request.place, request.read = place, request.lease.reused
            self._places[place] = request
            self._stats.prompt_tokens += len(request.ids)
            self._stats.cached_tokens += request.read

    def _launch(self) -> None:
        """Gives the device its next work: stretches of prompts, then rounds of those whose prompt is read."""
        room = shapes.MOST_READ
        while unread := [r for r in self._places if r is not None and r.read < len(r.ids)]:
            unread.sort(key=lambda request: request.number)
            count, length = self._runner.sizes.chunk_for([len(request.ids) - request.read for request in unread])
            room -= count * length
            if room < 0:
                break
            self._read_prompts(unread, count, length)
        running = {
            place: request
            for place, request in enumerate(self._places)
            if request is not None and request.read == len(request.ids)
        }
        if not running:
            return
        # The fewer run yet, the sooner the next prompts are read: one wide round takes less than several narrow ones.
        reading = sum(request is not None for request in self._places) - len(running)
        rounds = max(1, shapes.ROUNDS * len(running) // (len(running) + reading))
        greedy = all(request.params.greedy for request in running.values())
        with self._changes:  # who waits for a place gets the first that falls free
            enough = 1 if self._waiting else self.batch_size
        width = self._runner.width_for(len(running))
        tier = self._next_tier(running, rounds, greedy=greedy, width=width)
        report, rows = self._runner.decode(
            self._cancelled, list(running), rounds, enough, width=width, tier=tier, greedy=greedy
        )
        self._cancelled.clear()
        self._reports.append((report, dict(zip(rows, running.values(), strict=True)), tier))

    def _next_tier(self, running: Mapping[int, Request], rounds: int, *, greedy: bool, width: int) -> Tier:
        """How the next rounds are run; a head that rested catches up in front of those that need it."""
        requests = running.values()
        behind = any(request.behind for request in requests)
        seen = [request.acceptance for request in requests]
        drafts = any(request.drafts for request in requests)
        tier = self.tiers.choose(seen, greedy=greedy, behind=behind, rounds=rounds, width=width, drafts=drafts)
        if tier.head and behind:
            self._runner.catch_up(self._cancelled, list(running), width=width)
        for request in requests:
            request.behind = self.draft is not None and not tier.head
        return tier

    def _read_prompts(self, requests: Sequence[Request], count: int, length: int) -> None:
        """Reads on in prompts, one after the other, by the program for `count` stretches of `length` tokens."""
        sizes, stretches = self._runner.sizes, list[Chunk]()
        ended: dict[int, Request] = {}
        for request in requests:
            if len(stretches) == count:
                break
            if request.read == request.cached and (request.params.penalises or self._copies):
                self._runner.note_prompt(request.place, request.ids)
            assert request.lease is not None
            asked, pages = _row(request, self._eos), request.lease.pages
            while len(stretches) < count and request.read < len(request.ids):
                stretch = Chunk.stretch(
                    sizes,
                    length,
                    slot=request.place,
                    prompt=request.ids,
                    start=request.read,
                    pages=pages,
                    request=asked,
                )
                request.read += int(stretch.counts[0])
                if stretch.ends[0]:
                    ended[len(stretches)] = request
                    self._cancelled.discard(request.place)
                stretches.append(stretch)
            self._pool.register(request.lease, request.ids[: request.read + 1])
        # Also where no prompt ends: it bounds what the device is given at once, and says that it still answers.
        self._reports.append((self._runner.prefill(Chunk.of(stretches, count, length, sizes)), ended, None))

    def _deliver(self, report: jax.Array, requests: dict[int, Request], tier: Tier | None) -> None:
        """Reads one report (the only transfer of its dispatch) and passes on what it says."""
        rows, seen, drafted = np.asarray(report), [], 0
        self._progressed = time.monotonic()
        for row, request in requests.items():
            if request.done:
                continue
            best = None if request.params.logprobs is None else self._best
            if tier is None:
                found = first_progress(rows[row], best)
            else:
                found = progress(rows[row], self._steps, self._nodes, best)
            self._stats.rounds += found.rounds
            seen.append((request.acceptance, found.rounds, sum(found.accepted)))
            drafted += found.drafted
            ending = request.take(found, self._eos)
            request.acceptance.lost = found.unread > catch_up.ROOM or not (request.lease and request.lease.drafted)
            if ending is None:
                request.tell()
            else:
                self._end(request, *ending, still_runs=not found.done)
        if tier is not None:
            greedy = all(request.params.greedy for request in requests.values())
            self.tiers.learn(tier, seen, drafted, greedy=greedy)

    def _end(
        self, request: Request, reason: FinishReason, error: str | None = None, *, still_runs: bool = True
    ) -> None:
        """Ends a request: gives its place and pages back, then tells those who wait for it.

        Args:
            still_runs: the device does not know yet that it has ended.
        """
        output = request.finish(reason, error)
        self._leave(request, output, still_runs=still_runs)
        request.publish(output)
        self._ended += 1

    def _leave(self, request: Request, output: Output, *, still_runs: bool) -> None:
        finished = self._stats.finished
        finished[output.finish_reason] = finished.get(output.finish_reason, 0) + 1
        if request.lease is None:
            return
        failed = output.finish_reason == "error"
        if request.read == len(request.ids) and not failed:  # the last token chosen is not in the caches
            self._pool.register(request.lease, request.tokens, drafted=not request.unread)
        self._pool.release(request.lease, forget=failed)
        self._places[request.place] = None
        if still_runs:
            self._cancelled.add(request.place)

    def _give_up(self, error: BaseException) -> bool:
        """After a failure of the device or an interruption nothing on it can be trusted: all that was begun ends.

        Returns:
            Whether anything was begun.
        """
        told = [request for _, rows, _ in self._reports for request in rows.values()]
        begun = dict.fromkeys([*filter(None, self._places), *told])
        self._places = [None] * self.batch_size
        self._reports.clear()
        self._forget_device()
        failure = error if isinstance(error, Exception) else RuntimeError(f"interrupted by {type(error).__name__}")
        for request in begun:
            request.lease = None
            if not request.done:
                request.failure = failure
                self._end(request, "error", said(failure), still_runs=False)
        return bool(begun)

    def _forget_device(self) -> None:
        """Begins with empty caches."""
        self._cancelled.clear()
        self._runner.reset()
        self._pool = PagePool(self._pool.pages, self._pool.page_size, reuse=self._pool.reuse)

    def _request(self, name: str, prompt: Prompt, params: SamplingParams, sample: int) -> Request:
        ids = encode(self.tokenizer, prompt, name)
        if not 1 <= len(ids) < self.max_length:
            raise ValueError(f"{name}: got {len(ids)} tokens, expected 1 to {self.max_length - 1} (max_length - 1)")
        vocabulary = self.target.config.vocab_size
        if not 0 <= min(ids) <= max(ids) < vocabulary:
            raise ValueError(f"{name}: got token ids {min(ids)} to {max(ids)}, expected 0 to {vocabulary - 1}")
        for field, tokens in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            if beyond := [token for token in tokens if token >= vocabulary]:
                raise ValueError(f"{field}: got token id {beyond[0]}, expected 0 to {vocabulary - 1}")
        if len({*params.stop_token_ids} | self._eos) > MAX_STOP_IDS:
            raise ValueError(
                f"stop_token_ids: got {len(params.stop_token_ids)}, expected {MAX_STOP_IDS} at most, "
                f"the model's own {len(self._eos)} included"
            )
        limit = min(params.max_tokens, self.max_length - len(ids))
        return Request(self, self.tokenizer, ids, params, limit, sample)


def _report(left: dict[int, Request], on_output: Callable[[int, Output], object] | None) -> Exception | None:
    """Takes out what has ended and reports all of it, then raises the first exception of `on_output`.

    Returns:
        What the device failed with, where that ended one of them; such a one is not reported.
    """
    failures: list[Exception] = []
    raised: list[BaseException] = []
    for index in [index for index, request in left.items() if request.done]:
        request = left.pop(index)
        if request.failure is not None:
            failures.append(request.failure)
        elif on_output is not None and request.output is not None:
            try:
                on_output(index, request.output)
            except BaseException as error:
                raised.append(error)
    if raised:
        raise raised[0]
    return failures[0] if failures else None


def end_ids(config: ModelConfig, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: the model's, and the tokenizer's own, which is all that some fine-tunes change."""
    own = getattr(tokenizer, "eos_token_id", None)
    return frozenset(config.eos_token_ids) | ({own} if own is not None and own < config.vocab_size else set())


def _row(request: Request, eos: frozenset[int]) -> RequestRows:
    """What a request asks for, as programs read it."""
    params, digest = request.params, zlib.crc32(np.asarray(request.ids, np.int32).tobytes())
    if request.sample:
        digest = zlib.crc32(b"%d" % request.sample, digest)
    stop_ids = {*params.stop_token_ids} | (frozenset() if params.ignore_eos else eos)
    return RequestRows.of(params, limit=request.limit, stop_ids=stop_ids, prompt_length=len(request.ids), digest=digest)
