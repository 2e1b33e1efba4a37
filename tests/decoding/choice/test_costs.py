"""Costs of rounds: measured in turns, kept by machine and models, measured again where what was kept is of no use."""

import time

import pytest

from eagle3_jax.decoding.choice import costs
from eagle3_jax.decoding.choice.costs import Costs

KEY = {"hardware": {"cpu": "a"}, "tiers": ["vanilla", "chain 3"]}
FIRST = Costs({"vanilla": 0.25, "chain 3": 0.5}, 0.125)
SECOND = Costs({"vanilla": 1.0, "chain 3": 2.0}, 3.0)


def never() -> Costs:
    raise AssertionError("measured again")


def test_they_are_measured_once_for_a_key(tmp_path):
    folder = tmp_path / "new" / "folder"
    assert costs.kept_or_measured(folder, KEY, lambda: FIRST) == FIRST
    assert costs.kept_or_measured(folder, KEY, never) == FIRST
    other = {**KEY, "hardware": {"cpu": "b"}}
    assert costs.kept_or_measured(folder, other, lambda: SECOND) == SECOND
    assert costs.kept_or_measured(folder, KEY, never) == FIRST
    assert costs.kept_or_measured(None, KEY, lambda: SECOND) == SECOND


@pytest.mark.parametrize(
    "damage",
    [
        *("", "{", "[]", '{"of": {}, "costs": {}}'),
        *('{"costs": {"rounds": {"vanilla": 1}, "waking": 0}}', '{"costs": {"rounds": null, "waking": 0}}'),
    ],
)
def test_what_is_damaged_is_measured_again(tmp_path, damage):
    costs.kept_or_measured(tmp_path, KEY, lambda: FIRST)
    (file,) = tmp_path.iterdir()
    file.write_text(damage)
    assert costs.kept_or_measured(tmp_path, KEY, lambda: SECOND) == SECOND
    assert costs.kept_or_measured(tmp_path, KEY, never) == SECOND


def test_a_folder_that_cannot_be_written_costs_the_next_start_alone(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "programs"
    with pytest.warns(UserWarning, match=rf"{folder}: Not a directory, so the next start measures again"):
        assert costs.kept_or_measured(folder, KEY, lambda: FIRST) == FIRST


def test_works_take_turns_and_their_first_call_does_not_count():
    log, slow_once = [], [0.05]

    def fast() -> None:
        log.append("fast")

    def slow() -> None:
        log.append("slow")
        time.sleep(0.005 + (slow_once.pop() if slow_once else 0.0))

    times = costs.measure([fast, slow], lambda: log.append("prepare"))
    assert log[:4] == ["prepare", "fast", "prepare", "slow"] and log.count("fast") == log.count("slow") > 3
    assert times[0] < 0.005 <= times[1] < 0.04


@pytest.mark.parametrize(("processes", "calls"), [(1, 4), (2, 10)])
def test_of_several_processes_none_skips_a_turn_that_another_takes(monkeypatch, processes, calls):
    """Their clocks differ: one that skipped would leave the others waiting in a program of all."""
    monkeypatch.setattr(costs.processes, "count", lambda: processes)
    clock, log = iter(range(1000)), []
    monkeypatch.setattr(costs.time, "perf_counter", lambda: float(next(clock)))
    assert costs.measure([lambda: log.append(0)], lambda: None) == [1.0]
    assert len(log) == calls
