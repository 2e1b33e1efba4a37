"""The verb on several processes: one server, which answers as one process does, and ends as one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import tiny

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.params import SamplingParams

# What is asked for is compiled when it is. While the file `slow` is there turns are slow, and silence is noticed early.
COLD = """
import pathlib, sys, time
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.hosts import wire
from eagle3_jax.decoding.scheduler import Scheduler
from eagle3_jax.serve import __main__ as serve

def turn(self, turn=Scheduler.turn):
    slow = pathlib.Path("slow").exists()
    wire.PATIENCE = 8 if slow else 200
    time.sleep(slow)
    turn(self)

wire.PATIENCE, Scheduler.turn, Engine.warm_up = 200, turn, lambda *_, **__: None
serve.main(sys.argv[1:])
"""
QUICKLY: Any = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
FLAGS = (
    "--target target --target.aux-layers 1 2 3 --draft lookup --port 0 --max-running-requests 2 --serve.max-length 256 "
    "--speculative-num-steps 3 --serve.request-timeout 8 --serve.model-name tiny"
).split()
PROMPTS = [[1, 270 + number, *range(300, 320), 280] for number in range(4)]
PARAMS = {"max_tokens": 16, "ignore_eos": True, "temperature": 0.0}
LONG = PARAMS | {"prompt": PROMPTS[0], "max_tokens": 200}


@dataclasses.dataclass
class Servers:
    """The processes of one server, in a folder with their target."""

    folder: pathlib.Path
    processes: list[tiny.Started]
    http: httpx2.Client

    @contextlib.contextmanager
    def slow(self) -> Iterator[None]:
        """Makes turns slow, so that a request can be met while it runs."""
        (self.folder / "slow").touch()
        try:
            yield
        finally:
            (self.folder / "slow").unlink()

    def ask(self, body: dict[str, Any]) -> list[int]:
        response = self.http.post("/v1/completions", json=body | {"return_token_ids": True})
        assert response.status_code == 200, [response.text, *(process.printed() for process in self.processes)]
        return response.json()["choices"][0]["token_ids"]

    @contextlib.contextmanager
    def streaming(self, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
        """The events of a stream behind its first one; they may end early."""
        asked = body | {"stream": True, "return_token_ids": True}
        with self.http.stream("POST", "/v1/completions", json=asked) as response:
            events = (line.removeprefix("data: ") for line in response.iter_lines() if line)
            yield (json.loads(event) for event in events if event != "[DONE]")

    def count(self, metric: str) -> float:
        found = re.search(rf"^eagle3_jax_{re.escape(metric)} (\S+)", self.http.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("served")
    tiny.write_target(folder / "target")
    return folder


@pytest.fixture(scope="module")
def alone(folder) -> list[list[int]]:
    """What an engine on one device answers."""
    engine = Engine.load(
        str(folder / "target"),
        "lookup",
        DraftTree(num_steps=3, topk=1, num_draft_tokens=4),
        batch_size=2,
        max_length=256,
    )
    return [output.token_ids for output in engine.generate(PROMPTS, SamplingParams(**PARAMS))]


@contextlib.contextmanager
def serving(folder: pathlib.Path, count: int, mesh: str) -> Iterator[Servers]:
    """Starts a server, and compiles what a first answer needs."""
    data, model = mesh.split("x")
    flags = [*FLAGS, "--dp-size", data, "--tp-size", model]
    processes = tiny.start_processes(count, ["-c", COLD, *flags], cwd=folder, **QUICKLY)
    try:
        while not (printed := processes[0].printed()).endswith("/v1 answers\n"):
            assert all(process.poll() is None for process in processes), [one.printed() for one in processes]
            time.sleep(0.05)
        with httpx2.Client(base_url=printed.splitlines()[-1].removesuffix("/v1 answers"), timeout=300) as http:
            servers = Servers(folder, processes, http)
            until = time.monotonic() + 300
            body = PARAMS | {"prompt": PROMPTS}
            while (answer := http.post("/v1/completions", json=body)).status_code == 504:  # it still compiles
                assert time.monotonic() < until, [process.printed() for process in processes]
            assert answer.status_code == 200, [answer.text, *(process.printed() for process in processes)]
            yield servers
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout=30)


def check_answers(servers: Servers, alone: list[list[int]]) -> None:
    assert [servers.ask(PARAMS | {"prompt": prompt}) for prompt in PROMPTS] == alone
    with servers.streaming(PARAMS | {"prompt": PROMPTS[0]}) as events:
        assert [token for event in events for token in event["choices"][0]["token_ids"]] == alone[0]


def check_abort_and_deadline(servers: Servers) -> None:
    before = {reason: servers.count(f'requests_ended_total{{reason="{reason}"}}') for reason in ("abort", "timeout")}
    with servers.slow():
        with servers.streaming(LONG) as events:
            next(events)  # and hang up
        late = servers.http.post("/v1/completions", json=LONG)
        assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
    for reason, count in before.items():
        assert servers.count(f'requests_ended_total{{reason="{reason}"}}') == count + 1
    assert servers.count("requests_running") == servers.count("requests_waiting") == 0


def check_drained(servers: Servers, index: int) -> None:
    """SIGTERM to any process: what was begun is answered, and all end well."""
    body = LONG | {"max_tokens": 40}
    whole = servers.ask(body)
    with contextlib.ExitStack() as slowly:
        slowly.enter_context(servers.slow())
        with servers.streaming(body) as events:
            tokens = next(events)["choices"][0]["token_ids"]
            servers.processes[index].send_signal(signal.SIGTERM)
            time.sleep(0.5)
            slowly.close()
            tokens += [token for event in events for token in event["choices"][0]["token_ids"]]
    assert tokens == whole
    for status, output in tiny.end_processes(servers.processes, timeout=30):
        assert status == 0 and "Traceback" not in output, output


@pytest.mark.long  # beside much other work the first dispatch failed, at a load of 10 on two cores
@pytest.mark.parametrize(("count", "mesh"), [(2, "1x2"), (4, "1x4"), (4, "2x2")])
def test_several_processes_serve_as_one(folder, alone, count, mesh):
    with serving(folder, count, mesh) as servers:
        check_answers(servers, alone)
        check_abort_and_deadline(servers)
        check_answers(servers, alone)  # what was aborted left nothing behind
        check_drained(servers, 0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "mesh", "lost", "sent"),
    [
        (2, "1x2", 1, signal.SIGKILL),
        (2, "1x2", 1, signal.SIGSTOP),
        (4, "2x2", 3, signal.SIGKILL),
        (2, "1x2", 0, signal.SIGKILL),
    ],
)
def test_one_that_dies_or_hangs_ends_all(folder, count, mesh, lost, sent):
    """Within seconds, by one sentence, with the status that a supervisor restarts; what runs gets an error."""
    with serving(folder, count, mesh) as servers:
        with servers.slow(), contextlib.ExitStack() as stream:
            events = stream.enter_context(servers.streaming(LONG))
            next(events)
            servers.processes[lost].send_signal(sent)
            start = time.monotonic()
            if lost == 0:
                with pytest.raises(httpx2.TransportError):
                    list(events)
            else:
                *_, last = events
                assert last["error"]["type"] == "server_error"
        others = [process for process in servers.processes if process is not servers.processes[lost]]
        ended = tiny.end_processes(others, timeout=40)
        assert time.monotonic() - start < 40
        for status, text in ended:
            assert re.search(r"eagle3_jax\.serve: process \d.* of \d,? .*(is gone|fell silent|was killed)", text), text
            assert status == 1 or (lost == 0 and status), text
