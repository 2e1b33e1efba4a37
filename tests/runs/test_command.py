"""The frame of a verb's command line."""

import signal
import subprocess
import sys

import pytest
import tiny

# A verb that is sent a signal while it loads, in its loop, or twice there.
SIGNALLED = """
import os, sys, time
from eagle3_jax.runs import command
sent, when = int(sys.argv[1]), sys.argv[2]
with command.run("train"):
    print("begun")
    if when != "loading":
        command.stop_point()
    for _ in range(2 if when == "twice" else 1):
        os.kill(os.getpid(), sent)
        time.sleep(0.01)  # Python's handlers run in between
    print("saved")
    command.stop_point()
    print("never")
"""


@pytest.mark.parametrize("when", ["loading", "working", "twice"])
@pytest.mark.parametrize(
    ("sent", "name", "status"), [(signal.SIGTERM, "SIGTERM", 75), (signal.SIGINT, "Ctrl-C", -signal.SIGINT)]
)
def test_a_signal_ends_a_verb_in_one_sentence(sent, name, status, when):
    """At once while it loads, then at its next stop point; a second one at once. A shell ends its loop at SIGINT."""
    words, where = [sys.executable, "-c", SIGNALLED, str(int(sent)), when], tiny.REPOSITORY
    done = subprocess.run(words, env=tiny.environment(), cwd=where, capture_output=True, text=True, timeout=60)
    message = f"eagle3_jax.train: stopped by {name}; run it again, and it goes on from here\n"
    waits = "eagle3_jax.train: stops as soon as what it did is on disk; Ctrl-C again ends it at once\n"
    assert done.returncode == status
    assert done.stdout == ("begun\nsaved\n" if when == "working" else "begun\n")
    assert done.stderr == waits * (name == "Ctrl-C" and when != "loading") + message
