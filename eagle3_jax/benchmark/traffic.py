"""Traffic for a server of OpenAI's API: latency and throughput as its clients see them.

The words are those of `vllm bench serve`. TTFT is the time to the first text, TPOT the time from there to the last,
for each output token behind the first. The server counts the tokens.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import httpx2
import numpy as np

Prompt = dict[str, Any]  # as of `sources.read_file`: messages, category, id
_PERCENTILES = (50, 95, 99)
# Reasoning in an event's delta, as SGLang and as newer versions of vLLM call it. Some servers write both.
_REASONING = ("reasoning_content", "reasoning")


@dataclasses.dataclass(frozen=True)
class Timing:
    """One request as its client saw it: seconds since the traffic began, and from then to the first and the last text;
    the message of the server or the connection, where there is no answer."""

    category: str
    sent: float
    ttft: float = 0.0
    latency: float = 0.0
    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        """Time per output token behind the first; None where all came at once."""
        behind = self.latency - self.ttft
        return behind / (self.tokens - 1) if behind and self.tokens > 1 else None


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A server of OpenAI's API, at a URL with the version, as OpenAI's clients take it: http://127.0.0.1:8000/v1."""

    url: str
    model: str
    key: str | None = dataclasses.field(default=None, repr=False)

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}

    async def ask(self, client: httpx2.AsyncClient, prompt: Prompt, start: float, **params: Any) -> Timing:
        """Sends a prompt and reads the streamed answer. A refusal or a broken connection is a timing with `error`."""
        sent = time.perf_counter()
        timing = Timing(prompt.get("category") or "all", sent - start)
        body = {"model": self.model, "messages": prompt["messages"], "stream": True, **params}
        body["stream_options"] = {"include_usage": True}
        try:
            url = f"{self.url}/chat/completions"
            async with client.stream("POST", url, json=body, headers=self.headers) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    return dataclasses.replace(timing, error=f"{response.status_code}: {text[:200]}")
                return await _read(response, timing, sent)
        except (httpx2.HTTPError, json.JSONDecodeError) as error:
            return dataclasses.replace(timing, error=f"{type(error).__name__}: {error}")


async def _read(response: httpx2.Response, timing: Timing, sent: float) -> Timing:
    pieces: list[tuple[float, str]] = []
    usage: dict[str, Any] = {}
    async for line in _lines(response):
        if not line.startswith("data:") or (data := line.removeprefix("data:").strip()) == "[DONE]":
            continue
        now, event = time.perf_counter() - sent, json.loads(data)
        if event.get("error") is not None:
            return dataclasses.replace(timing, error=json.dumps(event["error"])[:200])
        if text := "".join(_text(choice.get("delta") or {}) for choice in event.get("choices") or ()):
            pieces.append((now, text))
        usage = event.get("usage") or usage
    if not usage.get("completion_tokens"):
        return dataclasses.replace(timing, error="got an answer without tokens or without usage")
    times = [seconds for seconds, _ in pieces] or [time.perf_counter() - sent]  # tokens may have no text
    return dataclasses.replace(
        timing,
        ttft=times[0],
        latency=times[-1],
        text="".join(text for _, text in pieces),
        tokens=usage["completion_tokens"],
        prompt_tokens=usage.get("prompt_tokens") or 0,
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
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


Ask = Callable[[Prompt], Awaitable[Timing]]


async def closed_loop(ask: Ask, prompts: Sequence[Prompt], concurrency: int) -> list[Timing]:
    """Runs `concurrency` clients; each sends the next prompt when it has its answer. Returns the prompts' order."""
    free = asyncio.Semaphore(concurrency)

    async def client(prompt: Prompt) -> Timing:
        async with free:
            return await ask(prompt)

    return list(await asyncio.gather(*map(client, prompts)))


async def poisson(ask: Ask, prompts: Sequence[Prompt], rate: float, seed: int) -> list[Timing]:
    """Sends prompts at random times, `rate` a second on average, answered or not. Returns the prompts' order."""
    gaps = random.Random(seed)
    due = time.perf_counter() + np.cumsum([gaps.expovariate(rate) for _ in prompts])

    async def client(prompt: Prompt, at: float) -> Timing:
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        return await ask(prompt)

    return list(await asyncio.gather(*map(client, prompts, due)))


def summary(timings: Sequence[Timing]) -> dict[str, Any]:
    """Sums up the requests of one level: overall, and under `categories`."""
    answered = [timing for timing in timings if timing.error is None]
    errors = [timing.error for timing in timings if timing.error is not None]
    found = _figures(answered) | {"requests": len(timings), "failed": len(errors), "errors": errors[:3]}
    if answered:
        # From the first request to the last answer.
        seconds = max(timing.sent + timing.latency for timing in answered) - min(timing.sent for timing in timings)
        rates = {"tokens_per_second": found["tokens"] / seconds, "requests_per_second": len(answered) / seconds}
        found |= {"seconds": seconds, **rates}
    names = sorted({timing.category for timing in answered})
    return found | {"categories": {name: _figures([t for t in answered if t.category == name]) for name in names}}


def _figures(timings: Sequence[Timing]) -> dict[str, Any]:
    sums = {name: sum(getattr(t, name) for t in timings) for name in ("tokens", "prompt_tokens", "cached_tokens")}
    return sums | {name: _distribution([getattr(t, name) for t in timings]) for name in ("ttft", "tpot", "latency")}


def _distribution(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    percentiles = np.percentile(known, _PERCENTILES).tolist()
    return {"mean": float(np.mean(known))} | {f"p{p}": x for p, x in zip(_PERCENTILES, percentiles, strict=True)}
