"""Works are timed in turns; several processes take the same turns."""

import time

import pytest

from eagle3_jax.runs import timing


def test_works_take_turns_and_their_first_call_does_not_count():
    log, slow_once = [], [0.05]

    def fast() -> None:
        log.append("fast")

    def slow() -> None:
        log.append("slow")
        time.sleep(0.005 + (slow_once.pop() if slow_once else 0.0))

    times = timing.in_turns([fast, slow], lambda: log.append("prepare"))
    assert log[:4] == ["prepare", "fast", "prepare", "slow"] and log.count("fast") == log.count("slow") > 3
    assert times[0] < 0.005 <= times[1] < 0.04


@pytest.mark.parametrize(("processes", "calls"), [(1, 4), (2, 10)])
def test_of_several_processes_none_skips_a_turn_that_another_takes(monkeypatch, processes, calls):
    """Their clocks differ: one that skipped would leave the others waiting in a program of all."""
    monkeypatch.setattr(timing.processes, "count", lambda: processes)
    clock, log = iter(range(1000)), []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    assert timing.in_turns([lambda: log.append(0)], lambda: None) == [1.0]
    assert len(log) == calls
