"""What a server needs before it loads: the keys of its clients, and its socket."""

from __future__ import annotations

import codecs
import os
import pathlib
import socket

from eagle3_jax.config import ServeConfig
from eagle3_jax.runs import command

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def api_keys(settings: ServeConfig) -> list[str]:
    """Reads the API keys that clients may present.

    Raises:
        ValueError: the variable or file has none, a key that no client can send, or the host is not the loopback and
            there is no key.
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
        raise ValueError(
            f"serve.host: got {settings.host} without keys, expected serve.api_key_variable or serve.api_key_file, or "
            f"{_LOOPBACK[0]}"
        )
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
    try:
        family, _, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        place = socket.socket(family)
    except OSError as error:
        raise _not_there(settings, error) from error
    try:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(
            socket, "TCP_USER_TIMEOUT"
        ):  # the kernel drops clients that read nothing; connections inherit the option
            milliseconds = int(1000 * settings.client_timeout)
            place.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        place.bind(address)
    except OSError as error:
        place.close()
        raise _not_there(settings, error) from error
    return place


def _not_there(settings: ServeConfig, error: OSError) -> ValueError:
    return ValueError(f"serve.host, serve.port: got {settings.host}:{settings.port}: {command.sentence(error)}")


def address(place: socket.socket) -> str:
    """Formats a listening socket's URL."""
    host, port = place.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
