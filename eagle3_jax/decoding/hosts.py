"""Engines whose mesh spans several hosts: process 0 schedules all rows, and every process runs the same programs.

What the scheduler decides is the call of a runner. Process 0 sends each call, a line of JSON, to the processes of the
row, then makes it itself where it holds devices of that row; elsewhere the row's first process sends the report back.
Lines go over TCP: a collective would wait for the device's queue. No process outlives another: a connection that ends,
or a process that falls silent for `PATIENCE` seconds, ends all requests with an error.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hmac
import json
import os
import queue
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from eagle3_jax.decoding.device.chunk import Chunk
from eagle3_jax.decoding.device.runner import ModelRunner, Readable
from eagle3_jax.decoding.device.shapes import Sizes
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.tier import Tier
from eagle3_jax.runs import command, processes

PATIENCE = 10.0  # seconds
_PING = 1.0  # seconds between two signs of life
_MEETING = 60.0  # seconds in which all processes connect, when all have loaded
_CALLS = ("prefill", "decode", "catch_up", "note_prompt")
# Process -> its rows, by their numbers in the mesh; see `mesh.row_processes`.
Rows = Sequence[Sequence[int]]


class HostLost(OSError):
    """A process of the engine ended, hangs, or failed; no request can go on."""


@contextlib.contextmanager
def lead(engines: Sequence[Engine], rows: Rows, lost: Callable[[HostLost], object]) -> Iterator[list[Engine]]:
    """Yields an engine for each row, for process 0 alone to ask; the other processes `follow`.

    An engine on several hosts keeps its weights: `replace_draft` and `replace_target` refuse.

    Args:
        engines: of this process's own rows, warmed up on all processes alike: who compiles is silent.
        rows: the processes of each row of the mesh.
        lost: called once, by any thread, when the requests have ended with an error because a process is lost.

    Raises:
        HostLost: a process did not connect.
    """
    others = _accept()
    hosts = _Hosts(others, lost)
    own = _of(0, rows)
    like = dict(zip(own, engines, strict=True))
    for number, members in enumerate(rows):
        engine, here = like.get(number, engines[0]), number in like
        if [*members] != [0]:
            engine = engine.on(_RowRunner(engine._runner, hosts, number, members, here=here))
        hosts.engines.append(engine)
    hosts.watch()
    yield hosts.engines
    hosts.end()


def follow(engines: Sequence[Engine], rows: Rows) -> None:
    """Makes the calls that process 0 asks for, until it says that all is done.

    Args: see `lead`.

    Raises:
        HostLost: process 0 is gone, or fell silent.
    """
    own = _of(processes.index(), rows)
    runners = {number: engine._runner for number, engine in zip(own, engines, strict=True)}
    reads = [number for number in own if 0 not in rows[number] and rows[number][0] == processes.index()]
    line = _connect()
    reports: queue.SimpleQueue[tuple[int, int, jax.Array]] = queue.SimpleQueue()
    threading.Thread(target=_send_reports, args=(line, reports), name="eagle3_jax reports", daemon=True).start()
    told = False
    while True:
        try:
            said = line.read()
        except (OSError, EOFError) as error:
            why = "fell silent" if isinstance(error, TimeoutError) else "is gone"
            raise HostLost(f"process 0 of {processes.count()} {why}") from error
        if said == "end":
            return
        if said == "ping":
            line.send("pong")
            if command.stop_asked() and not told:
                line.send("stop")
                told = True
            continue
        runner = runners[said["row"]]
        args, options = _typed(said["args"], runner), _typed(said["options"], runner)
        if said["call"] not in _CALLS:
            raise ValueError(f"call: got {said['call']!r}, expected one of {', '.join(_CALLS)}")
        report = getattr(runner, said["call"])(*args, **options)
        if report is not None and said["row"] in reads:
            reports.put((said["row"], said["number"], report[0] if said["call"] == "decode" else report))


def _of(process: int, rows: Rows) -> list[int]:
    """Returns the numbers of a process's rows."""
    return [number for number, members in enumerate(rows) if process in members]


