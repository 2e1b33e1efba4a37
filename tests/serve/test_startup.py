"""A starting server: its answers meanwhile, and the change to its application."""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from eagle3_jax.config import ServeConfig
from eagle3_jax.serve import __main__ as serve
from eagle3_jax.serve import startup as startup_module
from eagle3_jax.serve.listen import address
from eagle3_jax.serve.startup import HttpServer, Startup


def application(*routes: Route, lifespan: Any = None) -> Starlette:
    app = Starlette(routes=routes, lifespan=lifespan)
    app.state.answering, app.state.end_answers = lambda: 0, lambda: None
    return app


@contextlib.contextmanager
def serving(startup: Startup, settings: ServeConfig) -> Iterator[tuple[HttpServer, socket.socket]]:
    with serve.bind(settings) as place:
        server = HttpServer(startup, settings)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [place]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield server, place
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


def test_a_server_that_starts_says_so_until_its_application_answers():
    go, answers, lived = threading.Event(), threading.Event(), []

    @contextlib.asynccontextmanager
    async def life(_):
        lived.append("begun")
        yield
        lived.append("ended")

    def make():
        startup.stage = "compile: 3 of 9 programs"
        assert go.wait(30)
        return application(Route("/health", lambda _: PlainTextResponse("fine")), lifespan=life)

    startup = Startup(make, answers.set)
    with serving(startup, ServeConfig(port=0)) as (_, place):
        with httpx2.Client(base_url=address(place), timeout=30) as http:
            health = http.get("/health")
            assert (health.status_code, health.headers["Retry-After"]) == (503, "5")
            assert health.json() == {"healthy": False, "starting": "compile: 3 of 9 programs"}
            refused = http.post("/v1/chat/completions", json={})
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "starting"
            assert "compile: 3 of 9" in refused.json()["error"]["message"]
            go.set()
            assert answers.wait(30)
            assert http.get("/health").text == "fine" and lived == ["begun"]
    assert lived == ["begun", "ended"]


def test_a_start_that_fails_ends_the_server():
    def make():
        raise ValueError("draft: of another target")

    startup, settings = Startup(make, lambda: None), ServeConfig(port=0)
    with serve.bind(settings) as place:
        HttpServer(startup, settings).run(sockets=[place])
    assert isinstance(startup.failure, ValueError) and startup.app is None


def test_who_is_slow_when_the_server_ends_is_told_so(monkeypatch):
    """One never sent its body, another has half of an answer; uvicorn logs nothing as a failure of the application."""
    monkeypatch.setattr(startup_module, "LAST", 0.2)
    answers, failures = threading.Event(), []
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "error", lambda text, *_, **more: failures.append(more))

    async def waits(request):
        await request.body()

    async def half(request):
        async def parts():
            yield b"half"
            await asyncio.sleep(60)

        return StreamingResponse(parts())

    def make():
        return application(Route("/waits", waits, methods=["POST"]), Route("/half", half))

    with serving(Startup(make, answers.set), ServeConfig(port=0, drain_timeout=0)) as (server, place):
        assert answers.wait(30)
        with (
            socket.create_connection(place.getsockname()[:2], timeout=30) as slow,
            socket.create_connection(place.getsockname()[:2], timeout=30) as reads,
        ):
            slow.sendall(b"POST /waits HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
            reads.sendall(b"GET /half HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b"200 OK" in reads.recv(4096)
            server.should_exit = True
            response = b"".join(iter(lambda: slow.recv(4096), b""))
            assert response.startswith(b"HTTP/1.1 503") and b'"code":"aborted"' in response
    assert not any(more.get("exc_info") for more in failures)
