"""Process 0's side: the other processes, and each row of the mesh as a runner."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from eagle3_jax.decoding.device.calls import Call
from eagle3_jax.decoding.device.runner import ModelRunner
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.hosts import wire
from eagle3_jax.decoding.hosts.wire import HostLost, Line, encode, line_of, numbers_of
from eagle3_jax.runs import processes

_PING = 1.0  # seconds between two signs of life


class RowRunner:
    """The runner of a row as process 0 sees it: makes each call on all processes of the row.

    `like` is a runner of this process: the row's own if devices of the row are `here`.
    """

    lockstep = False
    observed = None

    def __init__(self, like: ModelRunner, hosts: Hosts, row: int, members: Sequence[int], *, here: bool) -> None:
        self.target, self.draft, self.sizes = like.target, like.draft, like.sizes
        self.widths, self.prefill_shapes, self.compiled = like.widths, like.prefill_shapes, like.compiled
        self.dispatches = 0
        self._own = like if here else None
        self._hosts, self._row = hosts, row
        self._others = [member for member in members if member != 0]

    def run(self, call: Call) -> Any:
        """Sends a call to the other processes, and makes it here."""
        self.dispatches += 1
        message = {"row": self._row, "number": self.dispatches, **encode(call)}
        with self._hosts.sending(self._others, message):
            return _Awaited(self._hosts, self._row, self.dispatches) if self._own is None else self._own.run(call)

    def reset(self) -> None:
        """The scheduler gives its requests up: the other processes may be anywhere in the calls before."""
        if self._own is not None:
            self._own.reset()
        self._hosts.lose(0, "failed in a dispatch")

    def _keep(self, _: Any) -> NoReturn:
        raise AssertionError("an engine on several hosts keeps its weights")

    replace_draft = replace_target = _keep


class _Awaited:
    """The report of a row elsewhere: numpy waits for it."""

    def __init__(self, hosts: Hosts, row: int, number: int) -> None:
        self._hosts, self._row, self._number = hosts, row, number

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self._hosts.report(self._row, self._number)


class Hosts:
    """Process 0's connections.

    Attributes:
        engines: those whose requests end when a process is lost.
        failure: why no call can be made any more.
    """

    def __init__(self, lines: Mapping[int, Line], lost: Callable[[HostLost], object]) -> None:
        self.engines: list[Engine] = []
        self.failure: HostLost | None = None
        self._lines, self._lost, self._lock = lines, lost, threading.Lock()
        self._heard = dict.fromkeys(lines, time.monotonic())
        self._over = threading.Event()
        self._reports: dict[int, queue.SimpleQueue[tuple[int, np.ndarray]]] = {}

    def watch(self) -> None:
        """Begins to listen to the other processes."""
        self._reports = {row: queue.SimpleQueue() for row in range(len(self.engines))}
        for process in self._lines:
            listener = functools.partial(self._listen, process)
            threading.Thread(target=listener, name=f"eagle3_jax process {process}", daemon=True).start()
        threading.Thread(target=self._ping, name="eagle3_jax pings", daemon=True).start()

    @contextlib.contextmanager
    def sending(self, members: Sequence[int], message: Mapping[str, Any]) -> Iterator[None]:
        """Sends a call; a block that fails here loses all, since the others have made it. Raises HostLost."""
        if self.failure is not None:
            raise self.failure
        self._send(members, message)
        try:
            yield
        except Exception:
            self.lose(0, "failed in a dispatch")
            raise

    def report(self, row: int, number: int) -> np.ndarray:
        """Waits for the report of a call. Raises HostLost."""
        while self.failure is None:
            with contextlib.suppress(queue.Empty):
                found, values = self._reports[row].get(timeout=_PING)
                if found == number:
                    return values
        raise self.failure

    def lose(self, process: int, why: str) -> None:
        """Ends all requests with an error, once."""
        with self._lock:
            if self.failure is not None or self._over.is_set():
                return
            name = self._lines[process].name if process else socket.gethostname()
            failure = HostLost(f"process {process} of {processes.count()}, on host {name}, {why}; start all again")
            self.failure = failure
        for engine in self.engines:
            engine.fail(failure)
        self._lost(failure)

    def end(self) -> None:
        """Lets the other processes end."""
        self._over.set()
        self._send(self._lines, "end")

    def _send(self, members: Iterable[int], value: Any) -> None:
        line = line_of(value)
        for process in members:
            try:
                self._lines[process].send_line(line)
            except OSError:
                self.lose(process, "is gone")

    def _listen(self, process: int) -> None:
        line = self._lines[process]
        while True:
            try:
                message = line.read()
            except (OSError, EOFError):
                self.lose(process, "is gone")
                return
            self._heard[process] = time.monotonic()
            if message == "stop":
                os.kill(os.getpid(), signal.SIGTERM)
            elif message != "pong":
                report = numbers_of(message["report"]).reshape(message["shape"])
                self._reports[message["row"]].put((message["number"], report))

    def _ping(self) -> None:
        while not self._over.wait(_PING) and self.failure is None:
            self._send(self._lines, "ping")
            for process in self._lines:
                if time.monotonic() - self._heard[process] > wire.PATIENCE:
                    self.lose(process, f"fell silent for {wire.PATIENCE:.0f} s")
