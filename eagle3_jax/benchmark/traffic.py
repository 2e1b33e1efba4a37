"""Traffic for a server of OpenAI's API: latency and throughput as its clients see them.

The words are those of SGLang's and vLLM's bench_serving. TTFT is the time to the first token, TPOT the time per output
token behind the first. ITL is the inter-token latency: the tokens of one chunk share the time since the chunk before.

The server counts the tokens. Some (OpenAI, older SGLang) count them in the last event alone; the count is then spread
over the pieces of text. TTFT, latency and throughput stay exact; TPOT and ITL become estimates.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import httpx2
import numpy as np

Prompt = dict[str, Any]  # as of `sources.read_file`: messages, category, id
COUNTS_ON = "continuous_usage_stats"  # a field of `stream_options` in vLLM, SGLang and here
_PERCENTILES = (50, 95, 99)
# Reasoning in an event's delta, as SGLang and as newer versions of vLLM call it. Some servers write both.
_REASONING = ("reasoning_content", "reasoning")


@dataclasses.dataclass(frozen=True)
class Timing:
    """One request as its client saw it; seconds.

    Attributes:
        sent: seconds since the traffic began.
        chunks: for every part of the answer, seconds since `sent` and new tokens.
        error: the message of the server or the connection, where there is no answer.
    """

    category: str
    sent: float
    chunks: tuple[tuple[float, int], ...] = ()
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.chunks)

    @property
    def latency(self) -> float:
        return self.chunks[-1][0]

    @property
    def ttft(self) -> float:
        return self.chunks[0][0]

    @property
    def tpot(self) -> float | None:
        """Time per output token behind the first chunk; None where there is one chunk alone."""
        behind = self.tokens - self.chunks[0][1]
        return (self.latency - self.ttft) / behind if behind else None

    @property
    def itl(self) -> list[float]:
        return [
            (now - before) / tokens
            for (before, _), (now, tokens) in itertools.pairwise(self.chunks)
            for _ in range(tokens)
        ]


@dataclasses.dataclass(frozen=True)
class Server:
    """A server of OpenAI's API.

    Attributes:
        url: with the version, as OpenAI's clients take it: http://127.0.0.1:8000/v1.
        key: its API key, if it wants one.
        counts_on: asks it to count tokens in every event. A server that cannot ignores or refuses the field.
    """

    url: str
    model: str
    key: str | None = dataclasses.field(default=None, repr=False)
    counts_on: bool = True

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}

    async def ask(self, client: httpx2.AsyncClient, prompt: Prompt, start: float, **params: Any) -> Timing:
        """Sends a prompt and reads the streamed answer. A refusal or a broken connection is a timing with `error`."""
        sent = time.perf_counter()
        category = prompt.get("category") or "all"
        body = {
            "model": self.model,
            "messages": prompt["messages"],
            "stream": True,
            "stream_options": {"include_usage": True} | ({COUNTS_ON: True} if self.counts_on else {}),
            **params,
        }
        timing = Timing(category, sent - start)
        try:
            url = f"{self.url}/chat/completions"
            async with client.stream("POST", url, json=body, headers=self.headers) as response:
                if response.status_code != 200:
                    said = (await response.aread()).decode(errors="replace")
                    return dataclasses.replace(timing, error=f"{response.status_code}: {said[:200]}")
                return await _read(response, timing, sent)
        except (httpx2.HTTPError, json.JSONDecodeError) as error:
            return dataclasses.replace(timing, error=f"{type(error).__name__}: {error}")


async def _read(response: httpx2.Response, timing: Timing, sent: float) -> Timing:
    """Reads the answer's chunks."""
    counted: list[tuple[float, int]] = []  # from the events' usage
    pieces: list[tuple[float, str]] = []
    usage: dict[str, Any] = {}
    async for line in _lines(response):
        if not line.startswith("data:") or (data := line.removeprefix("data:").strip()) == "[DONE]":
            continue
        now, event = time.perf_counter() - sent, json.loads(data)
        if event.get("error") is not None:
            return dataclasses.replace(timing, error=json.dumps(event["error"])[:200])
        deltas = [choice.get("delta") or {} for choice in event.get("choices") or ()]
        if text := "".join(map(_text, deltas)):
            pieces.append((now, text))
        usage = event.get("usage") or usage
        if (new := (usage.get("completion_tokens") or 0) - sum(tokens for _, tokens in counted)) > 0:
            counted.append((now, new))
    if not counted:
        return dataclasses.replace(timing, error="got an answer without tokens or without usage")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return dataclasses.replace(
        timing,
        chunks=tuple(_shared(pieces, usage["completion_tokens"]) if len(counted) == 1 and pieces else counted),
        text="".join(text for _, text in pieces),
        prompt_tokens=usage.get("prompt_tokens") or 0,
        cached_tokens=cached,
    )


