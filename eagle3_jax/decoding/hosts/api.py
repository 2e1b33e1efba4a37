"""Engines whose mesh spans several hosts: process 0 schedules all rows, and every process runs the same programs.

What the scheduler decides is the call of a runner. Process 0 sends each call to the processes of the row, then makes it
itself where it holds devices of that row; elsewhere the row's first process sends the report back. No process outlives
another: a connection that ends, or a process that falls silent for `wire.PATIENCE` seconds, ends all requests with an
error.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import jax

from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.hosts import wire
from eagle3_jax.decoding.hosts.row import Hosts, RowRunner
from eagle3_jax.decoding.hosts.wire import HostLost, Line, text_of
from eagle3_jax.runs import command, processes

# Process -> its rows, by their numbers in the mesh; see `mesh.row_processes`.
Rows = Sequence[Sequence[int]]


@contextlib.contextmanager
def lead(engines: Sequence[Engine], rows: Rows, lost: Callable[[HostLost], object]) -> Iterator[list[Engine]]:
    """Yields an engine for each row, for process 0 alone to ask; the other processes `follow`.

    An engine on several hosts keeps its weights: `replace_draft` and `replace_target` refuse.
    Raises HostLost: a process did not connect.

    Args:
        engines: of this process's own rows, warmed up on all processes alike: who compiles is silent.
        rows: the processes of each row of the mesh.
        lost: called once, by any thread, when the requests have ended with an error because a process is lost.
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
    """Makes the calls that process 0 asks for, until it says that all is done; arguments as of `lead`.

    Raises HostLost: process 0 is gone, or fell silent.
    """
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
    """Returns the numbers of a process's rows."""
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
