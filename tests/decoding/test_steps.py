"""Progress lines of a long start."""

import pytest

from eagle3_jax.decoding import steps
from eagle3_jax.runs import command


def test_a_log_is_told_at_the_beginning_and_now_and_then(monkeypatch):
    now, said = iter([0.0, 0.0, 9.0, 16.0, 16.0, 20.0]), []
    monkeypatch.setattr(steps.time, "monotonic", lambda: next(now))
    assert list(steps.steps("abcd", "compile", "program", said.append)) == ["a", "b", "c", "d"]
    assert said == ["compile: 0 of 4 programs", "compile: 2 of 4 programs"]


@pytest.mark.parametrize("progress", [False, lambda _: None])
def test_a_stop_ends_between_two_steps(monkeypatch, progress):
    done = []
    with pytest.raises(command.Stopped):
        for step in steps.steps("abc", "compile", "program", progress):
            done.append(step)
            monkeypatch.setattr(command, "_asked", command.signal.SIGTERM)
    assert done == ["a"]
