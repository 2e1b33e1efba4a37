"""Moves shards through a replica: tokenised ahead, computed batch by batch, written behind.

A process computes its first shard for as long as its writer keeps up, and meanwhile the next ones where the store is
slow. The processes of a replica take turns, a batch of each: a process writes the rows of its own shards from its own
devices. Nothing waits for the store but full queues.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from eagle3_jax.config import ExtractConfig
from eagle3_jax.data import features, vocab
from eagle3_jax.data.conversation import Conversation, Rejected, read_conversation
from eagle3_jax.extract import hidden_states
from eagle3_jax.mesh import Replica
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.runs import command, disk, processes

# Threads of a process that write shards, a shard each; and those that tokenise the next ones.
WRITERS = 4
TOKENISERS = 4
# Batches that the devices are ahead of the host.
_IN_FLIGHT = 2
_POLL = 0.2  # seconds until a thread looks whether the run was stopped
_WAIT = 0.002  # seconds until full queues are looked at again


class ConversationBar(contextlib.AbstractContextManager["ConversationBar"]):
    """A bar of conversations on process 0, and the tokens a second that this process writes."""

    def __init__(self, total: int, name: str) -> None:
        self._bar = tqdm(total=total, desc=name, unit=" conversations", disable=processes.index() > 0)
        self._start, self._tokens, self._lock = time.monotonic(), 0, threading.Lock()

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def rate(self) -> float:
        return self._tokens / (time.monotonic() - self._start)

    def skip(self, conversations: int) -> None:
        """Counts conversations that exist already, or that another process writes."""
        with self._lock:
            self._bar.update(conversations)

    def begin(self, shard: Shard) -> None:
        """Counts the conversations of a shard of this process; one may be several sequences."""
        with self._lock:
            self._bar.total = (self._bar.total or 0) + len(shard.conversations) + len(shard.rejects) - len(shard.lines)
            self._bar.update(len(shard.rejects))

    def add(self, tokens: int) -> None:
        with self._lock:
            self._tokens += tokens
            self._bar.set_postfix_str(f"{self.rate():.0f} tokens/s", refresh=False)
            self._bar.update()


@dataclasses.dataclass
class Shard:
    """Conversations, and the file of their features."""

    number: int  # in its split
    path: disk.Path
    lines: Sequence[str]
    conversations: list[Conversation] = dataclasses.field(default_factory=list)
    rejects: list[dict[str, str]] = dataclasses.field(default_factory=list)
    batches: list[hidden_states.PaddedBatch] = dataclasses.field(default_factory=list)


def run(
    shards: Iterable[Shard],
    config: ExtractConfig,
    target: Target,
    replica: Replica,
    padded: Sequence[int],
    place: Callable[[np.ndarray], Any],
    progress: ConversationBar,
) -> None:
    """Computes and writes all shards of a replica; `place` puts a batch of tokens on the devices."""
    lanes = collections.deque(range(WRITERS * len(replica.processes)))
    prepared = _prepared(shards, config, target, replica, padded)
    active: collections.deque[_Lane] = collections.deque()
    in_flight: collections.deque[Any] = collections.deque()
    writers = concurrent.futures.ThreadPoolExecutor(WRITERS, "eagle3_jax writes")
    stopped, written = threading.Event(), []
    try:
        while True:
            while lanes and (shard := next(prepared, None)) is not None:
                command.stop_point()
                lane = _Lane(lanes.popleft(), shard, iter(shard.batches))
                if replica.processes[lane.number % len(replica.processes)] == processes.index():
                    lane.handed = queue.Queue(_IN_FLIGHT)
                    lane.written = writers.submit(_write, shard, lane.handed, target, config.states, progress, stopped)
                    written.append(lane.written)
                else:
                    progress.skip(len(shard.lines))
                active.append(lane)
            if not active:
                break
            lane = _next_lane(active, turns=len(replica.processes) > 1)
            batch = next(lane.batches, None)
            outputs = None
            if batch is not None and config.states != "none":
                outputs = hidden_states.forward(lane.shard.conversations, batch, target.model, config.states, place)
                in_flight.append(outputs)
                if len(in_flight) > _IN_FLIGHT:
                    jax.block_until_ready(in_flight.popleft())
            lane.hand_over(batch, outputs)
            if batch is None:
                lanes.append(lane.number)
            else:
                active.append(lane)
        for future in written:
            future.result()
    finally:
        stopped.set()
        writers.shutdown(wait=True, cancel_futures=True)
        prepared.close()


@dataclasses.dataclass(eq=False)
class _Lane:
    """A shard that is computed, and the way to its writer where that is this process."""

    number: int
    shard: Shard
    batches: Iterator[hidden_states.PaddedBatch]
    handed: queue.Queue[Any] | None = None
    written: concurrent.futures.Future[None] | None = None

    def hand_over(self, batch: hidden_states.PaddedBatch | None, outputs: Any) -> None:
        """Waits for room in the writer's queue; None ends the shard. Raises what the writer raised."""
        while self.handed is not None and self.written is not None:
            if self.written.done():
                self.written.result()
            with contextlib.suppress(queue.Full):
                self.handed.put((batch, outputs), timeout=_POLL)
                return

    def has_room(self) -> bool:
        return self.handed is None or not self.handed.full() or (self.written is not None and self.written.done())


