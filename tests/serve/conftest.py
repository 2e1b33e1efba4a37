"""A running server over a tiny target, and the official client."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import openai
import pytest
import tiny
import uvicorn

from eagle3_jax.config import DraftTree, ServeConfig, TargetConfig
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.pool import EnginePool
from eagle3_jax.models.checkpoint.fetch import load_target
from eagle3_jax.serve import __main__ as serve
from eagle3_jax.serve.app import make_app
from eagle3_jax.serve.startup import http_settings

MODEL = "org/tiny"


@dataclasses.dataclass(frozen=True)
class Served:
    """A server, and who asks it."""

    url: str
    engine: Engine
    client: openai.OpenAI
    http: httpx2.Client

    def metrics(self) -> str:
        return self.http.get("/metrics").text


@pytest.fixture(scope="session")
def engine(tmp_path_factory) -> Engine:
    """Copies drafts from the text, so that acceptance has numbers without a head."""
    folder = tiny.write_target(tmp_path_factory.mktemp("target"))
    target = load_target(TargetConfig(name=str(folder), aux_layers=(1, 2, 3)))
    chain = DraftTree(num_steps=3, topk=1, num_draft_tokens=4)
    return Engine.load(target, "lookup", chain, batch_size=4, max_length=256, queue_limit=64)


@contextlib.contextmanager
def _serving(engine: Engine, keys: tuple[str, ...] = (), **settings: Any) -> Iterator[Served]:
    common: dict[str, Any] = {"port": 0, "queue_limit": 64, "draft": "none", "drain_timeout": 5}
    common |= {"batch_size": engine.batch_size}
    config = ServeConfig(**common | settings)
    place = serve.bind(config)
    app = make_app(EnginePool([engine]), MODEL, config, keys)
    server = uvicorn.Server(http_settings(app, config))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [place]})
    thread.start()
    url = f"http://127.0.0.1:{place.getsockname()[1]}"
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key=(*keys, "none")[0], max_retries=0, timeout=120) as client,
            httpx2.Client(base_url=url, timeout=120) as http,
        ):
            yield Served(url, engine, client, http)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def served(engine) -> Iterator[Served]:
    with _serving(engine) as found:
        yield found


@pytest.fixture
def serving(engine) -> Callable[..., contextlib.AbstractContextManager[Served]]:
    """Starts another one, on the same engine if on no other: `with serving(queue_limit=2) as served`."""

    def start(engine: Engine = engine, **settings: Any) -> contextlib.AbstractContextManager[Served]:
        return _serving(engine, **settings)

    return start
