"""One engine on several processes: process 0 answers as one process does, and no process outlives another."""

from __future__ import annotations

import json
import queue
import signal
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest
import tiny
from toy import CHAIN, SMALL, make

from eagle3_jax.decoding.choice import tiers
from eagle3_jax.decoding.device import calls
from eagle3_jax.decoding.device.prompt_chunk import PromptChunk
from eagle3_jax.decoding.device.shapes import Sizes
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.hosts import api, row, wire
from eagle3_jax.decoding.hosts.api import follow, lead
from eagle3_jax.decoding.hosts.wire import HostLost
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.rounds.state import RequestRows
from eagle3_jax.runs import processes

# Arguments: target, mesh, seconds of patience, what is asked.
LED = """
import asyncio, json, queue, sys, time
from eagle3_jax.config import DraftTree, MeshConfig
from eagle3_jax.decoding import data_parallel
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.hosts import wire
from eagle3_jax.decoding.hosts.api import follow, lead
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.pool import EnginePool
from eagle3_jax.decoding.scheduler import Scheduler
from eagle3_jax.mesh import make_mesh, own_replica, row_processes
from eagle3_jax.models.checkpoint.fetch import load_target
from eagle3_jax.runs import command, processes

target, (data, model), asked = sys.argv[1], map(int, sys.argv[2].split("x")), json.loads(sys.argv[4])
wire.PATIENCE = 500  # they compile, each for itself
chain = DraftTree(num_steps=3, topk=1, num_draft_tokens=4)

async def answers(pool):
    found = [await request for request in [pool.submit(ids, SamplingParams(**params)) for ids, params in asked]]
    (ids, params), *_ = asked
    long = SamplingParams(**params | {"max_tokens": 100})
    aborted, late = pool.submit(ids, long), pool.submit(ids, long, timeout=0.01)
    async for piece in aborted:
        aborted.abort()
    ends = [(await aborted).finish_reason, (await late).finish_reason]
    again = await pool.submit(ids, SamplingParams(**params))
    print(json.dumps([[output.token_ids for output in found], ends, again.token_ids, again.stats.cached_tokens]))

    wire.PATIENCE = float(sys.argv[3])
    turn = Scheduler.turn  # slow enough to be killed in the middle
    Scheduler.turn = lambda self: (time.sleep(0.5), turn(self))
    request = pool.submit(ids, long)
    async for piece in request:
        print("a piece", flush=True)
    print(json.dumps(request.output.error), flush=True)

with command.run("serve", resumes=False):
    failures = queue.SimpleQueue()
    mesh = make_mesh(MeshConfig(data=data, model=model))
    replica = own_replica(mesh)
    rows = data_parallel.targets(load_target(target, replica.mesh), replica)
    engines = [Engine.load(row, "lookup", chain, batch_size=2, max_length=128, page_size=16) for row in rows]
    if processes.index():
        follow(engines, row_processes(mesh))
    else:
        with lead(engines, row_processes(mesh), failures.put) as led:
            asyncio.run(answers(EnginePool(led)))
            raise failures.get(timeout=30)  # told behind the requests' end
"""
QUICKLY: Any = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
PARAMS = {"max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tiny.write_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [[1, 270 + number, *range(300, 320), 280] for number in range(5)]


@pytest.fixture(scope="module")
def alone(folder, prompts) -> list[list[int]]:
    """What an engine on one device answers."""
    engine = Engine.load(folder, "lookup", CHAIN, **SMALL)
    return [output.token_ids for output in engine.generate(prompts, SamplingParams(**PARAMS))]


def test_a_call_is_the_same_on_all_processes():
    """Chunks with every field of a request, and tiers, in JSON and back."""
    sizes = Sizes.plan(2, 64, 16, tiers.WITH_HEAD)
    params = SamplingParams(temperature=0.3, top_p=0.9, seed=-5, logit_bias={3: -1.5}, stop_token_ids=(7,), logprobs=2)
    of_request = RequestRows.of(params, limit=9, stop_ids=(7,), prompt_length=3, digest=2**32 - 1)
    of: Any = {"slot": 1, "prompt": [3, 2, 1], "start": 0, "pages": [4, 2], "request": of_request}
    for call in (
        calls.prefill(sizes, [PromptChunk.stretch(sizes, 16, **of)], rows=4, length=16),
        calls.decode(sizes, {1}, [0], 3, 1, width=1, tier=tiers.CHAIN, greedy=False),
        calls.catch_up(sizes, [], 1),
        calls.note_prompt(sizes, 1, [3, 2, 1]),
    ):
        got = wire.decode(json.loads(wire.line_of(wire.encode(call))), sizes, tiers.WITH_HEAD)
        assert (got.key, got.sent.form) == (call.key, call.sent.form)
        np.testing.assert_array_equal(got.sent.bits, call.sent.bits)


# ------------------------------------------------------------------------------------------- a row on another process
@pytest.fixture
def lines(monkeypatch):
    """The ends of a connection, and who is lost; process 1 is a thread."""
    with socket.create_server(("127.0.0.1", 0)) as place:
        there = wire.Line(socket.create_connection(place.getsockname()))
        here = wire.Line(place.accept()[0], "elsewhere")
    monkeypatch.setattr(wire, "accept", lambda: {1: here})
    monkeypatch.setattr(wire, "connect", lambda: there)
    monkeypatch.setattr(processes, "index", lambda: 1)
    monkeypatch.setattr(processes, "count", lambda: 2)
    yield there
    for line in (here, there):
        line.close()
    for line in (here, there):  # now nobody reads, who would hold them
        line._reader.close()
        line._place.close()


@pytest.mark.slow
def test_a_row_on_another_process_answers_alike(toy, lines, monkeypatch):
    monkeypatch.setattr(row, "_PING", 0.02)
    asked: Any = (["hello", "abc", [1, 2, 3]], SamplingParams(max_tokens=20, temperature=0.5, seed=3, top_k=8))
    expected = make(toy).generate(*asked)
    follower = threading.Thread(target=follow, args=([make(toy)], [(0,), (1,)]))
    follower.start()
    lost: list[HostLost] = []
    with lead([make(toy)], [(0,), (1,)], lost.append) as (_, engine):
        assert engine.generate(*asked) == expected
        with pytest.raises(RuntimeError, match="expected `warm_up` and the like before `lead`"):
            engine.warm_up()
        for replace, weights in ((engine.replace_draft, toy.good), (engine.replace_target, toy.target)):
            with pytest.raises(RuntimeError, match="for other weights start all processes again"):
                replace(weights)
    follower.join(20)
    assert not follower.is_alive() and not lost


def test_reports_end_quietly_with_their_connection(lines):
    reports: Any = queue.SimpleQueue()
    reports.put((0, 1, np.zeros(3, np.int32)))
    lines.close()
    api._send_reports(lines, reports)


@pytest.mark.parametrize("end", ["is gone", "fell silent for 0 s"])
def test_a_process_that_is_lost_ends_requests_with_an_error(toy, lines, end, monkeypatch):
    monkeypatch.setattr(row, "_PING", 0.02)
    monkeypatch.setattr(wire, "PATIENCE", 60 if end == "is gone" else 0.3)
    lost: list[HostLost] = []
    with lead([make(toy)], [(0,), (1,)], lost.append) as (_, engine):
        request = engine.submit("hello")
        if end == "is gone":
            lines.close()
        failed = threading.Event()
        threading.Thread(target=lambda: (request.result(), failed.set()), daemon=True).start()
        assert failed.wait(20)
        assert request.output is not None and request.output.finish_reason == "error"
        said = f"process 1 of 2, on host elsewhere, {end}; start all again"
        assert request.output.error == f"HostLost: {said}" and [str(error) for error in lost] == [said]
        with pytest.raises(HostLost, match="on host elsewhere"):
            engine.submit("hello")


# ---------------------------------------------------------------------------------------------------- several processes
@pytest.mark.long
@pytest.mark.parametrize(
    ("processes", "mesh", "sent"),
    [(2, "1x2", signal.SIGKILL), (2, "2x1", signal.SIGSTOP), (4, "1x4", signal.SIGSTOP), (4, "2x2", signal.SIGKILL)],
)
def test_process_0_answers_as_one_does_and_ends_with_a_follower(folder, prompts, alone, processes, mesh, sent):
    """One that dies or hangs ends all, within seconds, by one sentence, and the running request gets an error."""
    patience = "5" if sent == signal.SIGSTOP else "200"
    asked = json.dumps([(ids, PARAMS) for ids in prompts])
    started = tiny.start_processes(processes, ["-c", LED, folder, mesh, patience, asked], **QUICKLY)
    leader, *_, follower = started
    try:
        until = time.monotonic() + 250
        while "a piece" not in leader.printed():
            assert leader.poll() is None and time.monotonic() < until, leader.printed()
            time.sleep(0.01)
        follower.send_signal(sent)
        ((status, output),) = tiny.end_processes([leader], timeout=60)
        assert status == 1, output
        found, *_, error, sentence = [
            line for line in output.splitlines() if line.startswith(("[[", '"', "eagle3_jax.serve"))
        ]
        tokens, reasons, again, cached = json.loads(found)
        assert tokens == alone and reasons == ["abort", "timeout"]
        assert (again, cached) == (alone[0], 16)
        assert json.loads(error)
        assert sentence.startswith(f"eagle3_jax.serve: process {processes - 1} of {processes}, on host ")
        assert sentence.endswith("; start all again")
    finally:
        for process in started:
            process.kill()
            process.wait(timeout=30)