def _next_lane(active: collections.deque[_Lane], *, turns: bool) -> _Lane:
    """Takes a lane out: in turn, the same on all processes of a replica, or the first shard that has room."""
    if turns:
        return active.popleft()
    while not (ready := [lane for lane in active if lane.has_room()]):
        time.sleep(_WAIT)
    first = min(ready, key=lambda lane: lane.shard.number)
    active.remove(first)
    return first


class _Stopped(Exception): ...


def _write(
    shard: Shard, handed: queue.Queue[Any], target: Target, states: str, bar: ConversationBar, stopped: threading.Event
) -> None:
    """Writes a shard, whose batches are handed over with what was computed of them."""
    bar.begin(shard)
    computed = sum(batch.rows * batch.length for batch in shard.batches) if states != "none" else 0
    provenance: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    categories: collections.Counter[str] = collections.Counter()
    notes: dict[str, Any] = {"ids": [], "rejects": shard.rejects, "tokens": 0, "computed_tokens": computed}
    notes |= {"provenance": provenance, "categories": categories}

    def batches() -> Iterator[tuple[hidden_states.PaddedBatch, Any]]:
        while not stopped.is_set():
            with contextlib.suppress(queue.Empty):
                batch, outputs = handed.get(timeout=_POLL)
                if batch is None:
                    return
                yield batch, outputs
        raise _Stopped

    def records() -> Iterator[features.Record]:
        counts = np.zeros(target.model.config.vocab_size, np.int64)
        for batch, outputs in batches():
            for conversation, record in hidden_states.records(shard.conversations, batch, outputs):
                bar.add(len(conversation.token_ids))
                if record is None:
                    shard.rejects.append({"id": conversation.name, "reason": "NaN or infinity in the hidden states"})
                    continue
                notes["ids"].append(conversation.name)
                notes["tokens"] += len(conversation.token_ids)
                counts += vocab.count_tokens(conversation.token_ids, conversation.loss_mask, len(counts))
                provenance[conversation.source][conversation.license] += 1
                categories[conversation.category] += int(conversation.loss_mask.sum())
                yield record
        seen = np.flatnonzero(counts)
        notes["token_counts"] = [seen.tolist(), counts[seen].tolist()]

    with contextlib.suppress(_Stopped):  # `write_shard` has removed its part of the shard
        features.write_shard(shard.path, records(), notes)


def _prepared(
    shards: Iterable[Shard], config: ExtractConfig, target: Target, replica: Replica, padded: Sequence[int]
) -> Generator[Shard, None, None]:
    """Tokenises shards in order, some ahead."""
    multiple = replica.mesh.shape["data"]

    def tokenise(shard: Shard) -> Shard:
        for line in shard.lines:
            try:
                shard.conversations.extend(read_conversation(line, target.tokenizer, config.max_length))
            except Rejected as error:
                shard.rejects.append({"id": json.loads(line)["id"], "reason": str(error)})
        lengths = [len(conversation.token_ids) for conversation in shard.conversations]
        shard.batches = hidden_states.plan_batches(lengths, padded, config.batch_tokens, multiple, shard.number)
        return shard

    left = iter(shards)
    with concurrent.futures.ThreadPoolExecutor(TOKENISERS, "eagle3_jax tokenises") as threads:
        running = collections.deque(threads.submit(tokenise, shard) for shard in itertools.islice(left, TOKENISERS + 1))
        try:
            while running:
                shard = running.popleft().result()
                running.extend(threads.submit(tokenise, following) for following in itertools.islice(left, 1))
                yield shard
        finally:
            for future in running:
                future.cancel()
