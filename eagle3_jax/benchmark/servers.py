"""`python -m eagle3_jax.benchmark serve`: latency and throughput of a server under traffic, with drafts and without.

`python -m eagle3_jax.serve` is started twice: without drafts, and with the draft that `serve` configures. On CPUs all
servers take turns, level by level; on an accelerator, with room for one, the next starts when one has ended. All
measurements lie in `<run_dir>/benchmark/serve.json`. The figures of a server are kept in `serve_<name>.json` after each
level; a later run does not measure them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import httpx2
import yaml
from tqdm import tqdm

from eagle3_jax.benchmark import traffic
from eagle3_jax.benchmark.traffic import Endpoint, Prompt, Timing
from eagle3_jax.config import RunConfig, TrafficConfig, run_file
from eagle3_jax.data import sources
from eagle3_jax.runs import command, disk, machine

VANILLA, SPECULATIVE = "vanilla", "speculative"
_START, _END = 1800.0, 60.0  # seconds that a server may take to load and warm up, and to drain


def run(
    config: RunConfig,
    prompts_path: str | pathlib.Path,
    others: dict[str, str] | None = None,
    keys: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Measures, writes the files, and returns the content of `serve.json`.

    `others`: name -> URL, with the version, of further servers; `keys`: name -> API key, which is written nowhere.
    Raises ValueError: no prompts, a taken name, a device that another process holds, a server that does not answer.
    """
    prompts_path, others, keys = disk.path_of(prompts_path), others or {}, keys or {}
    if taken := {VANILLA, SPECULATIVE} & set(others):
        raise ValueError(f"--compare: got the name {min(taken)}, expected another: it is one of this package's own")
    prompts = sources.spread(sources.read_file(prompts_path)[0], None)
    folder = config.folder("benchmark")
    identity = {
        "traffic": run_file.to_dict(config.traffic),
        "seed": config.seed,
        "prompts_file": {"name": prompts_path.name, "sha256": disk.digest(prompts_path)},
        "hardware": (hardware := _hardware()),
        "versions": machine.versions(),
    }
    with disk.lock(folder / "serve.json"):
        measured: dict[str, _Measured] = {}
        for name in (VANILLA, SPECULATIVE):
            started = _configured(config, vanilla=name == VANILLA)
            about = {"target": started["target"], "serve": started["serve"]}
            server = _started(started, folder / f"serve_{name}.yaml")
            measured[name] = _Measured(folder / f"serve_{name}.json", identity | about, server)
        for name, url in others.items():
            server = contextlib.nullcontext(Endpoint(url.rstrip("/"), "", keys.get(name)))
            measured[name] = other = _Measured(folder / f"serve_{name}.json", identity | {"url": url}, server)
            if len(other.levels) < len(_loads(config.traffic)):  # a missing server is found before hours of measuring
                other.server = contextlib.nullcontext(found_at(url.rstrip("/"), keys.get(name)))
        # A process on an accelerator takes all of its memory.
        every = list(measured.items())
        for group in [every] if hardware["accelerator"] is None else [[one] for one in every]:
            _take_turns(dict(group), prompts, config)
        ways = {name: {"model": one.model, "levels": one.levels} for name, one in measured.items()}
        for one in measured.values():
            for level, vanilla in zip(one.levels, measured[VANILLA].levels, strict=True):
                pairs = zip(level["texts"], vanilla["texts"], strict=True)
                level["identical"] = sum(a == b and a is not None for a, b in pairs)
        report = {**identity, "target": run_file.to_dict(config)["target"], "ways": ways}
        disk.write_json(folder / "serve.json", report)
    return report


@dataclasses.dataclass
class _Measured:
    path: disk.Path
    identity: dict[str, Any]
    server: AbstractContextManager[Endpoint]
    model: str = ""
    levels: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        if kept := disk.kept(self.path, self.identity):  # an earlier run was this very measurement
            self.model, self.levels = kept["model"], kept["levels"]

    def add(self, level: dict[str, Any]) -> None:
        self.levels.append(level)
        disk.write_json(self.path, {"identity": self.identity, "model": self.model, "levels": self.levels})


def _loads(traffic: TrafficConfig) -> Sequence[tuple[str, int | float]]:
    return [("concurrency", clients) for clients in traffic.concurrency] + [("rate", rate) for rate in traffic.rates]


