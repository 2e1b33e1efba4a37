"""Limits on requests: API keys, rate, concurrency, and size and duration of bodies."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import time
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from eagle3_jax.serve.bodies import ApiError


class Rate:
    """A token bucket for each client, which holds the requests of one minute; `per_minute` None is no limit."""

    def __init__(self, per_minute: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute, self._clock = per_minute, clock
        self._full_at: dict[str, float] = {}  # when the client's bucket will be full again

    def take(self, client: str) -> float:
        """Takes a request's token; returns 0, or the seconds until there is one."""
        if self._per_minute is None:
            return 0.0
        now, each = self._clock(), 60 / self._per_minute
        full_at = max(self._full_at.get(client, now), now)
        if (wait := full_at + each - now - 60) > 1e-9:
            return wait
        if len(self._full_at) > 4096:  # a full bucket is as good as none
            self._full_at = {name: then for name, then in self._full_at.items() if then > now}
        self._full_at[client] = full_at + each
        return 0.0


class Gate:
    """Refuses requests before their body is read: without one of the keys, above the rate, or beyond `most` at once.

    Without `keys` authentication is off.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], rate: Rate, most: int) -> None:
        self._app, self._rate, self._most = app, rate, most
        self._keys = [_digest(key) for key in keys]
        self._inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            client = self._client(scope)
            if scope["method"] == "POST":  # other methods cost nothing
                if wait := self._rate.take(client):
                    raise ApiError(429, "requests: got too many in a minute", code="rate_limit", wait=wait)
                if self._inside >= self._most:
                    raise queue_full()
        except ApiError as error:
            await error.response(scope, receive, send)
            return
        self._inside += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._inside -= 1

    def _client(self, scope: Scope) -> str:
        """Names the client by its key, or without keys by its address. Raises ApiError."""
        if not self._keys:
            return (scope.get("client") or ("",))[0]
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = _digest(key.strip())
        found = [hmac.compare_digest(given, known) for known in self._keys]  # all keys, in constant time
        if scheme.lower() != "bearer" or not any(found):
            raise ApiError(401, "authorization: expected 'Bearer' and a known API key", code="invalid_api_key")
        return given.hex()


def queue_full() -> ApiError:
    return ApiError(429, "queue: got more requests than may wait", code="queue_full", wait=1.0)


async def read_body(request: Request, most: int, seconds: float) -> bytes:
    """Reads a JSON body. Raises ApiError: another content type, more than `most` bytes, or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # browsers send forms across origins without a preflight, but not JSON
        raise ApiError(415, f"content-type: got {kind!r}, expected 'application/json'", param="content-type")
    too_large = ApiError(413, f"body: got more bytes than {most}", param="body", code="too_large")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_large
    except TimeoutError as error:
        message = f"body: got {len(body)} bytes in {math.ceil(seconds)} s, expected all of it"
        raise ApiError(408, message, param="body", code="too_slow") from error
    except ClientDisconnect as error:
        raise ApiError(400, "body: the client disconnected", param="body") from error
    return bytes(body)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()  # equal lengths for every key
