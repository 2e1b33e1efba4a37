"""Counts against a definition computed by hand, fairness of the order, and compilation kept out of the times."""

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest

from eagle3_jax.acceptance import AcceptanceCounts
from eagle3_jax.decoding.measure import compare as measure
from eagle3_jax.decoding.measure.compare import Tally, compare, total
from eagle3_jax.decoding.measure.near_tie import NearTie


def output(tokens: Sequence[int], rounds: int = 0, accepted: Sequence[int] = ()) -> Any:
    return SimpleNamespace(
        token_ids=list(tokens), stats=SimpleNamespace(counts=AcceptanceCounts(rounds, list(accepted)))
    )


class Clock:
    """A clock that advances only when an engine calls it."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measure, "time", clock)
    monkeypatch.setattr(FakeEngine, "clock", clock, raising=False)
    return clock


@dataclasses.dataclass
class FakeEngine:
    """Answers from a table; takes `seconds` a call; compiles something new in the calls named."""

    name: str
    log: list[tuple[str, list[Any]]]
    answers: dict[str, Any]
    seconds: float = 0.001
    compile_in: tuple[int, ...] = ()
    calls: int = 0
    clock: ClassVar[Clock]

    def generate(self, prompts: Any, params: Any) -> list[Any]:
        self.log.append((self.name, prompts))
        if self.calls in self.compile_in:
            jax.jit(lambda x: x + self.calls)(jnp.zeros(self.calls + 1)).block_until_ready()
            self.clock.now += 0.2
        self.calls += 1
        self.clock.now += self.seconds
        return [self.answers[prompt] for prompt in prompts]


def prompts(*names: str) -> list[dict[str, Any]]:
    """ "a0" is a prompt of category "a"."""
    return [{"id": name, "category": name[0], "prompt": name} for name in names]


def test_the_numbers_follow_their_definitions() -> None:
    tally = Tally()
    # 1 token of the prefill, 4 rounds: 3 + 1 + 2 + 1 tokens.
    tally.add(prompts("x"), ([output([1] * 8)], 2.0), ([output([1] * 8, 4, [2, 1, 0])], 1.0))
    tally.add(prompts("y"), ([output([1, 2, 3])], 1.0), ([output([1, 2, 4], 2, [0, 0, 0])], 0.5))
    report = tally.report(exact=True)
    assert report == {
        "prompts": 2,
        "identical": 1,
        "ties": [],
        "mismatches": [{"id": "y", "position": 2}],
        "tokens": 11,
        "rounds": 6,
        "accepted_per_position": [2, 1, 0],
        "tau": (6 + 3) / 6,
        "alpha": [2 / 6, 1 / 2, 0.0],
        "tokens_per_second": {"vanilla": 11 / 3, "speculative": 11 / 1.5},
        "seconds": {"vanilla": 3.0, "speculative": 1.5},
        "speedup": 2.0,
    }


def test_what_cannot_be_measured_is_none() -> None:
    tally = Tally()
    tally.add(prompts("x"), ([output([5])], 1.0), ([output([6], 0, [0, 0])], 1.0))  # ended by its first token
    report = tally.report(exact=False)
    assert (report["tau"], report["alpha"]) == (None, [None, None])
    assert (report["identical"], report["ties"], report["mismatches"]) == (None, None, None)
    assert Tally().report(exact=True)["speedup"] is None


def test_a_first_difference_is_judged_by_what_stood_in_front_of_it() -> None:
    judged = []

    def judge(prefix: Sequence[int], tokens: tuple[int, int]) -> NearTie | None:
        judged.append((list(prefix), tokens))
        return NearTie(0.1, 0.2) if tokens == (2, 3) else None

    group = [{"id": name, "prompt": [7, 8]} for name in "abcd"]
    vanilla = [output([1, 2, 5]), output([1]), output([4]), output([1, 2])]
    speculative = [output([1, 3, 6]), output([1]), output([9]), output([1])]
    tally = Tally()
    tally.add(group, (vanilla, 1.0), (speculative, 1.0), judge)
    report = tally.report(exact=True)
    assert judged == [([7, 8, 1], (2, 3)), ([7, 8], (4, 9))]
    assert report["ties"] == [{"id": "a", "position": 1, "gap": 0.1, "bound": 0.2}]
    # An answer that ends early has no two tokens to compare.
    assert report["mismatches"] == [{"id": "c", "position": 0}, {"id": "d", "position": 1}]
    assert report["identical"] == 1


def test_totals_add_everything() -> None:
    one, two = Tally(), Tally()
    one.add(prompts("x"), ([output([1, 2])], 1.0), ([output([1, 2], 1, [1, 0])], 0.5))
    two.add(prompts("y"), ([output([3])], 2.0), ([output([4], 2, [1, 1])], 0.25))
    whole = total([one, Tally(), two])
    assert whole == Tally(2, AcceptanceCounts(3, [2, 1]), 3, 0.75, 3, 3.0, [], [{"id": "y", "position": 0}])


def test_categories_and_engines_take_turns() -> None:
    asked = prompts("a0", "a1", "a2", "b0", "b1", "c0")
    answers = {prompt["id"]: output([1, 2], 1, [1]) for prompt in asked}
    log: list[tuple[str, list[Any]]] = []
    vanilla, speculative = FakeEngine("v", log, answers, 0.004), FakeEngine("s", log, answers, 0.001)
    tallies = compare(vanilla, speculative, asked, None, batch_size=1)
    assert [given for name, given in log[2:] if name == "v"] == [["a0"], ["b0"], ["c0"], ["a1"], ["b1"], ["a2"]]
    assert [name for name, _ in log[2:]] == ["v", "s", "s", "v", "v", "s", "s", "v", "v", "s", "s", "v"]
    assert {category: tally.prompts for category, tally in tallies.items()} == {"a": 3, "b": 2, "c": 1}
    speedup = total(list(tallies.values())).report(exact=True)["speedup"]
    assert speedup == pytest.approx(4)


@pytest.mark.parametrize(("count", "sizes"), [(1, [1]), (9, [9]), (17, [8, 9]), (24, [8, 8, 8])])
def test_batches_get_groups_that_refill_them(count: int, sizes: list[int]) -> None:
    asked = prompts(*(f"a{i}" for i in range(count)))
    log: list[tuple[str, list[Any]]] = []
    engine = FakeEngine("v", log, {prompt["id"]: output([1]) for prompt in asked})
    compare(engine, FakeEngine("s", [], engine.answers), asked, None, batch_size=2)
    assert [len(given) for _, given in log[1:]] == sizes
    assert [name for _, given in log[1:] for name in given] == [prompt["id"] for prompt in asked]


def test_a_call_that_compiles_is_measured_again() -> None:
    asked = prompts("a0", "a1")
    answers = {prompt["id"]: output([1], 1, [1]) for prompt in asked}
    speculative = FakeEngine("s", [], answers, compile_in=(0, 2))
    tallies = compare(FakeEngine("v", [], answers), speculative, asked, None, batch_size=1)
    assert speculative.calls == 4  # to warm up, the first prompt, the second twice
    assert tallies["a"].seconds == pytest.approx(0.002) and tallies["a"].prompts == 2


def test_an_engine_that_never_stops_compiling_is_no_measurement() -> None:
    asked = prompts("a0")
    answers = {"a0": output([1], 1, [1])}
    with pytest.raises(RuntimeError, match="still compiles after 3 calls"):
        compare(FakeEngine("v", [], answers, compile_in=(1, 2, 3)), FakeEngine("s", [], answers), asked, None, 1)
