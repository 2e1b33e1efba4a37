"""One engine on several processes: process 0 answers as one process does, and no process outlives another."""

from __future__ import annotations

import json
import queue
import socket
import threading
from typing import Any

import numpy as np
import pytest
from toy import make

from eagle3_jax.decoding.choice import tiers
from eagle3_jax.decoding.device import calls
from eagle3_jax.decoding.device.calls import PromptChunk
from eagle3_jax.decoding.device.shapes import Sizes
from eagle3_jax.decoding.hosts import api, wire
from eagle3_jax.decoding.hosts.api import follow, lead
from eagle3_jax.decoding.hosts.wire import HostLost
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.rounds.constraint import ConstraintRows
from eagle3_jax.decoding.rounds.state import RequestRows
from eagle3_jax.decoding.structured.compile import Table
from eagle3_jax.runs import processes

QUICKLY: Any = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}


def test_a_call_is_the_same_on_all_processes():
    """Chunks with every field of a request, and tiers, in JSON and back."""
    sizes = Sizes.plan(2, 64, 16, tiers.WITH_HEAD, tables=2**17)
    params = SamplingParams(temperature=0.3, top_p=0.9, seed=-5, logit_bias={3: -1.5}, stop_token_ids=(7,), logprobs=2)
    constraint = ConstraintRows.of(Table(np.zeros(9, np.int32), 1, 2, (3, 5, 7)), 2**16)
    own: Any = {"limit": 9, "stop_ids": (7,), "prompt_length": 3, "digest": 2**32 - 1, "constraint": constraint}
    of_request = RequestRows.of(params, **own)
    of: Any = {"slot": 1, "prompt": [3, 2, 1], "start": 0, "pages": [4, 2], "request": of_request}
    for call in (
        calls.prefill(sizes, [PromptChunk.stretch(sizes, 16, **of)], rows=4, length=16),
        calls.decode(sizes, {1}, [0], 3, 1, width=1, tier=tiers.CHAIN, greedy=False),
        calls.catch_up(sizes, [], 1),
        calls.note_prompt(sizes, 1, [3, 2, 1]),
        calls.write_table(sizes, 2**16, [3, -1]),
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
    monkeypatch.setattr(api, "_PING", 0.02)
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
    monkeypatch.setattr(api, "_PING", 0.02)
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
        message = f"process 1 of 2, on host elsewhere, {end}; start all again"
        assert request.output.error == f"HostLost: {message}" and [str(error) for error in lost] == [message]
        with pytest.raises(HostLost, match="on host elsewhere"):
            engine.submit("hello")
