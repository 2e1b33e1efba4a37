"""Distributes prompts over servers: bounded concurrency per server, failover while one recovers, no prompt lost.

A server that fails rests, longer each time, until a probe shows that it is well and still holds the target; one that
holds something else leaves. What it was asked is asked of another one. A prompt at which several attempts fail is a
reject; so is one that a well server refuses, or turns away again and again while it answers others.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any

import httpx2

from eagle3_jax.config import RegenerateConfig
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.regenerate.dialogue import Answer, Dialogue, Known, sampling
from eagle3_jax.regenerate.server import Differs, Refused, Server, Trouble
from eagle3_jax.runs import command, processes

# Attempts at one turn that servers began: of servers that had answered others since their last rest, and of all. Those
# of busy servers are counted apart, by the same numbers, and take `regenerate.patience` too.
_ATTEMPTS, _MOST_ATTEMPTS = 4, 16
_REST, _LONGEST_REST = 0.5, 60.0  # seconds
_LOOK = 0.5  # seconds between two looks for signals, and for a fleet that is gone
_CONNECT = 10.0  # seconds

Store = Callable[[Answer], None]


@dataclasses.dataclass
class _Asked:
    """A dialogue that is being answered, and the ids of its turn's prompt."""

    dialogue: Dialogue
    ids: list[int]
    failed_at: set[str] = dataclasses.field(default_factory=set)  # URLs of servers, at this turn
    attempts: int = 0  # how often they had begun
    blamed: int = 0  # attempts that are likely to be the prompt's fault, since the server was well before
    turned_away: int = 0  # how often a server whose probe was well reported that it was busy
    since: float = 0.0  # the first time
    why: str = ""

    def failed(self, url: str, why: str = "") -> Answer:
        why = why or f"{self.attempts + self.turned_away} attempts: {self.why}"
        name, turn = self.dialogue.prompt["id"], self.dialogue.turn
        return Answer(name, turn, "", None, truncated=False, failed=True, server=url, why=why)


@dataclasses.dataclass(eq=False)
class _Member:
    """A server of the fleet. `well`: it is asked. `why`: it is not. `gone`: it never will be again."""

    server: Server
    well: bool = False
    gone: bool = False
    why: str = ""
    rests: int = 0  # since its last answer
    since: float = 0.0  # when it began to rest

    async def look(self) -> float:
        try:
            await self.server.check()
        except Trouble as trouble:
            self.well, self.why = False, str(trouble)
            return trouble.retry_after
        except Differs as difference:
            self.well, self.gone, self.why = False, True, str(difference)
        else:
            self.well = not self.gone
        return 0.0


