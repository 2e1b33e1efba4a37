"""A server that answers as SGLang 0.5.23 does, as far as `export --check sglang` asks it."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

SETTINGS = {
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
    "dtype": "float32",
    "version": "0.5.23",
}


def meta(accepted: Sequence[int]) -> dict[str, Any]:
    """`meta_info` of an answer, in whose rounds so many drafts each were accepted."""
    histogram = [0] * (max(accepted) + 1)
    for count in accepted:
        histogram[count] += 1
    return {"spec_verify_ct": len(accepted), "spec_correct_drafts_histogram": histogram}


@contextlib.contextmanager
def serve(answers: Sequence[dict[str, Any]], prompts: Sequence[list[int]], **settings: Any) -> Iterator[Any]:
    """Yields its URL and what it was asked: path and body. Prompt i is answered with `answers[i]`."""
    asked: list[tuple[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def reply(self, content: Any) -> None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            asked.append((self.path, None))
            self.reply(SETTINGS | settings if self.path == "/server_info" else {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "null")
            asked.append((self.path, body))
            if self.path == "/generate":
                self.reply(answers[list(prompts).index(body["input_ids"])])
            else:
                self.reply(b"Cache flushed.\n")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
