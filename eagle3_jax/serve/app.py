"""The ASGI application: OpenAI's routes, /health and /metrics over a pool of engines."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib.resources
import logging
import time
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

import eagle3_jax
from eagle3_jax.config import ServeConfig
from eagle3_jax.decoding.arguments import check_ids
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.pool import EnginePool
from eagle3_jax.decoding.request import Request as EngineRequest
from eagle3_jax.models import chat_template
from eagle3_jax.serve import bodies, protocol
from eagle3_jax.serve.answers import Answers, submit, submitted
from eagle3_jax.serve.bodies import ApiError, Envelope
from eagle3_jax.serve.limits import Gate, Rate, read_body
from eagle3_jax.serve.metrics import Metrics
from eagle3_jax.serve.tools import FORMS, form_of

_PAGE = (importlib.resources.files("eagle3_jax.serve") / "page.html").read_text(encoding="utf-8")
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_ENDING = 5.0  # seconds to wait for aborted requests at shutdown

_log = logging.getLogger(__name__)


def make_app(
    pool: EnginePool, model: str, settings: ServeConfig, keys: Sequence[str] = (), defaults: dict | None = None
) -> Starlette:
    """Makes the ASGI application, the only one of a pool that is warmed up; without keys authentication is off.

    Its `state` has `answering`, which counts the requests that are being answered, and `end_answers`, which ends them
    and all later ones with an error. `defaults` are sampling parameters of requests that leave them out.
    """
    server = _Server(pool, model, settings, defaults or {})
    api = [
        Route("/chat/completions", server.chat, methods=["POST"]),
        Route("/completions", server.complete, methods=["POST"]),
        Route("/models", server.models),
        Route("/models/{name:path}", server.models),
    ]
    gate = Middleware(Gate, keys, Rate(settings.requests_per_minute), settings.queue_limit + pool.batch_size)
    origins = {"allow_origins": settings.allowed_origins, "allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
    cors = [Middleware(CORSMiddleware, **origins)] if settings.allowed_origins else []  # preflights carry no key
    app = Starlette(
        routes=[
            Mount("/v1", routes=api, middleware=[gate]),
            Route("/tokenize", server.tokenize, methods=["POST"], middleware=[gate]),
            Route("/detokenize", server.detokenize, methods=["POST"], middleware=[gate]),
            Route("/version", server.version),
            Route("/", server.page),
            Route("/health", server.health),
            Route("/metrics", server.metrics_text),
        ],
        middleware=[Middleware(_Count, server.metrics), *cors],
        exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), _failed),
        lifespan=server.lifespan,
    )
    app.state.answering, app.state.end_answers = server.answering, server.end_answers
    return app


class _Server:
    """The routes' handlers and their shared state."""

    def __init__(self, pool: EnginePool, model: str, settings: ServeConfig, defaults: Mapping[str, Any]) -> None:
        self.pool, self.model, self.settings, self.defaults = pool, model, settings, defaults
        self._names = (None, model, model.rstrip("/").rpartition("/")[2])  # a folder by its last name, too
        self.metrics = Metrics(*pool.engines)
        self._tokens = bodies.Tokens(pool.tokenizer)
        parser, template = settings.tool_call_parser, chat_template.of(pool.tokenizer, tools=True)
        self._form = form_of(template or "") if parser is None else FORMS[parser]
        self._created = int(time.time())
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: weakref.WeakSet[Answers] = weakref.WeakSet()
        self._stops = False
        # Encoding and submitting long prompts is slow, so it runs outside the event loop's thread.
        self._encoder = concurrent.futures.ThreadPoolExecutor(1, "eagle3_jax encoder")

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self._encoder.shutdown(wait=False)
            if self._tasks:  # clients are disconnected; each task ends when the engine's thread finishes its request
                await asyncio.wait(self._tasks, timeout=_ENDING)

    def answering(self) -> int:
        return sum(not answers.whole for answers in self._running)

    def end_answers(self) -> None:
        self._stops = True
        for answers in self._running:
            answers.abort()

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, protocol.Chat)

    async def complete(self, request: Request) -> Response:
        return await self._answer(request, protocol.Completion)

    async def page(self, _: Request) -> Response:
        return Response(_PAGE, media_type="text/html", headers=_PAGE_HEADERS)

    async def models(self, request: Request) -> Response:
        entry = {"id": self.model, "object": "model", "created": self._created, "owned_by": "eagle3_jax"}
        entry["max_model_len"] = self.pool.max_length
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [entry]})
        self._check_model(name)
        return JSONResponse(entry)

    async def tokenize(self, request: Request) -> Response:
        body = protocol.read_text(await self._read(request))
        self._check_model(body.model)
        try:
            if len(body.prompts) > 1:
                raise ValueError(f"prompt: got {len(body.prompts)} prompts, expected one")
            ids = await asyncio.wrap_future(self._encoder.submit(body.encode, self.pool, body.prompts[0]))
        except ValueError as error:
            raise protocol.refusal(error, body.places) from error
        return JSONResponse({"count": len(ids), "max_model_len": self.pool.max_length, "tokens": ids})

    async def detokenize(self, request: Request) -> Response:
        body = protocol.parse(protocol.Tokens, await self._read(request))
        self._check_model(body.model)
        try:
            check_ids("tokens", body.tokens, self.pool.engines[0].target.config.vocab_size)
        except ValueError as error:
            raise protocol.refusal(error) from error
        return JSONResponse({"prompt": self.pool.tokenizer.decode(body.tokens)})

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": eagle3_jax.__version__})

    async def health(self, _: Request) -> Response:
        """Reports healthy while rounds make progress or no request runs; says how far the warm-up is until it ends."""
        stalled = self.pool.stalled
        healthy = stalled <= self.settings.stall_timeout
        state: dict[str, Any] = {"healthy": healthy, "stalled_seconds": round(stalled, 3)}
        if (compiling := self.pool.compiling) is not None:
            state["compiling"] = compiling
        return JSONResponse(state, 200 if healthy else 503)

    async def metrics_text(self, _: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _answer(self, request: Request, kind: type[protocol.RequestBody]) -> Response:
        settings, arrived = self.settings, time.monotonic()
        body = protocol.read(kind, await self._read(request))
        self._check_model(body.model)
        params = body.params(self.pool.max_length, self.defaults)
        if (count := body.answers * len(body.prompts)) > settings.queue_limit:
            got = f"n: got {count} answers" if body.answers > 1 else f"prompt: got {count} prompts"
            raise protocol.refusal(ValueError(f"{got}, expected at most {settings.queue_limit} (serve.queue_limit)"))
        submitting = self._encoder.submit(self._submit, body, params, arrived + settings.request_timeout)
        try:
            requests = await submitted(self.pool, submitting)
        except ValueError as error:
            raise protocol.refusal(error, body.places) from error
        answers = Answers(self.pool, self.metrics, self._tasks, requests, body.answers, arrived)
        self._running.add(answers)
        if self._stops:
            answers.abort()
        opening = body.opening(self.pool.tokenizer, requests[0].ids)
        envelope = Envelope(body.choices(self._tokens, self._form, opening), self.model)
        if body.stream:
            events = _events(answers, envelope, body)
            return _EventStream(answers, events, settings.client_timeout)
        async with answers:
            gone = asyncio.ensure_future(request.receive())  # the only message after a body is the disconnection
            ended = asyncio.ensure_future(answers.wait())
            try:
                await asyncio.wait({gone, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not ended.done():
                    return Response(status_code=499)  # the client is gone
                ended.result()
            finally:
                gone.cancel()
                ended.cancel()
            outputs = [answers.output(index) for index in range(len(answers.requests))]
            prompts = [request.ids for request in answers.requests] if body.return_token_ids else None
            return JSONResponse(envelope.whole(outputs, answers.usage(), prompts))

    async def _read(self, request: Request) -> bytes:
        return await read_body(request, self.settings.max_body_bytes, self.settings.client_timeout)

    def _submit(self, body: protocol.RequestBody, params: SamplingParams, deadline: float) -> list[EngineRequest]:
        prompts = [body.encode(self.pool, prompt) for prompt in body.prompts]
        params = body.for_model(params, self._form, body.opening(self.pool.tokenizer, prompts[0]))
        options = {"drafts": body.drafts is not False, "adapt": body.adapt is not False}
        return submit(self.pool, prompts, params, body.answers, deadline, **options)

    def _check_model(self, name: str | None) -> None:
        if name not in self._names:
            message = f"model: got {name!r:.80}, expected {self.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")


async def _events(answers: Answers, envelope: Envelope, body: protocol.RequestBody) -> AsyncIterator[bytes]:
    """Yields the events of a stream; if an answer fails, the last event is the error.

    The events that open answers wait for the first token, as vLLM's do: clients take the first event's time for its.
    """
    shape, options = envelope.shape, body.options
    more: dict[str, Any] = {"usage": None} if options.include_usage else {}
    written = 0
    prompts = {index: request.ids for index, request in enumerate(answers.requests)} if body.return_token_ids else {}
    openings = [shape.opening(index) for index in range(len(answers.requests))]
    try:
        async for index, piece in answers.pieces():
            written += len(piece.token_ids)
            if piece.text or piece.token_ids or piece.finish_reason:
                for number, opening in enumerate(openings):
                    if opening is not None:
                        first = prompts and shape.prompt_beside and number == 0
                        yield envelope.event(opening, **more, **({"prompt_token_ids": prompts[0]} if first else {}))
                openings = []
                if options.include_usage and options.continuous_usage_stats:
                    more = {"usage": answers.usage(written)}
                choice = shape.part(index, piece)
                if options.include_drafts:
                    choice["drafts"] = bodies.shown_drafts(shape.tokens, piece)
                if body.return_token_ids:  # the prompt's in the first event of a choice
                    choice["token_ids"] = piece.token_ids
                    if index in prompts and not shape.prompt_beside:
                        choice["prompt_token_ids"] = prompts.pop(index)
                yield envelope.event(choice, **more)
        if options.include_usage:
            yield envelope.event(usage=answers.usage())
    except ApiError as error:
        yield bodies.sent_event(error.body)
    yield bodies.DONE


class _EventStream(StreamingResponse):
    """Server-sent events, with a time limit on the client's reading of each."""

    media_type = "text/event-stream"

    def __init__(self, answers: Answers, events: AsyncIterator[bytes], seconds: float) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._answers, self._seconds = answers, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Any) -> None:
            async with asyncio.timeout(self._seconds):
                await send(message)

        async with self._answers:
            try:
                await super().__call__(scope, receive, send_in_time)
            except TimeoutError:
                _log.warning("a client read nothing for %g s; its answers are aborted", self._seconds)


class _Count:
    """Middleware that counts responses."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answered = False

        async def counted(message: Any) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = True
                self._metrics.responded(scope["path"], message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counted if scope["type"] == "http" else send)
        except Exception:
            if scope["type"] == "http" and not answered:  # Starlette sends the error response outside all middleware
                self._metrics.responded(scope["path"], 500)
            raise


async def _failed(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, f"{request.method} {request.url.path[:80]}: {error.detail}")
    elif not isinstance(error, ApiError):
        error = ApiError(500, "the server failed; its log says why", code="internal_error")
    return error.response
