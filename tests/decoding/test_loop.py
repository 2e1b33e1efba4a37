"""The loop's thread in the time between requests: it wakes for one, and keeps no process from its end."""

import pathlib
import subprocess
import sys
import threading
from typing import Any

from eagle3_jax.decoding import loop


class Learning:
    """A scheduler without requests, whose head has no end of learning."""

    has_requests = aborted = has_work = False
    learns_on = True
    delivered = -float("inf")

    def __init__(self) -> None:
        self.changes, self.answered = threading.Condition(), threading.Event()

    def learn(self, idle: float) -> None:
        assert idle > 0

    def turn(self) -> None:
        self.has_work = self.learns_on = False
        self.answered.set()


def started(scheduler: Any) -> loop.EngineLoop:
    made = loop.EngineLoop(scheduler)
    made.drive_in_background()
    return made


def test_a_request_wakes_the_thread_that_waits_in_idle_time(monkeypatch):
    monkeypatch.setattr(loop, "_POLL", 60)
    scheduler = Learning()
    engine = started(scheduler)
    assert not scheduler.answered.wait(0.2)
    scheduler.has_work = True
    engine.drive_in_background()
    assert scheduler.answered.wait(30)


def test_a_process_ends_while_its_head_could_learn_on():
    code = "import test_loop; test_loop.started(test_loop.Learning())"
    done = subprocess.run([sys.executable, "-c", code], cwd=pathlib.Path(__file__).parent, timeout=60, check=False)
    assert done.returncode == 0
