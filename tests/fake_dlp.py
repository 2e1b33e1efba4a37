"""A stand-in for Google Cloud DLP on loopback: checks every request's form, finds e-mail addresses and names, and fails
when it is told to."""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Callable
from typing import Any

# Names in several scripts, which only a language model finds.
KINDS = {"EMAIL_ADDRESS": r"[\w.]+@[\w.]+\w", "PERSON_NAME": r"Jane Doe|Иван Петров|山田太郎"}
LIMIT = 500_000


class FakeDlp:
    """Listens on loopback; a context manager.

    Args:
        rule: of a request's number, what comes instead of an answer: a status with headers, "drop" of the connection,
            or bytes; None answers.
        most: findings in an answer; further ones are cut off, and it says so.
    """

    def __init__(self, rule: Callable[[int], Any] = lambda number: None, most: int = 3000) -> None:
        self.rule, self.most = rule, most
        self.asked: list[list[str]] = []  # the cells of each request that was answered
        self.requests = 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer._answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeDlp:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def cells(self) -> list[str]:
        return [cell for request in self.asked for cell in request]

    def _answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        content = handler.rfile.read(int(handler.headers["Content-Length"]))
        number, self.requests = self.requests, self.requests + 1
        behaviour = self.rule(number)
        if behaviour == "drop":
            handler.close_connection = True
            return
        status, headers, body = 200, {}, b""
        if isinstance(behaviour, bytes):
            body = behaviour
        elif behaviour is not None:
            status, headers = behaviour
            body = json.dumps({"error": {"code": status, "message": "Quota exceeded"}}).encode()
        elif wrong := _wrong(handler, content):
            status, body = 400, json.dumps({"error": {"code": 400, "message": wrong}}).encode()
        else:
            cells = [row["values"][0]["stringValue"] for row in json.loads(content)["item"]["table"]["rows"]]
            self.asked.append(cells)
            body = json.dumps({"result": self._found(cells)}).encode()
        handler.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    def _found(self, cells: list[str]) -> dict[str, Any]:
        findings = [
            _finding(kind, row, match.start(), match.end(), cell)
            for row, cell in enumerate(cells)
            for kind, pattern in KINDS.items()
            for match in re.finditer(pattern, cell)
        ]
        more = {"findingsTruncated": True} if len(findings) > self.most else {}
        return ({"findings": findings[: self.most]} if findings else {}) | more


def _finding(kind: str, row: int, start: int, end: int, cell: str) -> dict[str, Any]:
    """As protobuf's JSON has it: 64-bit numbers are texts, and zeros are left out."""

    def span(begin: int, stop: int) -> dict[str, str]:
        return ({"start": str(begin)} if begin else {}) | {"end": str(stop)}

    where = {"rowIndex": str(row)} if row else {}
    return {
        "infoType": {"name": kind},
        "likelihood": "LIKELY",
        "location": {
            "byteRange": span(len(cell[:start].encode()), len(cell[:end].encode())),
            "codepointRange": span(start, end),
            "contentLocations": [{"recordLocation": {"fieldId": {"name": "text"}, "tableLocation": where}}],
        },
    }


def _wrong(handler: http.server.BaseHTTPRequestHandler, content: bytes) -> str | None:
    """What the service would refuse a request for."""
    if handler.path != "/v2/projects/my-project/locations/europe-west1/content:inspect":
        return f"path {handler.path}"
    if handler.headers["Authorization"] != "Bearer secret":
        return f"authorization {handler.headers['Authorization']}"
    if handler.headers["x-goog-user-project"] != "my-project":
        return "no project that pays"
    if len(content) > LIMIT:
        return f"{len(content)} bytes"
    body = json.loads(content)
    if set(body) != {"item", "inspectConfig"} or set(body["item"]) != {"table"}:
        return f"fields {sorted(body)} {sorted(body['item'])}"
    table, how = body["item"]["table"], body["inspectConfig"]
    if table["headers"] != [{"name": "text"}] or len(table["rows"]) > 50_000:
        return f"table {table['headers']} of {len(table['rows'])} rows"
    for row in table["rows"]:
        if set(row) != {"values"} or len(row["values"]) != 1 or set(row["values"][0]) != {"stringValue"}:
            return f"row {row}"
    if set(how) != {"infoTypes", "minLikelihood"} or how["minLikelihood"] not in ("POSSIBLE", "LIKELY", "VERY_LIKELY"):
        return f"inspectConfig {how}"
    if not all(set(kind) == {"name"} and re.fullmatch(r"[A-Z_]+", kind["name"]) for kind in how["infoTypes"]):
        return f"infoTypes {how['infoTypes']}"
    return None
