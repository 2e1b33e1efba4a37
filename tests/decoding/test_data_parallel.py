"""Several engines in a process: the same answers as one, each prompt asked once, and a failure that ends all."""

import threading
from typing import Any

import pytest
import tiny

from eagle3_jax.config import MeshConfig
from eagle3_jax.decoding import data_parallel
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.request import Output, Stats
from eagle3_jax.mesh import make_mesh, own_replica
from eagle3_jax.models.checkpoint.fetch import load_target


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


@pytest.mark.slow
def test_every_row_of_a_mesh_answers_as_one_engine_does(tmp_path):
    folder = tiny.write_target(tmp_path / "target")
    prompts = [[1, 270 + number, 280] for number in range(5)]
    params = [SamplingParams(max_tokens=6, seed=number, temperature=0.7) for number in range(5)]
    expected = Engine.load(str(folder), None, max_length=64).generate(prompts, params)
    replica = own_replica(make_mesh(MeshConfig(data=2, model=2)))
    rows = data_parallel.targets(load_target(str(folder), replica.mesh), replica)
    engines = [Engine.load(row, None, max_length=64) for row in rows]
    found = {}
    data_parallel.generate(engines, prompts, params, found.__setitem__)
    assert [found[index].token_ids for index in range(5)] == [output.token_ids for output in expected]
    places = [engine.target.embed[...].sharding.device_set for engine in engines]
    assert len(places[0] | places[1]) == 4 and not places[0] & places[1]