def _take_turns(group: dict[str, _Measured], prompts: Sequence[Prompt], config: RunConfig) -> None:
    """Measures the missing levels of each server, level by level; each level has the next prompts."""
    settings, seed, loads = config.traffic, config.seed, _loads(config.traffic)
    params = {"max_tokens": settings.max_tokens, "temperature": settings.temperature, "seed": seed}
    missing = [(name, one) for name, one in group.items() if len(one.levels) < len(loads)]
    servers: dict[str, Endpoint] = {}
    with contextlib.ExitStack() as stack:
        for name, one in missing:
            command.stop_point()
            servers[name] = server = stack.enter_context(one.server)
            one.model = server.model
            asyncio.run(_drive(server, [prompts[0]], params, "concurrency", 1, seed))  # warms caches of code
        cycle = itertools.cycle(prompts)
        for done, (kind, load) in enumerate(tqdm(loads, desc=", ".join(servers), disable=not servers)):
            count = max(settings.requests, 2 * int(load) if kind == "concurrency" else 0)
            asked = list(itertools.islice(cycle, count))
            for name, one in missing[:: (1, -1)[done % 2]]:  # no server is always the first
                if len(one.levels) > done:
                    continue
                command.stop_point()
                timings = asyncio.run(_drive(servers[name], asked, params, kind, load, seed))
                found = traffic.summary(timings)
                if found["failed"] == found["requests"]:
                    raise ValueError(f"{servers[name].url}: got no answer to {count} requests: {found['errors'][0]}")
                texts = [None if timing.error else timing.text for timing in timings]
                one.add({kind: load, **found, "texts": texts})


async def _drive(
    server: Endpoint, prompts: Sequence[Prompt], params: dict[str, Any], kind: str, load: float, seed: int
) -> list[Timing]:
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(timeout=httpx2.Timeout(_START), limits=limits) as client:
        start = time.perf_counter()

        async def ask(prompt: Prompt) -> Timing:
            return await server.ask(client, prompt, start, **params)

        if kind == "rate":
            return await traffic.poisson(ask, prompts, load, seed)
        return await traffic.closed_loop(ask, prompts, int(load))


def _hardware() -> dict[str, Any]:
    """Asks `machine.hardware` in another process: one that asks JAX holds the TPU, which the servers need."""
    code = "import json; from eagle3_jax.runs import environment, machine; environment.prepare()"
    code += "; print(json.dumps(machine.hardware()))"
    asked = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    if asked.returncode:
        raise ValueError(f"hardware: got status {asked.returncode} from JAX, expected a device that nobody else holds")
    return json.loads(asked.stdout.splitlines()[-1])


def _configured(config: RunConfig, *, vanilla: bool) -> dict[str, Any]:
    values = run_file.to_dict(config)
    values["serve"] |= {"port": 0, "host": "127.0.0.1", "api_key_variable": None, "api_key_file": None}
    if vanilla:
        values["serve"] |= {"draft": "none", "token_map": None, "trees": []}
    return values


@contextlib.contextmanager
def _started(values: dict[str, Any], path: pathlib.Path) -> Iterator[Endpoint]:
    """Runs a server of this package while it is measured. Raises ValueError: it does not start."""
    with disk.atomic(path) as temporary:
        temporary.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    words = [sys.executable, "-m", "eagle3_jax.serve", "--config", str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()  # comes once the server listens, or has ended
            found = re.match(r"(http://\S+) answers", line)
            if found is None:
                raise ValueError(f"{path}: got {_end(process.wait())} from the server, expected that it answers")
            yield found_at(found[1])
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END)
            except subprocess.TimeoutExpired:
                process.kill()


def _end(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    return signal.Signals(-status).name + " (often: no memory is left)" * (-status == signal.SIGKILL)


def found_at(url: str, key: str | None = None) -> Endpoint:
    """Asks a server for its first model. Raises ValueError: it does not answer, or has none."""
    server = Endpoint(url, "", key)
    try:
        listed = httpx2.get(f"{url}/models", headers=server.headers, timeout=30).raise_for_status().json()
        return dataclasses.replace(server, model=listed["data"][0]["id"])
    except (httpx2.HTTPError, httpx2.InvalidURL, KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{url}/models: got {error!r}, expected a server of OpenAI's API") from error


def table(report: dict[str, Any]) -> str:
    """Formats the report as fixed-width text; the speed-up is in the mean time per output token."""
    lines = []
    titles = [f"{n} client{'s' if n > 1 else ''}" for n in report["traffic"]["concurrency"]]
    titles += [f"{rate:g} requests a second" for rate in report["traffic"]["rates"]]
    levels = zip(*(way["levels"] for way in report["ways"].values()), strict=True)
    for title, of_ways in zip(titles, levels, strict=True):
        rows: list[tuple[str, ...]] = [
            (title, "tokens/s", "TTFT ms", "p95", "TPOT ms", "p95", "p99", "speed-up", "identical", "failed")
        ]
        for name, level in zip(report["ways"], of_ways, strict=True):
            ttft, tpot, vanilla = level["ttft"], level["tpot"], of_ways[0]["tpot"]
            cells = [name, f"{level['tokens_per_second']:.1f}", *(f"{1e3 * ttft[p]:.0f}" for p in ("p50", "p95"))]
            cells += ["-" if tpot is None else f"{1e3 * tpot[p]:.1f}" for p in ("p50", "p95", "p99")]
            cells.append("-" if tpot is None or vanilla is None else f"{vanilla['mean'] / tpot['mean']:.2f}x")
            rows.append((*cells, f"{level['identical']}/{level['requests']}", str(level["failed"])))
        lines += ["", *command.aligned(rows)]
    return "\n".join(lines[1:])
