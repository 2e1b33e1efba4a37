"""A starting server: its answers meanwhile, and the change to its application."""

import contextlib
import threading
import time

import httpx2
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from eagle3_jax.config import ServeConfig
from eagle3_jax.serve import __main__ as serve
from eagle3_jax.serve.opening import Opening, Server, address


def test_a_server_that_starts_says_so_until_its_application_answers():
    go, answers, lived = threading.Event(), threading.Event(), []

    @contextlib.asynccontextmanager
    async def life(_):
        lived.append("begun")
        yield
        lived.append("ended")

    def make():
        opening.stage = "compile: 3 of 9 programs"
        assert go.wait(30)
        return Starlette(routes=[Route("/health", lambda _: PlainTextResponse("fine"))], lifespan=life)

    opening, settings = Opening(make, answers.set), ServeConfig(port=0)
    with serve.bind(settings) as place:
        server = Server(opening, settings)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [place]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
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
        server.should_exit = True
        thread.join(30)
    assert lived == ["begun", "ended"] and not thread.is_alive()


def test_a_start_that_fails_ends_the_server():
    def make():
        raise ValueError("draft: of another target")

    opening, settings = Opening(make, lambda: None), ServeConfig(port=0)
    with serve.bind(settings) as place:
        Server(opening, settings).run(sockets=[place])
    assert isinstance(opening.failure, ValueError) and opening.app is None
