"""One OpenAI-compatible server that holds the target: checks that it does, and asks it for one turn.

Token ids come by vLLM's `return_token_ids`, which SGLang and this package's own server know too. vLLM and this package
put the prompt's ids beside the choices, SGLang into each; a server without the field (OpenAI's) gives none.
"""

from __future__ import annotations

import asyncio
import os
import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import httpx2
import pydantic

from eagle3_jax.config import FleetServer, RegenerateConfig
from eagle3_jax.models import chat_template
from eagle3_jax.models.checkpoint.fetch import Target, split_revision
from eagle3_jax.regenerate.dialogue import Answer, Dialogue

# Letters, numbers and code that tokenizers split in different ways.
PROBE = [{"role": "user", "content": "Naïve café, 東京 and Москва: def f(x): return x ** 1234567890  # ≠ 0.1"}]
_PROBE_TOKENS = 8
# Without these, vLLM and SGLang sample as the checkpoint's generation_config.json says.
_UNCHANGED = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_BUSY = (408, 425, 429, 503)  # the server did not begin


class Differs(ValueError):
    """A server that holds another model, template or context than the target's, or shows another key."""


class Trouble(Exception):
    """A server that gives no answer now: maybe it failed at this prompt (`began`), or it says that it is `busy`."""

    def __init__(self, why: str, *, began: bool, busy: bool = False, retry_after: float = 0.0) -> None:
        super().__init__(why)
        self.began, self.busy, self.retry_after = began, busy, retry_after


class Refused(Exception):
    """A prompt that the server refuses, or an answer that cannot be trained on."""


