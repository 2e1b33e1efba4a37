"""The wire between an engine's hosts: JSON lines over TCP, with one secret; a collective would wait for the device."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import hmac
import json
import secrets
import socket
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from eagle3_jax.decoding.device import calls
from eagle3_jax.decoding.device.calls import Call
from eagle3_jax.decoding.device.shapes import Sizes
from eagle3_jax.decoding.tier import Tier
from eagle3_jax.runs import processes

PATIENCE = 10.0  # seconds
_MEETING = 60.0  # seconds in which all processes connect, when all have loaded
_CALLS = ("prefill", "decode", "catch_up", "note_prompt", "copy_state", "write_table")


class HostLost(OSError):
    """A process of the engine ended, hangs, or failed; no request can go on."""


class Line:
    """A connection to the host `name`: lines of JSON. One thread reads, any may send."""

    def __init__(self, place: socket.socket, name: str = "") -> None:
        place.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.name = name
        self._place, self._reader, self._lock = place, place.makefile("rb"), threading.Lock()

    def send(self, value: Any) -> None:
        """Sends a value, or its line."""
        line = value if isinstance(value, bytes) else line_of(value)
        with self._lock:
            self._place.sendall(line)

    def read(self) -> Any:
        """Reads a value. Raises EOFError, OSError."""
        line = self._reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)

    def close(self) -> None:
        """Ends the connection, unless it has ended."""
        with contextlib.suppress(OSError):
            self._place.shutdown(socket.SHUT_RDWR)


def accept() -> dict[int, Line]:
    """Waits for the connections of all other processes, on process 0. Raises HostLost."""
    lines: dict[int, Line] = {}
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
            line = Line(connection)
            try:
                hello = line.read()
                if not hmac.compare_digest(hello["secret"], secret):
                    raise ValueError
            except (OSError, EOFError, ValueError, TypeError, KeyError):  # some other program of the network
                connection.close()
                continue
            connection.settimeout(None)  # read for ever; `_ping` looks after it
            line.name = hello["host"]
            lines[hello["process"]] = line
    return lines


def connect() -> Line:
    """Connects to process 0. Raises HostLost."""
    port, secret = processes.agree(lambda: None)
    try:
        place = socket.create_connection((processes.coordinator(), port), timeout=PATIENCE)
    except OSError as error:
        raise HostLost(f"process 0 of {processes.count()} does not answer at port {port}: {error}") from error
    line = Line(place)
    line.send({"secret": secret, "process": processes.index(), "host": socket.gethostname()})
    return line


def line_of(value: Any) -> bytes:
    """Makes a line of JSON."""
    return json.dumps(value).encode() + b"\n"


def encode(call: Call) -> dict[str, Any]:
    """Makes JSON of a call."""
    form = {field: value.name if isinstance(value, Tier) else value for field, value in call.form.items()}
    return {"call": call.name, "form": form, "sent": text_of(call.sent.bits)}


def decode(message: dict[str, Any], sizes: Sizes, tiers: Sequence[Tier]) -> Call:
    """Makes a call of JSON. Raises ValueError: one that no host asks for."""
    if message["call"] not in _CALLS:
        raise ValueError(f"call: got {message['call']!r}, expected one of {', '.join(_CALLS)}")
    of_name = {tier.name: tier for tier in tiers}
    call = _for_nobody(sizes, message["call"], *((k, of_name.get(v, v)) for k, v in message["form"].items()))
    return call._replace(sent=dataclasses.replace(call.sent, bits=numbers_of(message["sent"])))


@functools.cache
def _for_nobody(sizes: Sizes, name: str, *form: tuple[str, Any]) -> Call:
    return getattr(calls, name)(sizes, **dict(form))


def text_of(numbers: Any) -> str:
    """Makes text of an array of int32."""
    return base64.b64encode(np.asarray(numbers, np.int32).tobytes()).decode()


def numbers_of(text: str) -> Any:
    return np.frombuffer(base64.b64decode(text), np.int32)
