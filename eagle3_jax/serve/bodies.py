"""Response bodies in OpenAI's shapes: whole answers, the events of a stream, and errors."""

from __future__ import annotations

import json
import math
import re
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from starlette.responses import JSONResponse

from eagle3_jax.decoding.request import Logprob, Output, Piece
from eagle3_jax.models.chat_template import special_tokens
from eagle3_jax.serve.tools import Reader


class Tokens:
    """Converts single tokens of a Hugging Face tokenizer to text and bytes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(special_tokens(tokenizer))
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self._bytes = _byte_letters() if decoder is not None and b"ByteLevel" in decoder.__getstate__() else {}

    def show(self, token: int) -> tuple[str, bytes | None]:
        """Returns a token's text and its bytes, possibly part of a character; None for a special token's bytes."""
        written = self._tokenizer.convert_ids_to_tokens(token)
        if written is None:  # rows of the vocabulary without a token
            return f"token_id:{token}", None
        if token in self._special:
            return written, None
        if self._bytes and all(letter in self._bytes for letter in written):
            found = bytes(self._bytes[letter] for letter in written)
        elif fallback := re.fullmatch(r"<0x([0-9A-F]{2})>", written):
            found = bytes.fromhex(fallback[1])
        else:
            found = written.replace("\u2581", " ").encode()
        return found.decode(errors="replace"), found


def shown_drafts(tokens: Tokens, piece: Piece) -> dict[str, Any]:
    """Describes the drafts of a piece, an extension of OpenAI's events.

    A token has its `bytes` (none of a special token) and the `depth` of its draft, 0 for the target's own. The `tree`
    is of the last round's nodes (a parent of -1: the root), None before the first.
    """
    pairs = zip(piece.token_ids, piece.depths, strict=True)
    shown = [{"bytes": list(tokens.show(token)[1] or b""), "depth": depth} for token, depth in pairs]
    if piece.tree is None:
        return {"tokens": shown, "tree": None}
    texts = [tokens.show(token)[0] for token in piece.tree.token_ids]
    return {"tokens": shown, "tree": {"texts": texts, "parents": piece.tree.parents, "accepted": piece.tree.accepted}}


def _byte_letters() -> dict[str, int]:
    """Maps byte-level BPE's letters to bytes: printable bytes are themselves, the others letters 256, 257, ..."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


class ChatShape:
    """The choices of /v1/chat/completions."""

    prefix, object, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"
    prompt_beside = True  # vLLM has the prompt's token ids beside the choices, as all of them answer the same

    def __init__(self, tokens: Tokens, make_reader: Callable[[], Reader] | None = None) -> None:
        """Makes the choices of one response. `make_reader`: of each answer, which has thoughts or calls in its text."""
        self.tokens, self._make_reader = tokens, make_reader
        self._readers: dict[int, Reader] = {}

    def whole(self, index: int, output: Output) -> dict[str, Any]:
        said, reason = self._said(index, output)
        if not said.get("content"):
            said["content"] = None if "tool_calls" in said else ""
        logprobs = self._logprobs(output.logprobs)
        return {"index": index, "message": {"role": "assistant"} | said, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Makes the event before an answer's first token."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, index: int, piece: Piece) -> dict[str, Any]:
        before = self._readers[index].count if index in self._readers else 0
        delta, reason = self._said(index, piece)
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": place} | call for place, call in enumerate(calls, before)]
        logprobs = self._logprobs(piece.logprobs)
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _said(self, index: int, part: Output | Piece) -> tuple[dict[str, Any], str | None]:
        """Returns what a part of an answer adds to the message's fields, nothing empty, and the finish reason."""
        content, thought, calls, reason = part.text, part.reasoning, [], part.finish_reason
        if self._make_reader is not None:
            reader = self._readers.setdefault(index, self._make_reader())
            content, more, calls = reader.add(part.text, last=reason is not None)
            thought += more
            if reader.count and reason == "stop":
                reason = "tool_calls"
        # The reasoning under SGLang's name and newer vLLM's.
        fields = {"content": content, "reasoning_content": thought, "reasoning": thought, "tool_calls": calls}
        return {name: value for name, value in fields.items() if value}, reason

    def _logprobs(self, logprobs: Sequence[Logprob] | None) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        content = [
            self._one(found.token_id, found.logprob) | {"top_logprobs": [self._one(*best) for best in found.top]}
            for found in logprobs
        ]
        return {"content": content, "refusal": None}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text, raw = self.tokens.show(token)
        return {"token": text, "logprob": logprob, "bytes": None if raw is None else list(raw)}


class CompletionShape:
    """The choices of /v1/completions, with reasoning as part of the text.

    Keeps the length of each answer's text so far, since offsets continue over a stream's events.
    """

    prefix, object, chunk = "cmpl", "text_completion", "text_completion"
    prompt_beside = False  # but in each choice, as each may answer another prompt

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self._written: dict[int, int] = {}

    def whole(self, index: int, output: Output) -> dict[str, Any]:
        return self._choice(index, output.reasoning + output.text, output.logprobs, output.finish_reason)

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def part(self, index: int, piece: Piece) -> dict[str, Any]:
        return self._choice(index, piece.reasoning + piece.text, piece.logprobs, piece.finish_reason)

    def _choice(self, index: int, text: str, logprobs: Sequence[Logprob] | None, reason: str | None) -> dict[str, Any]:
        found = self._logprobs(index, logprobs)
        return {"index": index, "text": text, "logprobs": found, "finish_reason": reason}

    def _logprobs(self, index: int, logprobs: Sequence[Logprob] | None) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        tokens, offsets = [], []
        for found in logprobs:
            text, raw = self.tokens.show(found.token_id)
            tokens.append(text)
            offsets.append(self._written.get(index, 0))
            self._written[index] = offsets[-1] + (0 if raw is None else len(text))
        best = [{self.tokens.show(token)[0]: value for token, value in found.top} for found in logprobs]
        values = [found.logprob for found in logprobs]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": best, "text_offset": offsets}


Shape = ChatShape | CompletionShape


class Envelope:
    """The fields around the choices, equal in all events of one response."""

    def __init__(self, shape: Shape, model: str) -> None:
        self.shape = shape
        self._common = {"id": f"{shape.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(
        self, outputs: Sequence[Output], usage: dict[str, Any], prompts: Sequence[list[int]] | None = None
    ) -> dict[str, Any]:
        """Makes a response. With `prompts`, those of the outputs, it has their token ids and the outputs'."""
        choices: list[dict[str, Any]] = [self.shape.whole(index, output) for index, output in enumerate(outputs)]
        body: dict[str, Any] = self._common | {"object": self.shape.object, "choices": choices, "usage": usage}
        if prompts is not None:
            for choice, output, prompt in zip(choices, outputs, prompts, strict=True):
                choice["token_ids"] = output.token_ids
                (body if self.shape.prompt_beside else choice)["prompt_token_ids"] = prompt
        return body

    def event(self, *choices: dict[str, Any], **more: Any) -> bytes:
        """Makes a server-sent event."""
        return sent_event(self._common | {"object": self.shape.chunk, "choices": list(choices)} | more)


def sent_event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A refused or failed request; `body` is its error in OpenAI's shape, `wait` the seconds until a retry helps."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, wait: float | None = None
    ) -> None:
        super().__init__(message)
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        headers = {} if wait is None else {"Retry-After": str(max(1, math.ceil(wait)))}
        self.response = JSONResponse(self.body, status, headers)


def stops() -> ApiError:
    return ApiError(503, "request: aborted, the server stops", code="aborted", wait=1.0)
