"""Latency of a server's clients by chunk and token, against formulas and a server of known answers."""

from __future__ import annotations

import asyncio
import json
import math
import time
from typing import Any

import httpx2
import numpy as np
import pytest

from eagle3_jax.benchmark import traffic
from eagle3_jax.benchmark.traffic import Endpoint, Timing

SERVER = Endpoint("http://server/v1", "a-model", key="secret")
PROMPT = {"messages": [{"role": "user", "content": "Hi"}], "category": "chat"}


def event(text: str, tokens: int | None, **more: Any) -> bytes:
    usage = None if tokens is None else {"prompt_tokens": 7, "completion_tokens": tokens}
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}], "usage": usage} | more).encode() + b"\n\n"


def asked(*events: bytes, status: int = 200, pause: float = 0.0) -> tuple[Timing, httpx2.Request]:
    """What `ask` makes of a server that sends these."""
    seen = []

    async def body():
        for part in events:
            await asyncio.sleep(pause)
            if part == b"break":
                raise httpx2.RemoteProtocolError("peer closed")
            yield part

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return httpx2.Response(status, content=body())

    async def main() -> Timing:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as client:
            return await SERVER.ask(client, PROMPT, time.perf_counter(), max_tokens=8)

    return asyncio.run(main()), seen[0]


def last(tokens: int | None) -> bytes:
    """The event of usage alone."""
    return event("", tokens, choices=[])


def test_times_are_of_the_text_and_tokens_of_the_last_count():
    usage = {"prompt_tokens": 7, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 5}}
    end = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
    parts = event("", 0), event("a", 1), event(" b c", None), event(" d", 6), end, b"data: [DONE]\n\n"
    found, request = asked(*parts, pause=0.02)
    assert found.text == "a b c d"
    assert (found.tokens, found.prompt_tokens, found.cached_tokens, found.category) == (6, 7, 5, "chat")
    assert 0.04 <= found.ttft and found.latency - found.ttft >= 0.04
    assert found.tpot == (found.latency - found.ttft) / 5
    sent = json.loads(request.content)
    assert sent["stream_options"] == {"include_usage": True}
    assert (sent["model"], sent["max_tokens"]) == ("a-model", 8) and request.headers["Authorization"] == "Bearer secret"
    assert "secret" not in repr(SERVER)


def test_an_answer_in_one_chunk_has_no_time_per_token():
    found, _ = asked(event("a b c", None), last(3), pause=0.02)
    assert (found.tokens, found.text, found.tpot) == (3, "a b c", None)
    assert found.ttft == found.latency >= 0.02
    figures = traffic.summary([found])
    assert figures["tpot"] is None and figures["ttft"]["p50"] == found.ttft
    found, _ = asked(event("", None), last(2), pause=0.02)  # tokens may have no text
    assert (found.text, found.tokens, found.tpot) == ("", 2, None) and found.ttft == found.latency >= 0.04


def test_fields_may_be_null_and_lines_close():
    usage = {"prompt_tokens": None, "completion_tokens": 2, "prompt_tokens_details": None}
    parts = event("", None, choices=[{"delta": None}], error=None), event("a", None, usage=usage, choices=None), last(2)
    # Reasoning is part of the answer, under one name or both.
    thoughts = event("", 1, choices=[{"delta": dict.fromkeys(("reasoning_content", "reasoning"), "so ")}])
    other = event("", 1, choices=[{"delta": {"reasoning": "on "}}])
    found, _ = asked(*(part.replace(b"data: ", b"data:") for part in (*parts, thoughts, other)), event("ab", 2))
    assert (found.error, found.tokens, found.text, found.prompt_tokens) == (None, 2, "so on ab", 7)


def test_line_breaks_of_unicode_are_text():
    """Servers write them as they are; an event ends at a line feed alone, and may come in parts."""
    text = "a\u2028b\x85c"
    raw = f'data: {{"choices": [{{"delta": {{"content": "{text}"}}}}], "usage": {{"completion_tokens": 3}}}}\r\n\r\n'
    found, _ = asked(raw.encode()[:50], raw.encode()[50:51], raw.encode()[51:])
    assert (found.error, found.text, found.tokens) == (None, text, 3)


