"""A server of OpenAI's API that holds a tokenizer alone, answers by rule, and fails when it is told to."""

from __future__ import annotations

import http.server
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from eagle3_jax.models import chat_template
from eagle3_jax.regenerate.server import PROBE

# What a rule may say instead of an answer's changes: a status, or how the answer fails.
Rule = Callable[[dict[str, Any]], Mapping[str, Any] | int | str | None]


class FakeServer:
    """Listens on loopback between `up` and `down`; `asked` holds the bodies of all but probes.

    Args:
        form: "vllm" has token ids where vLLM has them, "sglang" where SGLang has them; "openai" refuses fields that
            OpenAI does not have, and gives no ids.
        rule: of each body, the choice's fields that differ from the usual answer; or a status; or "half" of an answer,
            "silent" for a while, "drop" the connection.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        form: str = "vllm",
        model: str = "target",
        max_model_len: int = 4096,
        key: str | None = None,
        rule: Rule = lambda _: None,
    ) -> None:
        self.tokenizer, self.form, self.model, self.max_model_len = tokenizer, form, model, max_model_len
        self.key, self.rule, self.silence = key, rule, 5.0
        self.asked: list[dict[str, Any]] = []
        self.probed = 0
        self._server: http.server.ThreadingHTTPServer | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> FakeServer:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def up(self) -> None:
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer._models(self)

            def do_POST(self) -> None:
                outer._chat(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Threads(http.server.ThreadingHTTPServer):
            allow_reuse_address, daemon_threads, request_queue_size = True, True, 256

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that is gone

        self._server = Threads(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def down(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _models(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        if self.key is not None and handler.headers["Authorization"] != f"Bearer {self.key}":
            return self._send(handler, {"error": "who are you?"}, 401)
        card = {"id": self.model, "object": "model", "max_model_len": self.max_model_len}
        self._send(handler, {"object": "list", "data": [card]})

    def _chat(self, handler: http.server.BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        known = {"model", "messages", "temperature", "max_tokens", "seed", "tools"}
        if self.form == "openai" and (unknown := body.keys() - known):
            return self._send(handler, {"error": f"Unknown parameter: {min(unknown)}"}, 400)
        behaviour: Mapping[str, Any] | int | str | None = None
        if body["messages"] == PROBE:
            self.probed += 1
        else:
            self.asked.append(body)
            behaviour = self.rule(body)
        if isinstance(behaviour, int):
            return self._send(handler, {"error": "no"}, behaviour)
        if behaviour == "silent":
            time.sleep(self.silence)
        answer = self.answer(body, behaviour if isinstance(behaviour, Mapping) else {})
        content = json.dumps(answer).encode()
        if behaviour == "drop":
            handler.connection.close()
        elif behaviour == "half":
            handler.send_response(200)
            handler.end_headers()  # without a length: it ends with the connection
            handler.wfile.write(content[: len(content) // 2])
            handler.close_connection = True
        else:
            self._send(handler, answer)

    def _send(self, handler: http.server.BaseHTTPRequestHandler, body: Any, status: int = 200) -> None:
        content = json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    def answer(self, body: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        """The usual answer names the last message and the seed."""
        prompt = chat_template.prompt_ids(self.tokenizer, body["messages"])
        text = f"{body['messages'][-1]['content'][:40]}: {body.get('seed')}"
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] + [self.tokenizer.eos_token_id]
        message = {"role": "assistant", "content": text}
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": ids, **changes}
        whole: dict[str, Any] = {"object": "chat.completion", "model": self.model, "choices": [choice]}
        whole["usage"] = {"prompt_tokens": len(prompt), "completion_tokens": len(choice["token_ids"])}
        if self.form == "openai" or not body.get("return_token_ids"):
            del choice["token_ids"]
        elif self.form == "sglang":
            choice["prompt_token_ids"] = prompt
        else:
            whole["prompt_token_ids"] = prompt
        return whole
