"""Replicas behind one queue: where a request goes, that no answer changes, and one that is drained."""

import threading
from typing import Any

import jax
import pytest
import tiny
from toy import CHAIN, SMALL, make

from eagle3_jax.config import MeshConfig
from eagle3_jax.decoding import data_parallel
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.pool import EnginePool
from eagle3_jax.decoding.request import QueueFullError, Request
from eagle3_jax.decoding.scheduler import EngineStats
from eagle3_jax.mesh import make_mesh, own_replica
from eagle3_jax.models.checkpoint.fetch import load_target


class Fake(Engine):
    """Has some tokens to do, and knows one prefix."""

    def __init__(self, tokens: int = 0, prefix: tuple[int, ...] = ()) -> None:
        self.tokens, self.prefix, self.taken, self.tokenizer = tokens, prefix, [], None
        self.finished = threading.Event()

    def left(self, prompt: Any = ()) -> int:
        known = len(self.prefix) if tuple(prompt[: len(self.prefix)]) == self.prefix else 0
        return self.tokens + len(prompt) - known

    def submit(self, prompt: Any, *_: Any, **__: Any) -> Request:
        self.taken.append(prompt)
        self.tokens += len(prompt)
        return Request.__new__(Request)

    def finish(self) -> None:
        self.finished.set()

    def stats(self) -> EngineStats:
        return EngineStats(waiting=len(self.taken))


def test_a_request_goes_where_its_prefix_is_cached_else_where_fewest_tokens_wait():
    idle, busy, knows = Fake(10), Fake(50), Fake(12, prefix=(1, 2, 3, 4))
    pool = EnginePool([busy, idle, knows])
    pool.submit([1, 2, 3, 4, 5])
    pool.submit([7, 8])
    assert (busy.taken, idle.taken, knows.taken) == ([], [[7, 8]], [[1, 2, 3, 4, 5]])
    knows.tokens += 20  # more than the prefix has
    pool.submit([1, 2, 3, 4, 6])
    assert idle.taken[-1] == [1, 2, 3, 4, 6]


def test_the_queue_s_limit_is_of_all_replicas_together():
    pool = EnginePool([Fake(), Fake()], queue_limit=3)
    for number in range(3):
        pool.submit([number])
    with pytest.raises(QueueFullError, match="queue: got 3 waiting requests"):
        pool.submit([4])


def test_a_drained_replica_gets_nothing_until_it_is_back():
    first, second = engines = [Fake(), Fake(100)]
    pool = EnginePool(engines)
    with pool.drained(0) as engine:
        assert engine is first and first.finished.is_set()
        pool.submit([1])
        for number in (0, 1, 2):  # out already; the last one that serves; none
            with (
                pytest.raises(ValueError, match=f"number: got {number}, expected one of several"),
                pool.drained(number),
            ):
                pass
    pool.submit([2])
    assert (first.taken, second.taken) == ([[2]], [[1]])


@pytest.mark.parametrize("wrong", [-1, 24, 2**32, 2**40])
def test_tokens_that_the_target_does_not_have_are_refused_in_whole_pages_too(toy, wrong):
    """The pool looks for a prompt's prefix in the pages before an engine takes the prompt."""
    pool = EnginePool([make(toy, None) for _ in range(2)])
    for ids in ([wrong] + [5] * 40, [5] * 40 + [wrong], [wrong]):
        with pytest.raises(ValueError, match=rf"prompt: got token ids .*{wrong}.*, expected 0 to 23"):
            pool.submit(ids)
    assert pool.engines[0].left() == 0


@pytest.mark.slow
def test_an_engine_counts_the_tokens_that_it_has_to_read_and_write(toy):
    engine = make(toy, None)
    prompt = [number % 20 for number in range(40)]
    assert engine.left() == 0 and engine.left(prompt) == 40
    engine.generate([prompt], SamplingParams(max_tokens=2))
    assert engine.left(prompt) == 40 - 32, "two whole pages are cached"
    waiting = [engine.submit([5] * 10, SamplingParams(max_tokens=8)) for _ in range(3)]
    assert engine.left(prompt) == 8 + 3 * 18
    engine.abort(waiting[0])
    assert engine.left() == 2 * 18
    engine.finish()
    assert engine.left() == 0 and [request.done for request in waiting] == [True] * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny.write_target(tmp_path_factory.mktemp("target")))


def pool_of(folder: str, count: int) -> EnginePool:
    replica = own_replica(make_mesh(MeshConfig(data=count, model=1), jax.devices()[:count]))
    rows = data_parallel.targets(load_target(folder, replica.mesh), replica)
    return EnginePool([Engine.load(row, "lookup", CHAIN, **SMALL) for row in rows])


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 4])
def test_replicas_share_the_requests_and_change_no_answer(folder, count):
    pool = pool_of(folder, count)
    numbers = range(3 * count)
    prompts = [[1, 270 + number, *range(300, 320), 280] for number in numbers]
    params = [SamplingParams(max_tokens=12, seed=i, temperature=0.7 * (i % 2), ignore_eos=True) for i in numbers]
    alone = Engine.load(folder, "lookup", CHAIN, **SMALL)
    expected = [output.token_ids for output in alone.generate(prompts, params)]
    requests = [pool.submit(ids, own) for ids, own in zip(prompts, params, strict=True)]
    assert all(engine.stats().waiting == 3 for engine in pool.engines)
    works = [lambda request=request: request.result().token_ids for request in requests]
    assert data_parallel.together(works) == expected
    places = [engine.target.embed[...].sharding.device_set for engine in pool.engines]
    assert len(set.union(*places)) == count

    before = [engine.stats().cached_tokens for engine in pool.engines]
    holder = next(number for number, engine in enumerate(pool.engines) if engine.left(prompts[0]) < 10)
    again = pool.submit(prompts[0], params[0])
    assert again.result().token_ids == expected[0] and again.cached == 16
    grown = [engine.stats().cached_tokens - old for engine, old in zip(pool.engines, before, strict=True)]
    assert grown == [16 * (number == holder) for number in range(count)]

    late = [pool.submit(ids, own) for ids, own in zip(prompts, params, strict=True)]
    with pool.drained(holder) as engine:
        assert engine.left() == 0 and engine.stats().running == 0
        finished = engine.stats().finished
        meanwhile = [pool.submit(prompts[0], params[0]) for _ in range(2)]
        assert [request.result().token_ids for request in meanwhile] == [expected[0]] * 2
        assert engine.stats().finished == finished
    assert [request.result().token_ids for request in late] == expected