@pytest.mark.parametrize(
    ("events", "status", "message"),
    [
        ([b"data: <html>\n\n"], 200, "JSONDecodeError"),
        ([b"too many"], 429, "429: too many"),
        ([event("a", 1), b"break"], 200, "RemoteProtocolError: peer closed"),
        ([event("a", 1), b'data: {"error": {"message": "device lost"}}\n\n'], 200, "device lost"),
        ([event("a", None), last(None)], 200, "without tokens or without usage"),
    ],
)
def test_no_answer_is_no_timing(events, status, message):
    found, _ = asked(*events, status=status)
    assert message in str(found.error) and not found.tokens


def test_a_closed_loop_keeps_all_clients_busy_and_the_order():
    prompts = [{"messages": [], "category": str(i)} for i in range(9)]

    async def main() -> None:
        answered, sent = [asyncio.Event() for _ in prompts], []

        async def ask(prompt: traffic.Prompt) -> Timing:
            sent.append(int(prompt["category"]))
            await answered[int(prompt["category"])].wait()
            return Timing(prompt["category"], 0.0)

        async def settle() -> list[int]:
            for _ in range(20):  # turns of the loop: no clock decides
                await asyncio.sleep(0)
            return sent

        loop = asyncio.create_task(traffic.closed_loop(ask, prompts, 5))
        assert await settle() == [0, 1, 2, 3, 4]
        answered[2].set()
        assert await settle() == [0, 1, 2, 3, 4, 5]
        for event in answered:
            event.set()
        assert [timing.category for timing in await loop] == [str(i) for i in range(9)]

    asyncio.run(main())


def test_arrivals_at_random_wait_for_nobody_and_come_at_the_rate():
    prompts = [{"messages": [], "category": str(i)} for i in range(200)]

    async def ask(prompt: traffic.Prompt) -> Timing:
        sent = time.perf_counter()
        await asyncio.sleep(0.3)  # far longer than the gap between two
        return Timing(prompt["category"], sent)

    found = asyncio.run(traffic.poisson(ask, prompts, 400.0, seed=3))
    assert [timing.category for timing in found] == [str(i) for i in range(200)]
    gaps = np.diff([timing.sent for timing in found])
    assert len(gaps) / 400 * 0.6 < sum(gaps) < 5 and np.std(gaps) > 0.3 * np.mean(gaps)


def test_a_summary_is_what_the_formulas_say():
    timings = [
        Timing("code", 0.0, 0.5, 1.0, tokens=5, prompt_tokens=10),
        Timing("chat", 1.0, 0.2, 0.2, tokens=1, prompt_tokens=20, cached_tokens=16),
        Timing("chat", 1.5, 0.3, 0.5, tokens=3, prompt_tokens=30),
        Timing("code", 2.0, error="503: full"),
    ]
    found = traffic.summary(timings)
    assert (found["requests"], found["failed"], found["errors"]) == (4, 1, ["503: full"])
    assert found["tokens"] == 9 and found["seconds"] == 2.0 and found["tokens_per_second"] == 4.5
    assert (found["prompt_tokens"], found["cached_tokens"]) == (60, 16)
    assert found["tpot"]["mean"] == pytest.approx((0.125 + 0.1) / 2)
    assert found["ttft"]["p50"] == 0.3 and math.isclose(found["ttft"]["p95"], np.percentile([0.5, 0.2, 0.3], 95))
    assert set(found["categories"]) == {"code", "chat"}
    assert found["categories"]["code"]["tokens"] == 5
    assert found["categories"]["chat"]["tpot"]["p99"] == pytest.approx(0.1)
    none = traffic.summary([Timing("chat", 0.0, error="x")])
    assert none["failed"] == 1 and none["ttft"] is None and "tokens_per_second" not in none
