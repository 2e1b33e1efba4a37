"""The server listens at once: it says that it starts, while a thread makes the application that then answers.

The main thread, where signals arrive, has nothing to do but serve; loading and compiling take minutes.
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
from starlette.types import ASGIApp, Receive, Scope, Send

from eagle3_jax.config import ServeConfig
from eagle3_jax.runs import command
from eagle3_jax.serve.errors import ApiError

# Seconds that an idle connection stays open. Clients have to be the first to close: a request that is under way while
# the server closes is lost. httpx, and OpenAI's client with it, closes after 5 (uvicorn's default too), Go after 90.
_KEEP_ALIVE = 120
_RETRY = 5.0  # seconds after which a client may ask again whether it has started


class Opening:
    """An ASGI application until another one is made, which answers from then on.

    Attributes:
        stage: of the start, in words; /health and errors say it.
        app: that was made; None while it starts.
        failure: that ended the start.
    """

    def __init__(self, make: Callable[[], Starlette], ready: Callable[[], object]) -> None:
        """Args: make: is called in a thread of its own. ready: is called when the application answers."""
        self.stage = "loading"
        self.app: Starlette | None = None
        self.failure: BaseException | None = None
        self._make, self._ready = make, ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            await (self.app or self._answer(scope))(scope, receive, send)

    def _answer(self, scope: Scope) -> ASGIApp:
        if scope["path"] == "/health":
            return JSONResponse({"healthy": False, "starting": self.stage}, 503, {"Retry-After": f"{_RETRY:.0f}"})
        said = f"the server is starting ({self.stage}); /health is 200 when it answers"
        return ApiError(503, said, code="starting", retry_after=_RETRY).response()

    async def _live(self, receive: Receive, send: Send) -> None:
        """The lifespan: of the other application too."""
        await receive()
        async with contextlib.AsyncExitStack() as stack:
            opening = asyncio.create_task(self._open(stack))
            await send({"type": "lifespan.startup.complete"})
            await receive()
            opening.cancel()
        await send({"type": "lifespan.shutdown.complete"})

    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        loop, made = asyncio.get_running_loop(), asyncio.Event()
        apps: list[Starlette] = []

        def make() -> None:
            try:
                apps.append(self._make())
            except BaseException as error:  # for the main thread
                self.failure = error
                return
            with contextlib.suppress(RuntimeError):  # the server ended meanwhile
                loop.call_soon_threadsafe(made.set)

        # Nobody waits for it where the server ends: it may be in the middle of a compilation.
        threading.Thread(target=make, name="eagle3_jax start", daemon=True).start()
        await made.wait()
        (app,) = apps
        await stack.enter_async_context(app.router.lifespan_context(app))
        self.app = app
        self._ready()


class Server(uvicorn.Server):
    """Ends when its start failed, or the verb was asked to stop: signals are for `command.run`."""

    def __init__(self, opening: Opening, settings: ServeConfig) -> None:
        super().__init__(http_settings(opening, settings))
        self._opening = opening

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        ends = await super().on_tick(counter)
        return ends or command.stop_asked() or self._opening.failure is not None


def http_settings(app: ASGIApp, settings: ServeConfig) -> uvicorn.Config:
    """How HTTP is spoken."""
    return uvicorn.Config(
        app,
        log_level="info" if settings.access_log else "warning",
        access_log=settings.access_log,
        lifespan="on",
        ws="none",  # no route speaks it
        server_header=False,
        proxy_headers=False,  # whoever asks could name another address
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=settings.drain_timeout,
    )


def address(place: socket.socket) -> str:
    """Its URL."""
    host, port = place.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
