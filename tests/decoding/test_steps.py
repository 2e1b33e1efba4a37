"""A warm-up ends between two steps."""

import pytest

from eagle3_jax.decoding import steps
from eagle3_jax.runs import command


@pytest.mark.parametrize("progress", [False, lambda _: None])
def test_a_stop_ends_between_two_steps(monkeypatch, progress):
    done = []
    with pytest.raises(command.Stopped):
        for step in steps.steps("abc", "compile", "program", progress):
            done.append(step)
            monkeypatch.setattr(command, "_asked", command.signal.SIGTERM)
    assert done == ["a"]
