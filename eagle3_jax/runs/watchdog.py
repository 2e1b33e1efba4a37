"""Lets a run's processes watch each other: when one ends, all end, with its reason.

A thread of each process watches JAX's coordination service: a failing process leaves its reason there, a killed one
misses its heartbeats. When process 0, which holds it, is killed, JAX mostly aborts the others first; a child of each
process then adds a sentence to the stack trace.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time

from eagle3_jax.runs import processes
from eagle3_jax.runs.processes import POLL, Run

# Key in the coordination service: the reason why a process ended before its work was done.
_END = "eagle3_jax/end"
_AGAIN = "run the same command on all hosts again, it goes on where it was"
# Prints its argument when the process at the other end of its stdin ends without a word.
_CHILD = "import sys; sys.stdin.read() or print(sys.argv[1], file=sys.stderr)"


class _Watch:
    def __init__(self, run: Run, prefix: str) -> None:
        self.over = threading.Event()  # set when the work of all is done
        self.thread = threading.Thread(target=_watch, args=(self, run, prefix), name="watches the processes")
        self.thread.daemon = True
        cause = f"process {run.index} of {run.count} was killed, or JAX ended it as another one is gone"
        words = [sys.executable, "-I", "-S", "-c", _CHILD, f"{prefix}{cause}; {_AGAIN}"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
        self.child = subprocess.Popen(words, **pipes, start_new_session=True)  # Ctrl-C is for this process


_own: _Watch | None = None


def begin(prefix: str) -> None:
    """Begins the watch: when another process fails or is gone, this one ends with a sentence behind `prefix`."""
    global _own
    if (run := processes.several()) is not None:
        _own = _Watch(run, prefix)
        _own.thread.start()


def end() -> None:
    """Ends the watch, when the work of all processes is done."""
    global _own
    if _own is not None:
        _own.over.set()
        _own.thread.join()
        _own.child.communicate("over")
        _own = None


def end_all(sentence: str, status: int, error: Exception | None = None) -> None:
    """Ends this process and all others, where there are several, at once, with a sentence for the user.

    An `error` of a collective, as the cause, only echoes another process's end, which is reported instead.
    """
    if (run := processes.several()) is None:
        return
    # Messages of XLA and of the coordination service begin with a status.
    status_of_runtime = r"(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED): "
    if error is not None and re.match(status_of_runtime, str(error)):
        time.sleep(processes.heartbeat_seconds() + 5)  # until `_watch` knows what happened, and ends this process
    end = {"process": run.index, "host": socket.gethostname(), "sentence": sentence, "status": status}
    with contextlib.suppress(Exception):  # another process ended first, or none is left
        run.client.key_value_set(_END, json.dumps(end))
    if run.index == 0:
        time.sleep(3 * POLL / 1000)  # the service ends with this process, and the others must read the reason first
    _exit(_own, sentence, status)


def _watch(own: _Watch, run: Run, prefix: str) -> None:
    """Watches in a thread, since the main one may hang in a collective."""
    again = f"it was killed, or its host is down; {_AGAIN}"
    everyone = list(range(run.count))
    at_first = run.client.get_live_nodes(everyone)  # with a number each, which a restarted process does not have
    while not own.over.is_set():
        try:
            end = json.loads(run.client.blocking_key_value_get(_END, POLL))
        except RuntimeError as error:  # JAX's
            if "DEADLINE_EXCEEDED" not in str(error):
                _exit(own, f"{prefix}process 0 of {run.count} is gone; {again}", 1)
                return
            now = run.client.get_live_nodes(everyone)
            if gone := [str(number) for number in everyone if now.get(number) != at_first[number]]:
                _exit(own, f"{prefix}process {', '.join(gone)} of {run.count} is gone; {again}", 1)
            continue
        if end["process"] != run.index:
            where = f"process {end['process']} of {run.count}, on host {end['host']}, ended:\n"
            _exit(own, f"{prefix}{where}{end['sentence']}", end["status"])
        return


def _exit(own: _Watch | None, sentence: str, status: int) -> None:
    if own is not None and own.over.is_set():
        return
    print(sentence, file=sys.stderr, flush=True)
    sys.stdout.flush()
    if own is not None:
        with contextlib.suppress(OSError, ValueError):  # gone, or told already
            own.child.communicate("over")
    os._exit(status)  # Python's own exit would wait for the others at JAX's shutdown barrier
