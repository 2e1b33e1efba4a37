"""Several engines in a process: the same answers as one, each prompt asked once, and a failure that ends all."""

import threading
from typing import Any

import pytest

from eagle3_jax.decoding import data_parallel
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.request import Output, Stats


class FakeEngine(Engine):
    """Answers a prompt with itself; waits for the other engines at its first answer."""

    def __init__(self, meeting: threading.Barrier, broken: bool = False) -> None:
        self.meeting, self.broken, self.asked = meeting, broken, []

    def converse(self, asked: Any, on_output: Any) -> None:
        for name, prompt, _ in asked:
            if not self.asked:
                self.meeting.wait(10)
            if self.broken:
                raise OSError("the device is gone")
            while prompt is not None:
                self.asked.append(prompt)
                answered = on_output(name, Output(prompt, "", "stop", Stats(1, [])))
                prompt = answered and answered[1]


def test_prompts_are_dealt_over_engines_that_work_at_the_same_time():
    meeting = threading.Barrier(3)
    engines = [FakeEngine(meeting) for _ in range(3)]
    found = {}
    prompts = [[number] for number in range(10)]
    data_parallel.generate(engines, prompts, [SamplingParams()] * 10, found.__setitem__)
    assert {index: output.token_ids for index, output in found.items()} == dict(enumerate(prompts))
    assert sorted(prompt for engine in engines for prompt in engine.asked) == prompts
    assert all(engine.asked for engine in engines)


def test_a_conversation_stays_with_its_engine():
    meeting = threading.Barrier(2)
    engines = [FakeEngine(meeting) for _ in range(2)]
    asked = [(number, [number], SamplingParams()) for number in range(6)]

    def on_output(number: int, output: Output) -> Any:
        turns = [*output.token_ids, 0]
        return (number, turns, SamplingParams()) if len(turns) <= 3 else None

    data_parallel.converse(engines, iter(asked), on_output)
    for engine in engines:
        firsts = [prompt for prompt in engine.asked if len(prompt) == 1]
        assert engine.asked == [[*first, *zeros] for first in firsts for zeros in ([], [0], [0, 0])]
    assert sum(len(engine.asked) for engine in engines) == 18


def test_a_failure_ends_all_engines():
    meeting = threading.Barrier(2)
    engines = [FakeEngine(meeting), FakeEngine(meeting, broken=True)]
    with pytest.raises(OSError, match="the device is gone"):
        data_parallel.generate(engines, [[0], [1]], [SamplingParams()] * 2, lambda *_: None)