def _send_reports(line: _Line, reports: queue.SimpleQueue[tuple[int, int, jax.Array]]) -> None:
    """Sends reports when the device has made them; its failure ends the connection, and so all."""
    while True:
        row, number, report = reports.get()
        try:
            values = np.asarray(report)
            line.send({"row": row, "number": number, "shape": values.shape, "report": _text(values.tobytes())})
        except Exception:
            line.close()
            raise


class _RowRunner(ModelRunner):
    """The runner of a row as process 0 sees it: makes each call on all processes of the row.

    Args:
        like: a runner of this process; the row's own where `here`. It is used up.
        here: whether this process holds devices of the row.
    """

    def __init__(self, like: ModelRunner, hosts: _Hosts, row: int, members: Sequence[int], *, here: bool) -> None:
        vars(self).update(vars(like))
        self._state = self._state if here else None
        self.dispatches = 0
        self._hosts, self._row, self._here, self._calls = hosts, row, here, 0
        self._others = [member for member in members if member != 0]

    @property
    def lockstep(self) -> bool:
        return False

    def prefill(self, chunk: Chunk) -> Readable:
        with self._on_all("prefill", chunk) as report:
            return super().prefill(chunk) if self._here else report

    def decode(
        self, cancelled: Collection[int], slots: Sequence[int], max_rounds: int, enough: int, **options: Any
    ) -> tuple[Readable, Sequence[int]]:
        said = (sorted(cancelled), list(slots), max_rounds, enough)
        with self._on_all("decode", *said, **options) as report:
            return super().decode(*said, **options) if self._here else (report, self.places(slots, options["width"]))

    def catch_up(self, cancelled: Collection[int], slots: Iterable[int]) -> None:
        said = (sorted(cancelled), list(slots))
        with self._on_all("catch_up", *said):
            if self._here:
                super().catch_up(*said)

    def note_prompt(self, slot: int, ids: list[int]) -> None:
        with self._on_all("note_prompt", slot, ids):
            if self._here:
                super().note_prompt(slot, ids)

    def reset(self) -> None:
        """The scheduler gives its requests up: the other processes may be anywhere in the calls before."""
        super().reset()
        self._hosts.lose(0, "failed in a dispatch")

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "got an engine on several hosts, expected `warm_up` and the like before `lead`; "
            "for other weights start all processes again"
        )

    pad_products = compile = lend = replace_draft = packed_target = _refuse

    @contextlib.contextmanager
    def _on_all(self, call: str, *args: Any, **options: Any) -> Iterator[_Awaited]:
        """Sends a call to the other processes; the block makes it here."""
        self._calls += 1
        message = {"row": self._row, "number": self._calls, "call": call, "args": args, "options": options}
        with self._hosts.sending(self._others, message):
            yield _Awaited(self._hosts, self._row, self._calls)
        self.dispatches += not self._here


class _Awaited:
    """The report of a row elsewhere: numpy waits for it."""

    def __init__(self, hosts: _Hosts, row: int, number: int) -> None:
        self._hosts, self._row, self._number = hosts, row, number

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self._hosts.report(self._row, self._number)


class _Hosts:
    """Process 0's connections.

    Attributes:
        engines: those whose requests end when a process is lost.
        failure: why no call can be made any more.
    """

    def __init__(self, lines: Mapping[int, _Line], lost: Callable[[HostLost], object]) -> None:
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
        line = _line_of(message)
        for member in members:
            self._send(member, line)
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
        for process in self._lines:
            self._send(process, _line_of("end"))

    def _send(self, process: int, line: bytes) -> None:
        try:
            self._lines[process].send_line(line)
        except OSError:
            self.lose(process, "is gone")

    def _listen(self, process: int) -> None:
        line = self._lines[process]
        while True:
            try:
                said = line.read()
            except (OSError, EOFError):
                self.lose(process, "is gone")
                return
            self._heard[process] = time.monotonic()
            if said == "stop":
                os.kill(os.getpid(), signal.SIGTERM)
            elif said != "pong":
                values = np.frombuffer(_bytes(said["report"]), np.int32).reshape(said["shape"])
                self._reports[said["row"]].put((said["number"], values))

    def _ping(self) -> None:
        ping = _line_of("ping")
        while not self._over.wait(_PING) and self.failure is None:
            for process in self._lines:
                self._send(process, ping)
                if time.monotonic() - self._heard[process] > PATIENCE:
                    self.lose(process, f"fell silent for {PATIENCE:.0f} s")