async def _lines(response: httpx2.Response) -> AsyncIterator[str]:
    """Splits at line feeds alone: an event's text may hold Unicode's other line breaks."""
    held = b""
    async for part in response.aiter_bytes():
        *whole, held = (held + part).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")
    yield held.decode(errors="replace")


def _text(delta: Mapping[str, Any]) -> str:
    reasoning = next((delta[field] for field in _REASONING if delta.get(field)), "")
    return reasoning + (delta.get("content") or "")


def _shared(pieces: Sequence[tuple[float, str]], tokens: int) -> list[tuple[float, int]]:
    """Spreads a token count over the pieces of an answer: one each, the others by the pieces' lengths."""
    spare, length = max(0, tokens - len(pieces)), sum(len(text) for _, text in pieces)
    chunks, given, written = [], 0, 0
    for number, (seconds, text) in enumerate(pieces, 1):
        written += len(text)
        until = min(tokens, number + spare * written // length)
        chunks.append((seconds, until - given))
        given = until
    return chunks


Ask = Callable[[Prompt], Awaitable[Timing]]


async def closed_loop(ask: Ask, prompts: Sequence[Prompt], concurrency: int) -> list[Timing]:
    """Runs `concurrency` clients; each sends the next prompt when it has its answer. Returns the prompts' order."""
    timings: list[Timing | None] = [None] * len(prompts)
    waiting = iter(range(len(prompts)))

    async def client() -> None:
        for index in waiting:
            timings[index] = await ask(prompts[index])

    await asyncio.gather(*[client() for _ in range(concurrency)])
    return [timing for timing in timings if timing is not None]


async def poisson(ask: Ask, prompts: Sequence[Prompt], rate: float, seed: int) -> list[Timing]:
    """Sends prompts at random times, `rate` a second on average, answered or not. Returns the prompts' order."""
    draw, tasks = random.Random(seed), []
    due = time.perf_counter()
    for prompt in prompts:
        due += draw.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(_awaited(ask, prompt)))
    return list(await asyncio.gather(*tasks))


async def _awaited(ask: Ask, prompt: Prompt) -> Timing:
    return await ask(prompt)


def summary(timings: Sequence[Timing]) -> dict[str, Any]:
    """Sums up the requests of one level: overall, and under `categories`.

    Returns:
        `requests`, `failed` and the first `errors`; `seconds` from the first request to the last answer; over them
        `tokens`, `tokens_per_second` and `requests_per_second`; `prompt_tokens` and `cached_tokens`; mean, p50, p95 and
        p99 of `ttft`, `tpot`, `itl` and `latency`, in seconds.
    """
    answered = [timing for timing in timings if timing.error is None]
    found = _figures(answered) | {
        "requests": len(timings),
        "failed": len(timings) - len(answered),
        "errors": [timing.error for timing in timings if timing.error is not None][:3],
    }
    if answered:
        start = min(timing.sent for timing in timings)
        seconds = max(timing.sent + timing.latency for timing in answered) - start
        found |= {
            "seconds": seconds,
            "tokens_per_second": found["tokens"] / seconds,
            "requests_per_second": len(answered) / seconds,
        }
    names = sorted({timing.category for timing in answered})
    return found | {"categories": {name: _figures([t for t in answered if t.category == name]) for name in names}}


def _figures(timings: Sequence[Timing]) -> dict[str, Any]:
    tpot = [timing.tpot for timing in timings if timing.tpot is not None]
    return {
        "tokens": sum(timing.tokens for timing in timings),
        "prompt_tokens": sum(timing.prompt_tokens for timing in timings),
        "cached_tokens": sum(timing.cached_tokens for timing in timings),
        "ttft": _distribution([timing.ttft for timing in timings]),
        "tpot": _distribution(tpot),
        "itl": _distribution([gap for timing in timings for gap in timing.itl]),
        "latency": _distribution([timing.latency for timing in timings]),
    }


def _distribution(values: Sequence[float]) -> dict[str, float] | None:
    """Computes mean and percentiles; None without values."""
    if not values:
        return None
    percentiles = np.percentile(values, _PERCENTILES).tolist()
    return {"mean": float(np.mean(values))} | {f"p{p}": x for p, x in zip(_PERCENTILES, percentiles, strict=True)}
