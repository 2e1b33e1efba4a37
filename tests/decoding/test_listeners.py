"""A caller that waits may leave, fail or die, and a callback may raise: other requests do not notice."""

import asyncio
import concurrent.futures
import threading
from typing import Any

import pytest
from toy import Tokenizer, make

from eagle3_jax.decoding.choice import tiers
from eagle3_jax.decoding.device import programs
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.request import Output, Request

SHORT, LONG = SamplingParams(max_tokens=12), SamplingParams(max_tokens=100)


class Undecodable(Tokenizer):
    def decode(self, ids, skip_special_tokens):
        raise OverflowError("no such token")


@pytest.fixture
def engine(toy) -> Engine:
    return make(toy)


@pytest.fixture
def by_hand(engine, monkeypatch) -> Engine:
    """Nothing works unless the test does."""
    monkeypatch.setattr(engine._loop, "drive_in_background", lambda: None)
    return engine


def is_free(engine: Engine) -> bool:
    stats = engine.stats()
    return (stats.running, stats.waiting, stats.free_pages) == (0, 0, stats.pages)


async def whole(request: Request) -> list[int]:
    return (await request).token_ids


async def pieces(request: Request) -> list[int]:
    got = [piece async for piece in request]
    assert [piece.finish_reason for piece in got].count(None) == len(got) - 1
    return [token for piece in got for token in piece.token_ids]


async def a_piece(request: Request) -> None:
    """Is at work on the first piece for ever."""
    async for _ in request:
        await asyncio.sleep(3600)


def await_in_closed_loop(request: Request) -> asyncio.Task[Any]:
    """A task that waits, in an event loop that was closed without a word to it."""
    loop = asyncio.new_event_loop()
    task: Any = loop.create_task(whole(request))
    task._log_destroy_pending = False
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    return task


@pytest.mark.slow
@pytest.mark.parametrize("end", ["its last token", "abort", "a failure of the device"])
def test_a_listener_in_a_closed_loop_is_dropped(by_hand, monkeypatch, end):
    engine, decode, failing = by_hand, programs.decode, [end == "a failure of the device"]
    (expected,) = engine.generate(["abc"], LONG)
    requests = [engine.submit("abc", LONG) for _ in range(3)]  # two run, one waits
    engine._loop.drive(lambda: bool(engine.stats().running))
    task, seen = await_in_closed_loop(requests[0]), []
    requests[2]._listeners.add(lambda: seen.append((requests[2].done, engine.stats().running)))
    monkeypatch.setattr(
        programs, "decode", lambda *args, **how: failing.pop() / 0 if any(failing) else decode(*args, **how)
    )
    if end == "abort":
        requests[0].abort()
        assert requests[0].done and engine.stats().running == 1
    assert requests[2].result().token_ids == expected.token_ids
    reasons = {"its last token": ["length"] * 2, "abort": ["abort", "length"]}.get(end, ["error"] * 2)
    assert [request.result().finish_reason for request in requests[:2]] == reasons
    assert is_free(engine)
    assert seen[-1] == (True, 0)  # its place was free when it was told
    assert not task.done()


@pytest.mark.slow
@pytest.mark.parametrize("wait", [whole, pieces, a_piece])
def test_a_reader_who_is_cancelled_aborts_unless_another_one_is_left(by_hand, wait):
    engine = by_hand

    async def main() -> None:
        request = engine.submit("abc", LONG)
        leaving, staying = asyncio.create_task(wait(request)), asyncio.create_task(whole(request))
        for task in (leaving, staying):
            await asyncio.sleep(0.01)
            engine._scheduler.turn()
            engine._scheduler.turn()
            await asyncio.sleep(0.01)
            assert not request.done
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.sleep(0.01)  # a loop over pieces that is left is closed by the event loop
        assert request.output is not None and request.output.finish_reason == "abort"

    asyncio.run(main())
    assert is_free(engine)


def test_tokens_that_cannot_be_decoded_fail_alone(engine):
    (expected,) = engine.generate(["abc"], SHORT)
    # The first two run side by side: one fails at its first token, one at the end of its answer.
    scanned, good, plain = (
        engine.submit("abc", SamplingParams(max_tokens=12, stop=stop)) for stop in (("no",), (), ())
    )
    assert scanned._scanner is not None
    scanned._scanner._detokenizer._tokenizer = plain._tokenizer = Undecodable()
    assert good.result().token_ids == expected.token_ids
    for request in (scanned, plain):
        assert (request.result().finish_reason, request.result().error) == ("error", "OverflowError: no such token")
    assert is_free(engine)


def test_who_aborts_while_another_thread_ends_its_work_is_not_forgotten(engine):
    """Whoever works has looked for aborted requests already, and turns no more."""
    request = engine.submit("abc", LONG)

    def ready() -> bool:
        if engine.stats().running and not request.aborted:
            request.abort()
        return request.aborted

    engine._loop.drive(ready)
    assert request.done and is_free(engine)


def test_answers_that_end_together_are_all_reported_though_the_callback_raises(engine):
    reported: list[int] = []

    def on_output(index: int, output: Output) -> None:
        reported.append(index)
        raise KeyError(index)

    with pytest.raises(KeyError, match="0"):
        engine.generate(["abc"] * 3, SHORT, on_output)  # two run, one waits
    assert reported == [0, 1]
    assert is_free(engine)


def test_a_failure_of_the_device_is_told_to_those_it_ended_alone(engine, monkeypatch):
    """Not to who works: it waits for another request."""
    decode, left, reported = programs.decode, [1], []
    expected = engine.generate(["abc"], SHORT)[0].token_ids

    def fail_once(*args: Any, **options: Any) -> Any:
        return 1 / 0 if left and left.pop() else decode(*args, **options)

    monkeypatch.setattr(programs, "decode", fail_once)
    requests = [engine.submit("abc", SHORT) for _ in range(3)]  # two run, one waits
    assert requests[2].result().token_ids == expected
    for request in requests[:2]:
        assert (request.result().finish_reason, request.result().error) == (
            "error",
            "ZeroDivisionError: division by zero",
        )
    for ask in (
        lambda: engine.generate(["abc", "d"], SHORT, lambda *ended: reported.append(ended)),
        lambda: list(engine.stream("abc")),
    ):
        left.append(1)
        with pytest.raises(ZeroDivisionError):
            ask()
    assert not reported and is_free(engine)


def test_what_needs_an_idle_engine_is_refused_at_once_under_traffic(toy, engine, monkeypatch):
    going, goes_on, decode = threading.Event(), threading.Event(), programs.decode
    wanted = (engine.warm_up, lambda: engine.profile(tiers.VANILLA), lambda: engine.replace_draft(toy.good))

    def held(*args: Any, **options: Any) -> Any:
        going.set()
        assert goes_on.wait(60)
        return decode(*args, **options)

    async def traffic() -> None:
        await asyncio.gather(*(whole(engine.submit("abc", SHORT)) for _ in range(3)))

    monkeypatch.setattr(programs, "decode", held)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        client = pool.submit(asyncio.run, traffic())
        assert going.wait(60)
        try:
            for name, want in zip(("warm_up", "profile", "replace_draft"), wanted, strict=True):
                with pytest.raises(RuntimeError, match=f"{name}: got 3 running requests, expected none"):
                    pool.submit(want).result(30)
        finally:
            goes_on.set()
        client.result(60)
    # The engine's thread may hold the engine a little longer than there are requests.
    engine._loop._working.acquire()
    threading.Timer(0.2, engine._loop._let_go).start()
    engine.replace_draft(toy.good)