class _Line:
    """A connection: lines of JSON. One thread reads, any may send.

    Attributes:
        name: the host at its other end.
    """

    def __init__(self, place: socket.socket, name: str = "") -> None:
        place.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.name = name
        self._place, self._reader, self._lock = place, place.makefile("rb"), threading.Lock()

    def send(self, value: Any) -> None:
        self.send_line(_line_of(value))

    def send_line(self, line: bytes) -> None:
        with self._lock:
            self._place.sendall(line)

    def read(self) -> Any:
        """Reads a value. Raises EOFError, OSError."""
        line = self._reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)

    def close(self) -> None:
        self._place.shutdown(socket.SHUT_RDWR)


def _accept() -> dict[int, _Line]:
    """Waits for the connections of all other processes, on process 0. Raises HostLost."""
    lines: dict[int, _Line] = {}
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=dual) as place:
        secret = secrets.token_hex()
        processes.agree(lambda: [place.getsockname()[1], secret])
        place.settimeout(_MEETING)
        while len(lines) < processes.count() - 1:
            try:
                connection, _ = place.accept()
            except TimeoutError as error:
                missing = sorted({*range(1, processes.count())} - set(lines))
                raise HostLost(f"process {missing[0]} of {processes.count()} did not connect") from error
            connection.settimeout(PATIENCE)
            line = _Line(connection)
            hello: Any = None
            try:
                hello = line.read()
                known = hmac.compare_digest(hello["secret"], secret)
            except (OSError, EOFError, ValueError, TypeError, KeyError):
                known = False
            if not known:  # some other program of the network
                connection.close()
                continue
            connection.settimeout(None)  # read for ever; `_ping` looks after it
            line.name = hello["host"]
            lines[hello["process"]] = line
    return lines


def _connect() -> _Line:
    """Connects to process 0. Raises HostLost."""
    port, secret = processes.agree(lambda: None)
    try:
        place = socket.create_connection((processes.coordinator(), port), timeout=PATIENCE)
    except OSError as error:
        raise HostLost(f"process 0 of {processes.count()} does not answer at port {port}: {error}") from error
    line = _Line(place)
    line.send({"secret": secret, "process": processes.index(), "host": socket.gethostname()})
    return line


def _line_of(value: Any) -> bytes:
    return json.dumps(value, default=_plain).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Makes JSON of a call's arguments."""
    if isinstance(value, Tier):
        return {"tier": value.name}
    if isinstance(value, Chunk):
        rows, columns = value.tokens.shape
        leaves = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(value))
        return {"chunk": [rows, columns - 1, _text(leaves)]}
    raise TypeError(f"got {type(value).__name__}, expected a tier or a chunk")


def _typed(value: Any, runner: ModelRunner) -> Any:
    """Makes a call's arguments of JSON."""
    if isinstance(value, list):
        return [_typed(one, runner) for one in value]
    if not isinstance(value, dict):
        return value
    if "tier" in value and isinstance(value["tier"], str):
        return next(tier for tier in runner.tiers if tier.name == value["tier"])
    if "chunk" in value:
        rows, length, text = value["chunk"]
        blank, buffer, start = jax.tree.leaves(_blank(rows, length, runner.sizes)), _bytes(text), 0
        leaves = []
        for leaf in blank:
            leaves.append(np.frombuffer(buffer, leaf.dtype, leaf.size, start).reshape(leaf.shape))
            start += leaf.nbytes
        return jax.tree.unflatten(jax.tree.structure(_blank(rows, length, runner.sizes)), leaves)
    return {name: _typed(one, runner) for name, one in value.items()}


@functools.cache
def _blank(rows: int, length: int, sizes: Sizes) -> Chunk:
    return Chunk.of((), rows, length, sizes)


def _text(values: bytes) -> str:
    return base64.b64encode(values).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