class _Message(pydantic.BaseModel, strict=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _Choice(pydantic.BaseModel, strict=True):
    message: _Message
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Usage(pydantic.BaseModel, strict=True):
    prompt_tokens: int | None = None


class _Body(pydantic.BaseModel, strict=True):
    choices: list[_Choice] = pydantic.Field(min_length=1)
    prompt_token_ids: list[int] | None = None
    usage: _Usage | None = None


class Server:
    """A server, asked through one client. Raises ValueError: the environment has no key."""

    def __init__(
        self, client: httpx2.AsyncClient, settings: FleetServer, target: Target, verb: RegenerateConfig
    ) -> None:
        self.url, self.concurrency = settings.url.rstrip("/"), settings.concurrency
        self._client, self._max_length, self._deadline = client, verb.max_length, verb.deadline
        self._model = settings.model or split_revision(target.identity["name"])[0]
        self._tokenizer, self._shape = target.tokenizer, target.model.config
        self._headers = {}
        if (variable := settings.api_key_variable) is not None:
            if not (key := os.environ.get(variable, "").strip()):
                raise ValueError(f"regenerate.servers: got no {variable} in the environment, expected an API key in it")
            self._headers = {"Authorization": f"Bearer {key}"}
        self._dialect: Mapping[str, Any] = {}  # fields beyond OpenAI's that this server takes

    async def check(self) -> None:
        """Compares the server with the target: model's name, context, ids of a prompt. Raises Differs, Trouble."""
        try:
            await self._check_model()
            await self._probe()
        except Refused as error:
            raise Differs(str(error)) from error

    async def ask(self, dialogue: Dialogue, ids: Sequence[int], **sampling: Any) -> Answer:
        """Has a dialogue's next turn answered, whose history the target renders as `ids`. Raises Trouble, Refused."""
        body = {"messages": dialogue.history(), **sampling, **self._dialect}
        tools = {"tools": tools} if (tools := dialogue.prompt.get("tools")) else {}
        try:
            reply = await self._chat(body | tools)
        except Refused:
            if not tools:
                raise
            # A server that reads no calls out of a text may render tools all the same.
            reply = await self._chat(body | tools | {"tool_choice": "none"})
        if difference := self._other_prompt(reply, ids):
            raise Refused(difference)
        return self._answer(reply, dialogue.prompt["id"], dialogue.turn)

    async def _check_model(self) -> None:
        listed = await self._request("GET", "/models")
        try:
            cards = {card["id"]: card for card in pydantic.TypeAdapter(Any).validate_json(listed)["data"]}
        except (ValueError, TypeError, KeyError) as error:
            raise Trouble(f"/models: got {reprlib.repr(listed)}, expected a list of models", began=False) from error
        if self._model not in cards:
            expected = f"{self._model!r}, or its name there in regenerate.servers.model"
            raise Differs(f"/models: got {', '.join(map(repr, cards)) or 'none'}, expected {expected}")
        longest = cards[self._model].get("max_model_len")
        if isinstance(longest, int) and longest < self._max_length:
            expected = f"at least regenerate.max_length = {self._max_length}"
            raise Differs(f"/models: max_model_len: got {longest}, expected {expected}")

    async def _probe(self) -> None:
        """Learns which fields the server takes, by the one prompt whose ids it must have as the target has them."""
        ids = chat_template.prompt_ids(self._tokenizer, PROBE)
        dialects: list[dict[str, Any]] = [{"return_token_ids": True, **_UNCHANGED}]
        if date := chat_template.dated(self._tokenizer):  # the day's in other servers
            dialects.append({**dialects[0], "chat_template_kwargs": date})
        difference = None
        for dialect in (*dialects, {}):
            if difference is not None and not dialect:
                break  # whose ids differ may have as many
            asked = {"messages": PROBE, "temperature": 0.0, "max_tokens": _PROBE_TOKENS, **dialect}
            try:
                reply = await self._chat(asked)
            except Refused:
                if not dialect:
                    raise
                continue  # OpenAI's API refuses what it does not know
            if (difference := self._other_prompt(reply, ids)) is None:
                self._answer(reply)
                self._dialect = dialect
                return
        raise Differs(difference)

    def _other_prompt(self, reply: _Body, ids: Sequence[int]) -> str | None:
        """Says how the server's prompt differs from the target's, by its ids or else by their number."""
        got = reply.choices[0].prompt_token_ids or reply.prompt_token_ids
        hint = "expected the target's tokenizer and chat template"
        if got is None:
            counted = reply.usage.prompt_tokens if reply.usage else None
            if counted in (None, len(ids)):
                return None
            return f"prompt: got {counted} tokens where the target has {len(ids)}, {hint}"
        if got == list(ids):
            return None
        pairs = enumerate(zip(got, ids, strict=False))
        place = next((place for place, (a, b) in pairs if a != b), min(len(got), len(ids)))
        found, wanted = (reprlib.repr(self._tokenizer.decode(list(x[place : place + 8]))) for x in (got, ids))
        return f"prompt: got {found} at token {place} where the target has {wanted}, {hint}"

    def _answer(self, reply: _Body, name: str = "", turn: int = 0) -> Answer:
        """Checks an answer. Raises Trouble: it is cut. Refused: it cannot be trained on."""
        message, ids, reason = reply.choices[0].message, reply.choices[0].token_ids, reply.choices[0].finish_reason
        text, reasoning = message.content or "", message.reasoning_content or message.reasoning or ""
        if reason == "content_filter":
            raise Refused("answer: the server's filter withheld it")
        if reason not in ("stop", "length", "tool_calls"):
            raise Trouble(f"answer: got the end {reason!r}, expected 'stop', 'length' or 'tool_calls'", began=True)
        if ids is not None:
            self._check_ids(ids, (text, reasoning), ended=reason != "length")
        more = {"reasoning": reasoning, "tool_calls": message.tool_calls or None, "server": self.url}
        return Answer(name, turn, text, ids, reason == "length", **more)

    def _check_ids(self, ids: Sequence[int], texts: Collection[str], *, ended: bool) -> None:
        size, ends = self._shape.vocab_size, self._shape.eos_token_ids
        if not ids:
            raise Refused("answer: got no token ids, expected one or more")
        if not all(0 <= token < size for token in ids):
            raise Refused(f"answer: got token ids up to {max(ids)}, expected less than the target's {size}")
        if ended and ends and ids[-1] not in ends:
            raise Refused(f"answer: got token {ids[-1]} at its end, expected an end of sequence of {list(ends)}")
        # Servers trim the text, and hold back half a character; parsers take marks out of it.
        written = _letters(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
        for text in texts:
            if _letters(text) not in written:
                raise Refused(f"answer: got ids of {reprlib.repr(written)}, expected those of {reprlib.repr(text)}")

    async def _chat(self, body: Mapping[str, Any]) -> _Body:
        content = await self._request("POST", "/chat/completions", {"model": self._model, **body})
        try:
            return _Body.model_validate_json(content)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "body"
            raise Trouble(f"answer: {where}: {first['msg']}: {reprlib.repr(content)}", began=True) from error

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Returns an answer's content. Raises Differs: a wrong key. Refused: a lasting status. Trouble: others."""
        try:
            async with asyncio.timeout(self._deadline):
                answer = await self._client.request(method, self.url + path, json=body, headers=self._headers)
        except TimeoutError as error:
            raise Trouble(f"got no whole answer in {self._deadline:g} s", began=True) from error
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise Trouble(f"got no connection: {error}", began=False) from error
        except httpx2.InvalidURL as error:  # a name that no resolver could be asked for
            raise Differs(f"url: {error}") from error
        except httpx2.HTTPError as error:
            raise Trouble(f"the answer broke off: {error!r}", began=True) from error
        if answer.status_code == 200:
            return answer.content
        why = f"status {answer.status_code}: {reprlib.repr(answer.text)}"
        if answer.status_code in (401, 403):
            raise Differs(f"{why}, expected the key in regenerate.servers.api_key_variable")
        busy, after = answer.status_code in _BUSY, answer.headers.get("Retry-After", "")
        if busy or answer.status_code >= 500:
            raise Trouble(why, began=not busy, busy=busy, retry_after=float(after) if after.isdecimal() else 0.0)
        raise Refused(why)


def _letters(text: str) -> str:
    return "".join(text.split()).replace("\ufffd", "")
