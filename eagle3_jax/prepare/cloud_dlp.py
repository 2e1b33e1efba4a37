"""Finds personal data with Google Cloud DLP (Sensitive Data Protection), in many languages and many texts a request.

`content:inspect` says where personal data is; it is replaced here, so that only inspection is paid for. Texts are the
cells of a table with one column. A long text is several cells that overlap, since a finding never spans two.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import httpx2

from eagle3_jax.config import CloudDlpConfig, PrepareConfig
from eagle3_jax.data import sources
from eagle3_jax.data.personal import Span
from eagle3_jax.runs import command, disk
from eagle3_jax.runs.bucket import clients

Inspect = Callable[[Sequence[str]], list[list[Span]]]

# docs.cloud.google.com/sensitive-data-protection/limits: 0.5 MB and 50,000 values a request. It ends with about 3,000
# findings, and says so; half the request is then asked again.
_REQUEST_BYTES, _REQUEST_CELLS = 480_000, 50_000
_CELL_BYTES = 40  # of JSON around a text
_PIECE, _OVERLAP = 64_000, 1_000  # characters: six bytes each at most, as JSON escapes
# USD for 10^9 bytes of content inspection, from the second of a month to the thousandth; then 2.00.
# cloud.google.com/sensitive-data-protection/pricing, as published in 2024.
USD_PER_GB: Final = 3.00
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_ATTEMPTS, _REST, _LONGEST_REST = 8, 1.0, 60.0  # seconds
_LOOK = 0.5  # seconds between two looks for signals
_BUSY = (408, 429, 500, 502, 503, 504)


class _Piece(NamedTuple):
    """A part of a text. `place`: of the text among all; `start`: of the part in the text, in characters."""

    place: int
    start: int
    text: str


class CloudDlp:
    """The service, asked in turn. Raises ValueError: no credentials."""

    def __init__(self, settings: CloudDlpConfig) -> None:
        self._url = f"{settings.url}/v2/projects/{settings.project}/locations/{settings.location}/content:inspect"
        kinds = [{"name": name} for name in settings.info_types]
        self._how = {"infoTypes": kinds, "minLikelihood": settings.min_likelihood}
        headers = {"Content-Type": "application/json", "x-goog-user-project": str(settings.project)}
        self._client = httpx2.Client(timeout=60.0, headers=headers)
        self._authorise = _token(settings.token_variable) if settings.token_variable else _credentials()

    def inspect(self, texts: Sequence[str]) -> list[list[Span]]:
        """Finds personal data. Returns the spans in each text, which may overlap.

        Raises ValueError: the service refuses, or gives no answer in several attempts. Stopped: a signal came.
        """
        found: list[list[Span]] = [[] for _ in texts]
        for pieces in _requests(texts):
            self._inspect(pieces, found)
        return found

    def _inspect(self, pieces: list[_Piece], found: list[list[Span]]) -> None:
        findings, truncated = self._ask([piece.text for piece in pieces])
        if truncated:
            for half in _halves(pieces):
                self._inspect(half, found)
            return
        for row, start, end, kind in findings:
            piece = pieces[row]
            found[piece.place].append((piece.start + start, piece.start + end, kind))

    def _ask(self, texts: list[str]) -> tuple[list[tuple[int, int, int, str]], bool]:
        rows = [{"values": [{"stringValue": text}]} for text in texts]
        body = {"item": {"table": {"headers": [{"name": "text"}], "rows": rows}}, "inspectConfig": self._how}
        content, reason = json.dumps(body, ensure_ascii=False).encode(), ""
        for attempt in range(_ATTEMPTS):
            headers, after = dict[str, str](), "0"
            self._authorise(headers)
            try:
                answer = self._client.post(self._url, content=content, headers=headers)
                if answer.status_code == 200:
                    return _read(answer.content, texts)
            except httpx2.HTTPError as error:
                reason = f"got no answer ({error!r})"
            except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
                reason = f"got an answer without findings in the texts ({error!r})"
            else:
                reason = f"status {answer.status_code}: {' '.join(answer.text.split())[:300]}"
                if answer.status_code not in _BUSY:
                    raise ValueError(f"prepare.cloud_dlp: {self._url}: {reason}")
                after = answer.headers.get("Retry-After", "0")
            if attempt < _ATTEMPTS - 1:
                _pause(max(float(after) if after.isdigit() else 0.0, min(_REST * 2**attempt, _LONGEST_REST)))
        raise ValueError(f"prepare.cloud_dlp: {self._url}: {_ATTEMPTS} attempts: {reason}; run it again")


def remembered(inspect: Inspect, path: disk.Path) -> Inspect:
    """Wraps `inspect` so that an interrupted run pays for no text again: a log holds digests, findings, and no text."""
    known: dict[str, list[Span]] = {digest: [(*span,) for span in spans] for digest, spans in disk.read_log(path)}

    def inspected(texts: Sequence[str]) -> list[list[Span]]:
        digests = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
        new = {digest: text for digest, text in zip(digests, texts, strict=True) if digest not in known}
        if new:
            found = dict(zip(new, inspect(list(new.values())), strict=True))
            with disk.Log(path) as log:
                for item in found.items():
                    log.append(item)
            known.update(found)
        return [known[digest] for digest in digests]

    return inspected


def cost(count: int) -> str:
    return f"{count / 1e6:,.1f} MB, {count / 1e9 * USD_PER_GB:,.2f} USD at {USD_PER_GB:.2f} USD a GB"


def foretold(section: PrepareConfig) -> str:
    """Says, before anything is sent, what it costs at most; a thousand prompts of 1 KB where no file tells."""
    files = [s for s in section.sources if isinstance(s, sources.FileSource) and not s.path.endswith(".gz")]
    others = ", ".join(sources.label(source) for source in section.sources if source not in files)
    known = cost(sum(disk.size(disk.path_of(source.path)) for source in files))
    estimate = f"Cloud DLP inspects at most {known} (the first GB of a month is free)"
    return estimate + (f"; and for each thousand prompts of 1 KB of {others} {cost(1_000_000)}" if others else "")


def _requests(texts: Sequence[str]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    size = 0
    for place, text in enumerate(texts):
        for start in range(0, max(len(text) - _OVERLAP, 1), _PIECE - _OVERLAP):
            piece = _Piece(place, start, text[start : start + _PIECE])
            own = len(json.dumps(piece.text, ensure_ascii=False).encode()) + _CELL_BYTES
            if batch and (size + own > _REQUEST_BYTES or len(batch) == _REQUEST_CELLS):
                yield batch
                batch, size = [], 0
            batch.append(piece)
            size += own
    if batch:
        yield batch


def _halves(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    if len(pieces) > 1:
        yield from (pieces[: len(pieces) // 2], pieces[len(pieces) // 2 :])
        return
    (piece,) = pieces
    middle, overlap = len(piece.text) // 2, min(_OVERLAP, len(piece.text) // 4)
    if not overlap:
        raise ValueError(f"prepare.cloud_dlp: got too many findings in {len(piece.text)} characters, expected fewer")
    yield [piece._replace(text=piece.text[: middle + overlap])]
    yield [piece._replace(start=piece.start + middle, text=piece.text[middle:])]


def _read(content: bytes, texts: Sequence[str]) -> tuple[list[tuple[int, int, int, str]], bool]:
    """Reads an answer, in which numbers are texts, and zeros are missing."""
    result = json.loads(content).get("result", {})
    findings = []
    for finding in result.get("findings", []):
        location = finding["location"]
        (where,) = location["contentLocations"]
        row = int(where["recordLocation"].get("tableLocation", {}).get("rowIndex", 0))
        start, end = (int(location["codepointRange"].get(name, 0)) for name in ("start", "end"))
        if not 0 <= start < end <= len(texts[row]):
            raise ValueError(f"characters {start} to {end} of {len(texts[row])}")
        findings.append((row, start, end, str(finding["infoType"]["name"])))
    return findings, bool(result.get("findingsTruncated"))


def _credentials() -> Callable[[dict[str, str]], None]:
    """Returns what adds the user's own credentials, by EAGLE3_JAX_CREDENTIALS; they are renewed when they expire."""
    try:
        from google.auth import credentials, exceptions
        from google.auth.transport import requests
    except ImportError as error:
        expected = "prepare.cloud_dlp.token_variable, or the extra `gcs`: pip install 'eagle3-jax[gcs]'"
        raise ValueError(f"prepare.cloud_dlp: got no google-auth, expected {expected}") from error
    found: Any = credentials.with_scopes_if_required(clients.credentials(), [_SCOPE])
    request = requests.Request()

    def add(headers: dict[str, str]) -> None:
        try:
            if not found.valid:
                found.refresh(request)
        except exceptions.GoogleAuthError as error:
            raise ValueError(f"prepare.cloud_dlp: credentials: {clients.reason(error)}") from error
        found.apply(headers)

    return add


def _token(variable: str) -> Callable[[dict[str, str]], None]:
    if not (token := os.environ.get(variable, "").strip()):
        got = f"got no {variable} in the environment"
        raise ValueError(f"prepare.cloud_dlp.token_variable: {got}, expected a token in it")
    return lambda headers: headers.update(Authorization=f"Bearer {token}")


def _pause(seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        command.stop_point()
        time.sleep(min(left, _LOOK))
