"""Starts the server: it listens at once and answers "starting" while a thread makes the application.

Loading and compiling take minutes; the main thread, which receives the signals, only serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eagle3_jax.config import ServeConfig
from eagle3_jax.runs import command
from eagle3_jax.serve.bodies import ApiError, stops

# Seconds that an idle connection stays open. Clients must close first: a request in flight is lost if the server
# closes. httpx, and OpenAI's client with it, closes after 5 (as uvicorn by default), Go after 90.
_KEEP_ALIVE = 120
LAST = 5  # seconds after `drain_timeout` for the device's last dispatch, and for clients to take their answers' ends
_RETRY = 5.0  # seconds between a client's polls during the start


class Startup:
    """An ASGI application that stands in for another one until a thread has made that; then it calls `ready`."""

    def __init__(self, make: Callable[[], Starlette], ready: Callable[[], object]) -> None:
        self.stage = "loading"  # for /health and errors
        self.app: Starlette | None = None
        self.failure: BaseException | None = None  # ended the start
        self._make, self._ready = make, ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        begun = False

        async def note(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await (self.app or self._answer(scope))(scope, receive, note)
        except asyncio.CancelledError:  # the server ends, and the client is slow
            if not begun:
                await stops().response(scope, receive, send)

    def _answer(self, scope: Scope) -> ASGIApp:
        if scope["path"] == "/health":
            return JSONResponse({"healthy": False, "starting": self.stage}, 503, {"Retry-After": f"{_RETRY:.0f}"})
        message = f"the server is starting ({self.stage}); /health returns 200 when it is ready"
        return ApiError(503, message, code="starting", wait=_RETRY).response

    async def _live(self, receive: Receive, send: Send) -> None:
        """Runs the lifespan of both applications."""
        await receive()
        async with contextlib.AsyncExitStack() as stack:
            task = asyncio.create_task(self._open(stack))
            await send({"type": "lifespan.startup.complete"})
            await receive()
            task.cancel()
        await send({"type": "lifespan.shutdown.complete"})

    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        loop, made = asyncio.get_running_loop(), asyncio.Event()
        apps: list[Starlette] = []

        def make() -> None:
            try:
                apps.append(self._make())
            except BaseException as error:  # raised by the main thread
                self.failure = error
                return
            with contextlib.suppress(RuntimeError):  # the server ended meanwhile
                loop.call_soon_threadsafe(made.set)

        # A daemon: the server's end does not wait for a compilation.
        threading.Thread(target=make, name="eagle3_jax start", daemon=True).start()
        await made.wait()
        (app,) = apps
        await stack.enter_async_context(app.router.lifespan_context(app))
        self.app = app
        self._ready()


class HttpServer(uvicorn.Server):
    """A server that stops when its start fails or the verb is asked to stop; `command.run` handles signals."""

    def __init__(self, startup: Startup, settings: ServeConfig) -> None:
        super().__init__(http_settings(startup, settings))
        self._startup, self._drain = startup, settings.drain_timeout

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        ends = await super().on_tick(counter)
        return ends or command.stop_asked() or self._startup.failure is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for the answers for `drain_timeout`, then ends them, so that each client gets an end."""
        app = self._startup.app
        if app is None:
            return await super().shutdown(sockets)
        waits = ""
        if count := app.state.answering():
            waits = f": waits up to {self._drain} s for {count} answer{'s' * (count > 1)}; Ctrl-C again ends at once"
        command.write(f"eagle3_jax.serve: stops{waits}")
        ending = asyncio.get_running_loop().call_later(self._drain, app.state.end_answers)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()


def http_settings(app: ASGIApp, settings: ServeConfig) -> uvicorn.Config:
    """Makes uvicorn's settings."""
    return uvicorn.Config(
        app,
        log_level="info" if settings.access_log else "warning",
        access_log=settings.access_log,
        lifespan="on",
        ws="none",  # no route uses it
        server_header=False,
        proxy_headers=False,  # clients could forge their address
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=settings.drain_timeout + LAST,
    )