@contextlib.asynccontextmanager
async def gathered(settings: RegenerateConfig, target: Target) -> AsyncIterator[Fleet]:
    """Yields the fleet of `regenerate.servers`; ill ones join later. Raises ValueError: none answers, one differs."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx2.Timeout(settings.deadline, connect=min(_CONNECT, settings.deadline))
    async with httpx2.AsyncClient(limits=limits, timeout=timeout) as client:
        members = [_Member(Server(client, server, target, settings)) for server in settings.servers]
        await asyncio.gather(*(member.look() for member in members))
        others = [member for member in members if member.gone]
        if others or not any(member.well for member in members):
            raise ValueError(_named(others or members))
        yield Fleet(members, settings, target.tokenizer)


def _named(members: Iterable[_Member]) -> str:
    return "\n  ".join(["regenerate.servers:", *(f"{member.server.url}: {member.why}" for member in members)])


class Fleet:
    """Servers that answer dialogues; see `gathered`."""

    def __init__(self, members: Sequence[_Member], settings: RegenerateConfig, tokenizer: Any) -> None:
        self._members, self._settings, self._tokenizer = members, settings, tokenizer
        self._source: Iterator[_Asked] = iter(())
        self._again: deque[_Asked] = deque()  # what a server failed at: at most one for each request on its way
        self._exhausted = False  # the source
        self._on_their_way = 0
        self._changed = asyncio.Condition()
        self._last_well = time.monotonic()
        self._last_answer = -math.inf
        self._recoveries: dict[_Member, asyncio.Task[None]] = {}

    @property
    def well(self) -> int:
        """Number of servers that are asked now."""
        return sum(member.well for member in self._members)

    async def converse(self, dialogues: Iterable[Dialogue], known: Known, seed: int, store: Store) -> None:
        """Has every turn answered that is not known, whichever server is free; a dialogue stays with its server.

        `store` takes each new answer, failed ones too, before anything follows it. Raises Stopped: a signal came.
        ValueError: no server has been well for `regenerate.patience`, or all of them left.
        """
        self._source = (
            _Asked(dialogue, ids)
            for dialogue in dialogues
            if (ids := dialogue.next_prompt(known, self._tokenizer, self._settings)) is not None
        )
        self._exhausted, self._last_well = False, time.monotonic()
        if known:  # by a run before this one
            self._last_answer = max(self._last_answer, 0.0)
        workers = {
            asyncio.create_task(self._work(member, seed, store))
            for member in self._members
            for _ in range(member.server.concurrency)
        }
        for member in self._members:
            if not member.well and not member.gone:
                self._rest(member)
        try:
            while workers:
                done, workers = await asyncio.wait(workers, timeout=_LOOK, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                command.stop_point()
                if workers or self._again or not self._exhausted:
                    self._check_alive(store)
                async with self._changed:  # time passes: see `_chosen`
                    self._changed.notify_all()
        finally:
            for task in (tasks := [*workers, *self._recoveries.values()]):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._recoveries.clear()

    def _check_alive(self, store: Store) -> None:
        """Gives up prompts that alone are left and were turned away. Raises ValueError: nobody answers, nor will."""
        now = time.monotonic()
        gone = all(member.gone for member in self._members)
        if self.well:
            self._last_well = now
        elif gone or now - self._last_well > self._settings.patience:
            turned_away = all(asked.turned_away >= _ATTEMPTS for asked in self._again)
            if gone or not self._exhausted or self._last_answer < 0 or not turned_away:
                raise ValueError(f"{_named(self._members)}\nstart one of them and run it again: it goes on from here")
            while self._again:
                asked = self._again.popleft()
                store(failed := asked.failed(self._members[0].server.url))
                asked.dialogue.take(failed)

    def _is_hopeless(self, asked: _Asked) -> bool:
        """Whether enough attempts failed, or servers turned the prompt away for long while they answered others."""
        if asked.blamed >= _ATTEMPTS or asked.attempts >= _MOST_ATTEMPTS:
            return True
        others = self._last_answer >= (0.0 if self._exhausted else asked.since)
        long = time.monotonic() - asked.since > self._settings.patience
        return asked.turned_away >= _MOST_ATTEMPTS and long and others

    async def _work(self, member: _Member, seed: int, store: Store) -> None:
        while (asked := await self._next(member)) is not None:
            try:
                await self._converse(member, asked, seed, store)
            finally:
                async with self._changed:
                    self._on_their_way -= 1
                    self._changed.notify_all()

    async def _next(self, member: _Member) -> _Asked | None:
        """Waits for something that this server may be asked; None when nothing will come."""
        async with self._changed:
            while not member.gone:
                if member.well and (asked := self._chosen(member)) is not None:
                    self._on_their_way += 1
                    return asked
                if self._exhausted and not self._on_their_way and not self._again:
                    self._changed.notify_all()
                    return None
                await self._changed.wait()
        return None

    def _chosen(self, member: _Member) -> _Asked | None:
        """What failed comes first, but to a server where it has not failed, if such a one is well or may soon be."""
        oldest = time.monotonic() - self._settings.patience
        expected = [other for other in self._members if other.well or (not other.gone and other.since > oldest)]
        others = {other.server.url for other in expected}
        for asked in self._again:
            if member.server.url not in asked.failed_at or others <= asked.failed_at:
                self._again.remove(asked)
                return asked
        asked = next(self._source, None)
        self._exhausted = asked is None
        return asked

    async def _converse(self, member: _Member, asked: _Asked, seed: int, store: Store) -> None:
        dialogue, ids = asked.dialogue, asked.ids
        while ids is not None:
            url, sampled = member.server.url, sampling(self._settings, seed, dialogue.prompt["id"], dialogue.turn)
            try:
                answer = await member.server.ask(dialogue, ids, **sampled)
                member.rests, self._last_answer = 0, time.monotonic()
            except Trouble as trouble:
                if member.well:
                    member.well, member.why = False, str(trouble)
                    self._rest(member, trouble.retry_after)
                asked = dataclasses.replace(asked, ids=ids, why=str(trouble), since=asked.since or time.monotonic())
                asked.failed_at.add(url)
                asked.attempts += trouble.began
                asked.blamed += trouble.began and not member.rests
                asked.turned_away += trouble.busy
                if not self._is_hopeless(asked):
                    self._again.append(asked)
                    return
                answer = asked.failed(url)
            except (Refused, Differs) as refusal:
                wait = await member.look()
                if not member.well:  # else it still holds the target: the fault is this prompt's
                    self._rest(member, wait)
                    self._again.append(dataclasses.replace(asked, ids=ids))
                    return
                answer = asked.failed(url, str(refusal))
            store(answer)
            dialogue.take(answer)
            asked = _Asked(dialogue, ids)
            ids = dialogue.next_prompt({}, self._tokenizer, self._settings)

    def _rest(self, member: _Member, wait: float = 0.0) -> None:
        if member not in self._recoveries:
            member.since = time.monotonic()
            self._recoveries[member] = asyncio.create_task(self._recover(member, wait))

    async def _recover(self, member: _Member, wait: float) -> None:
        if not member.gone:
            processes.say(f"regenerate: {member.server.url} rests: {member.why}")
        while not member.well and not member.gone:
            await asyncio.sleep(max(wait, min(_REST * 2**member.rests, _LONGEST_REST)))
            member.rests = min(member.rests + 1, 20)
            wait = await member.look()
        del self._recoveries[member]
        answers = f"is asked no more: {member.why}" if member.gone else "answers"
        processes.say(f"regenerate: {member.server.url} {answers}")
        async with self._changed:
            self._changed.notify_all()
