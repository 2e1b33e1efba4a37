"""What a server needs before it loads: alike hosts, the keys of its clients, and its socket."""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import os
import pathlib
import socket
from typing import Any

from eagle3_jax.config import RunConfig, ServeConfig, run_file
from eagle3_jax.models.checkpoint.fetch import fetch
from eagle3_jax.models.checkpoint.load import weight_files
from eagle3_jax.runs import command, disk, machine, processes

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
# Parts of a file that are compared, and bytes of each: weights of another training differ in every part.
_PARTS, _BYTES = 16, 1 << 16


def api_keys(settings: ServeConfig) -> list[str]:
    """Reads the API keys that clients may present.

    Raises ValueError: the variable or file has none, or one that no client can send; no key for another host's clients.
    """
    keys = []
    if (variable := settings.api_key_variable) is not None:
        found = _keys("serve.api_key_variable", os.environ.get(variable, "").encode(errors="surrogateescape"))
        if not found:
            raise ValueError(f"serve.api_key_variable: got no {variable} in the environment, expected an API key in it")
        keys += found
    if (file := settings.api_key_file) is not None:
        found = _keys("serve.api_key_file", pathlib.Path(file).read_bytes())
        if not found:
            raise ValueError(f"serve.api_key_file: got no key in {file}, expected one a line")
        keys += found
    if not keys and settings.host not in _LOOPBACK:
        expected = f"serve.api_key_variable or serve.api_key_file, or {_LOOPBACK[0]}"
        raise ValueError(f"serve.host: got {settings.host} without keys, expected {expected}")
    return keys


def _keys(field: str, text: bytes) -> list[str]:
    """Splits a text into keys, one a line, without an editor's byte order mark and empty lines.

    Raises ValueError, without showing a key: a header carries ASCII alone, so no client could send another key.
    """
    lines = [line.strip() for line in text.removeprefix(codecs.BOM_UTF8).splitlines()]
    for number, line in enumerate(lines, start=1):
        if not line.isascii() or not line.decode().isprintable():
            raise ValueError(f"{field}: got other characters in line {number}, expected printable ASCII alone")
    return [line.decode() for line in lines if line]


def bind(settings: ServeConfig) -> socket.socket:
    """Binds the server's socket before anything is loaded. Raises ValueError: in use, or not this machine's address."""
    with contextlib.ExitStack() as opened:
        try:
            family, _, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
            place = opened.enter_context(socket.socket(family))
            place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # The kernel drops clients that read nothing; connections inherit the option.
            if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:
                place.setsockopt(socket.IPPROTO_TCP, option, int(1000 * settings.client_timeout))
            place.bind(address)
        except OSError as error:
            where = f"{settings.host}:{settings.port}"
            raise ValueError(f"serve.host, serve.port: got {where}: {command.sentence(error)}") from error
        opened.pop_all()  # the caller's
        return place


def address(place: socket.socket) -> str:
    """Formats a listening socket's URL."""
    host, port = place.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def check_hosts(config: RunConfig) -> None:
    """Compares versions, configuration and the target's weights of all processes. Raises ValueError on all of them."""
    if processes.count() == 1:
        return
    processes.check_alike({f"version of {name}": version for name, version in machine.versions().items()})
    processes.check_alike(_flat(run_file.to_dict(config)))
    files = weight_files(fetch(config.target.name))
    processes.check_alike({f"weights, {path.name}": _sample(path) for path in files})


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Names the values of all sections by their dotted fields."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def _sample(path: disk.Path) -> str:
    """Digests a file's size and some of its parts: each host would read hundreds of GB for the whole."""
    size = disk.size(path)
    found = hashlib.sha256(str(size).encode())
    for part in range(_PARTS):
        start = max(0, (size - _BYTES) * part // (_PARTS - 1))
        found.update(disk.read_range(path, start, min(start + _BYTES, size)))
    return found.hexdigest()[:16]
