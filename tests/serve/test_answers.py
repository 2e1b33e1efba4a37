"""Answers are handed in beside the loop, all or none, and counted when they come."""

import asyncio
import concurrent.futures
import threading
import time
from typing import Any

import openai
import pytest
import tiny

from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.request import Output, Piece, Request, Stats
from eagle3_jax.serve import protocol
from eagle3_jax.serve.answers import Answers, submit, submitted
from eagle3_jax.serve.app import _events
from eagle3_jax.serve.bodies import DONE, ApiError, ChatShape, Envelope, Tokens
from eagle3_jax.serve.metrics import Metrics


class Slow(Engine):
    """Takes requests when it is told to."""

    def __init__(self) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()
        self.taken: list[Request] = []
        self.aborted: list[Request] = []

    def submit(self, *_: Any, **__: Any) -> Request:
        self.begun.set()
        assert self.goes_on.wait(10)
        self.taken.append(Request.__new__(Request))
        return self.taken[-1]

    def abort(self, *requests: Request) -> None:
        self.aborted += requests


@pytest.mark.parametrize("when", ["in front of it", "meanwhile", "behind it"])
def test_who_is_cancelled_while_answers_are_handed_in_leaves_none_behind(when):
    engine = Slow()

    async def ask_and_leave() -> None:
        with concurrent.futures.ThreadPoolExecutor(1) as encoder:
            if when == "in front of it":
                encoder.submit(engine.goes_on.wait, 10)
            handing = encoder.submit(submit, engine, [[5, 6]], SamplingParams(), 3, time.monotonic() + 60, drafts=True)
            asking = asyncio.create_task(submitted(engine, handing))
            await asyncio.sleep(0)
            if when != "in front of it":
                assert engine.begun.wait(10)
            if when == "behind it":
                engine.goes_on.set()
                assert len(handing.result(10)) == 3
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            engine.goes_on.set()

    asyncio.run(ask_and_leave())
    assert len(engine.taken) == (0 if when == "in front of it" else 3)
    assert engine.aborted == engine.taken


def test_others_are_served_while_answers_are_handed_in(served, engine, monkeypatch):
    """Many answers to a long prompt take a while."""
    slow = Slow()

    def wait_and_refuse(*_: Any, **__: Any) -> Request:
        slow.submit()
        raise ValueError("prompt: got enough, expected less")

    monkeypatch.setattr(engine, "submit", wait_and_refuse)
    with concurrent.futures.ThreadPoolExecutor(1) as client:
        asking = client.submit(served.client.completions.create, model="org/tiny", prompt="apple", n=64)
        assert slow.begun.wait(10)
        assert served.http.get("/health").status_code == 200
        slow.goes_on.set()
        with pytest.raises(openai.BadRequestError, match="prompt: got enough"):
            asking.result(60)


class Told(Request):
    """An answer that ends when it is told to; its first piece has no token yet."""

    def __init__(self) -> None:
        self.ends, self.output = asyncio.get_running_loop().create_future(), None
        self.ids, self._token_ids = [1], []

    async def __aiter__(self):
        yield Piece("", [], None, [], None)
        yield Piece("a", [5], None, [0], None)
        await self.ends
        self.output = Output([5, 6], "ab", "length", Stats(1, [1]))
        yield Piece("b", [6], "length", [1], None)


def test_the_time_to_the_first_token_is_counted_when_it_comes_and_from_the_arrival_on(engine):
    metrics = Metrics(engine)

    def sample(name: str) -> float | None:
        return metrics.registry.get_sample_value(f"eagle3_jax_time_to_first_token_seconds_{name}")

    async def answer() -> None:
        request, tasks = Told(), set()
        async with Answers(engine, metrics, tasks, [request], 1, time.monotonic() - 100):
            (task,) = tasks
            while not sample("count"):
                await asyncio.sleep(0.001)
                assert not task.done()
            assert 100 <= (sample("sum") or 0) < 130
            request.ends.set_result(None)
            await task
            assert sample("count") == 1

    asyncio.run(asyncio.wait_for(answer(), 30))


class Waiting(Answers):
    """One answer, whose first token comes when it is told to; a piece without tokens comes before."""

    def __init__(self) -> None:
        self.requests, self.goes_on = [Told()], asyncio.get_running_loop().create_future()  # pyrefly: ignore

    async def pieces(self):
        yield 0, Piece("", [], None, [], None)
        await self.goes_on
        yield 0, Piece("a", [5], "stop", [0], None)


def test_a_stream_opens_with_its_first_token():
    """Clients take the first event's time for the first token's."""

    async def stream() -> list[bytes]:
        shape = ChatShape(Tokens(tiny.make_byte_tokenizer(None)))
        body = protocol.read(protocol.Chat, b'{"messages": [{"role": "user", "content": "a"}]}')
        answers = Waiting()
        events = _events(answers, Envelope(shape, "a"), body)
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.05)
        assert not first.done()
        answers.goes_on.set_result(None)
        return [await first, *[event async for event in events]]

    opening, part, done = asyncio.run(asyncio.wait_for(stream(), 30))
    assert b'"role":"assistant"' in opening and b'"content":"a"' in part and done == DONE


class Broken(Told):
    """An answer whose reader fails behind the first piece."""

    async def __aiter__(self):
        yield Piece("a", [5], None, [0], None)
        raise OverflowError("no such token")


def test_a_reader_that_fails_ends_its_answer(engine):
    async def answer() -> None:
        requests = [Broken(), Told()]
        async with Answers(engine, Metrics(engine), set(), requests, 1, time.monotonic()) as answers:
            with pytest.raises(ApiError, match="request: the server failed; its log says why"):
                [piece async for piece in answers.pieces()]

    asyncio.run(asyncio.wait_for(answer(), 30))
