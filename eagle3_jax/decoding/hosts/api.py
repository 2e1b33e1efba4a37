"""Engines whose mesh spans several hosts: process 0 schedules all rows, and every process runs the same programs.

Process 0 sends each call of a runner to the processes of the row, then makes it itself where it holds devices of that
row; elsewhere the row's first process sends the report back. A connection that ends, or a process that falls silent for
`wire.PATIENCE` seconds, ends all requests with an error.
"""

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

import jax
import numpy as np

from eagle3_jax.decoding.device.calls import Call
from eagle3_jax.decoding.device.runner import ModelRunner
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.hosts import wire
from eagle3_jax.decoding.hosts.wire import HostLost, Line, encode, line_of, numbers_of, text_of
from eagle3_jax.runs import command, processes

_PING = 1.0  # seconds between two signs of life
# Process -> its rows, by their numbers in the mesh; see `mesh.row_processes`.
Rows = Sequence[Sequence[int]]


@contextlib.contextmanager
def lead(engines: Sequence[Engine], rows: Rows, lost: Callable[[HostLost], object]) -> Iterator[list[Engine]]:
    """Yields an engine for each row, for process 0 alone to ask; the other processes `follow`.

    `engines` of this process's own rows are warmed up on all processes alike: who compiles is silent. An engine on
    several hosts keeps its weights. `lost` is called once, by any thread, when the requests have ended with an error
    because a process is lost. Raises HostLost: a process did not connect.
    """
    hosts = Hosts(wire.accept(), lost)
    own = _of(0, rows)
    like = dict(zip(own, engines, strict=True))
    for number, members in enumerate(rows):
        engine, here = like.get(number, engines[0]), number in like
        if [*members] != [0]:
            engine = engine.on(RowRunner(engine.own_runner, hosts, number, members, here=here))
        hosts.engines.append(engine)
    hosts.watch()
    yield hosts.engines
    hosts.end()


def follow(engines: Sequence[Engine], rows: Rows) -> None:
    """Makes the calls that process 0 asks for, until its end. Raises HostLost: process 0 is gone, or fell silent."""
    own = _of(processes.index(), rows)
    runners = {number: engine.own_runner for number, engine in zip(own, engines, strict=True)}
    reads = [number for number in own if 0 not in rows[number] and rows[number][0] == processes.index()]
    line = wire.connect()
    reports: queue.SimpleQueue[tuple[int, int, jax.Array]] = queue.SimpleQueue()
    threading.Thread(target=_send_reports, args=(line, reports), name="eagle3_jax reports", daemon=True).start()
    told = False
    while True:
        try:
            message = line.read()
        except (OSError, EOFError) as error:
            why = "fell silent" if isinstance(error, TimeoutError) else "is gone"
            raise HostLost(f"process 0 of {processes.count()} {why}") from error
        if message == "end":
            return
        if message == "ping":
            line.send("pong")
            if command.stop_asked() and not told:
                line.send("stop")
                told = True
            continue
        runner = runners[message["row"]]
        report = runner.run(wire.decode(message, runner.sizes, runner.tiers))
        if report is not None and message["row"] in reads:
            reports.put((message["row"], message["number"], report))


def _of(process: int, rows: Rows) -> list[int]:
    return [number for number, members in enumerate(rows) if process in members]


def _send_reports(line: Line, reports: queue.SimpleQueue[tuple[int, int, jax.Array]]) -> None:
    """Sends reports when the device has made them; its failure ends the connection, and so all."""
    while True:
        row, number, report = reports.get()
        try:
            line.send({"row": row, "number": number, "shape": report.shape, "report": text_of(report)})
        except Exception as error:
            line.close()
            if isinstance(error, OSError):  # the connection has ended, which `follow` finds too
                return
            raise


class RowRunner:
    """The runner of a row for process 0: makes each call on all its processes; `like` is the own one if `here`."""

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
    def __init__(self, hosts: Hosts, row: int, number: int) -> None:
        self._hosts, self._row, self._number = hosts, row, number

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self._hosts.report(self._row, self._number)


class Hosts:
    """Process 0's connections; `engines`' requests end, by the `failure`, when a process is lost."""

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
                self._lines[process].send(line)
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
