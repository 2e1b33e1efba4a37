"""Leases: exclusive rights to write, held in an object that the holder renews."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Final

from eagle3_jax.runs.bucket import objects
from eagle3_jax.runs.store import Path, lock_file

LEASE_SECONDS: Final = "EAGLE3_JAX_LEASE_SECONDS"  # environment variable: a lease not renewed for so long has ended


def lease_seconds() -> float:
    """Returns how long a lease lives without being renewed."""
    value = os.environ.get(LEASE_SECONDS, "60")
    if not re.fullmatch(r"\d+(\.\d+)?", value) or not float(value):
        raise ValueError(f"{LEASE_SECONDS}: got {value!r}, expected seconds")
    return float(value)


@contextlib.contextmanager
def hold(path: Path, owner: str) -> Iterator[None]:
    """Holds a lease, in object `.<name>.lock` beside `path`, until the block ends, and renews it meanwhile.

    Each renewal is a new generation of the object. A holder is dead when the object stays at one generation for
    `lease_seconds`, which a claimant watches itself: the clocks of two hosts are never compared. A process that cannot
    renew its lease in time ends.
    """
    seconds, file, token = lease_seconds(), lock_file(path), uuid.uuid4().hex
    held = _claim(path, owner, token, seconds)
    over = threading.Event()
    renewer = threading.Thread(target=_renew, args=(file, owner, token, held, seconds, over), daemon=True)
    renewer.start()
    try:
        yield
    finally:
        over.set()
        renewer.join()
        with contextlib.suppress(OSError):  # else it ends by itself
            if (found := objects.look(file)) is not None and token.encode() in found[0]:
                objects.put(file, _lease("", token, 0), found[1])


def holder(path: Path) -> str:
    """Returns the owner of a lease; empty where no process holds it."""
    found = objects.look(lock_file(path))
    return "" if found is None else _owner(found[0])


def _lease(owner: str, token: str, renewal: int) -> bytes:
    return json.dumps({"owner": owner, "token": token, "renewal": renewal}).encode()


def _owner(content: bytes) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(content)["owner"])
    return "another process"


def _claim(path: Path, owner: str, token: str, seconds: float) -> int:
    """Takes a free lease, or one whose holder is dead. Returns its generation."""
    file, first, until = lock_file(path), None, time.monotonic() + seconds
    while True:
        found = objects.look(file)
        at = objects.ABSENT if found is None else found[1]
        other = "" if found is None else _owner(found[0])
        if first is None:
            first = at
            if other:
                print(f"{file}: held by {other}; watching for {seconds:g} s whether it lives", file=sys.stderr)
        if other and at != first:
            raise BlockingIOError(other)
        if not other or time.monotonic() > until:
            try:
                return objects.put(file, _lease(owner, token, 0), at)
            except objects.Conflict as error:
                raise BlockingIOError(holder(path) or "another process") from error
        time.sleep(seconds / 20)


def _renew(file: Path, owner: str, token: str, at: int, seconds: float, over: threading.Event) -> None:
    renewal, last = 0, time.monotonic()
    while not over.wait(seconds / 6):
        renewal += 1
        try:
            at = objects.put(file, _lease(owner, token, renewal), at, timeout=seconds / 4, retry=False)
            last = time.monotonic()
        except OSError as error:
            with contextlib.suppress(OSError):
                # A renewal whose answer was lost is this run's own, and its generation is not known.
                if isinstance(error, objects.Conflict) and (found := objects.look(file)) is not None:
                    if token.encode() not in found[0]:
                        _end(f"{file}: the lease was taken by {_owner(found[0]) or 'another process'}, this run ends")
                        return
                    at = found[1]
            if time.monotonic() - last > seconds * 2 / 3:
                passed = time.monotonic() - last
                _end(f"{file}: the lease was not renewed for {passed:.0f} s, this run ends ({error})")
                return


def _end(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
    os._exit(1)  # at once: another run may be writing now
