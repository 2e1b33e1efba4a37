"""Request bodies of OpenAI's API, parsed into prompts and `SamplingParams`, or refused by field.

Fields beyond OpenAI's have the names of vLLM and SGLang. Unknown fields are ignored, as in both. Known fields that
would change the answer but are not supported are refused.
"""

from __future__ import annotations

import abc
import re
import reprlib
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic
from pydantic import Field, PlainValidator

from eagle3_jax.decoding.params import MAX_BIASED, MAX_LOGPROBS, MAX_STOP_IDS, SamplingParams
from eagle3_jax.decoding.pool import EnginePool
from eagle3_jax.decoding.prompt import Prompt
from eagle3_jax.serve.bodies import ApiError

MAX_STOPS, MAX_STOP_LENGTH = 16, 256  # strings, characters: every token is searched for all stop strings

_FLAGS = ("ignore_eos", "skip_special_tokens")
_Body = TypeVar("_Body", bound=pydantic.BaseModel)
_TokenId, _Bias = Annotated[int, Field(strict=False)], Annotated[float, Field(ge=-100, le=100)]

_TEXT_ONLY = "this server reads and writes text only"
# Reason to refuse fields -> each with its values that have no effect.
_REASONS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "answers here are free text": {"response_format": ({"type": "text"},)}
    | dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), ())
    | dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), ()),
    "this server does not support it": {"reasoning_effort": ("medium",), "verbosity": ("medium",)}
    | dict.fromkeys(("web_search_options", "use_beam_search", "truncate_prompt_tokens", "lora_path"), ())
    | {"return_hidden_states": ()},
    "this server calls no tools": {"tool_choice": ("none", "auto")},
    "this server calls no functions": {"functions": ([],), "function_call": ("none", "auto")},
    _TEXT_ONLY: {"modalities": (["text"],), "audio": ()},
    "a completion's prompt goes through no template": {"tools": ([],), "chat_template_kwargs": ({},)},  # a chat's does
    "the target's own template writes them": {"add_special_tokens": ()},  # a completion has the field
    "the target's own template is used": {"chat_template": (), "documents": ([],)},
    "an answer is the assistant's next turn": {"add_generation_prompt": (True,), "continue_final_message": ()},
    "request n answers and choose among them": {"best_of": (1,)},
    "it belongs to beam search": {"length_penalty": (1,)},
    "the answer does not repeat the prompt": {"echo": ()},
    "the model only continues the prompt": {"suffix": ("",)},
    "log-probabilities are those of the answer's tokens": {"prompt_logprobs": ()},
    "a prompt is text or token ids": {"prompt_embeds": ([],)},
    "use logit_bias": {"custom_logit_processor": (), "allowed_token_ids": (), "bad_words": ([],)},
    "use stop": {"stop_regex": ("", [])},
    "the text ends before the stop string": {"include_stop_str_in_output": (), "no_stop_trim": ()},
    "special tokens stand beside each other": {"spaces_between_special_tokens": (True,)},
}
_REFUSED = {field: (harmless, why) for why, fields in _REASONS.items() for field, harmless in fields.items()}


class _Wrong(ValueError):
    """A validator's refusal of a nested field."""

    def __init__(self, place: str, got: Any, expected: str) -> None:
        super().__init__(f"{place}: got {got}, expected {expected}")
        self.place, self.got, self.expected = place.split("."), _short(got), expected


def _text(value: Any) -> str:
    """Reads a message's content: a string, or the parts that newer clients send."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        for place, part in enumerate(value):
            kind = part.get("type") if isinstance(part, dict) else part
            if kind != "text":
                raise _Wrong(f"{place}.type", kind, f"'text': {_TEXT_ONLY}")
            if not isinstance(part.get("text"), str):
                raise _Wrong(f"{place}.text", part.get("text"), "a string")
        return "\n".join(part["text"] for part in value)
    raise ValueError("a string, or a list of parts of type 'text'")


def _prompts(value: Any) -> list[Any]:
    """Reads prompts, each a string or token ids."""
    is_id = lambda item: type(item) is int  # noqa: E731
    several = value if isinstance(value, list) and not all(map(is_id, value)) else [value]
    for prompt in several:
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and prompt and all(map(is_id, prompt))):
            raise ValueError("a string, a list of token ids, or a list of either, none of them empty")
    return several


def _stops(value: Any) -> tuple[str, ...]:
    several = [value] if isinstance(value, str) else value
    fits = isinstance(several, list) and len(several) <= MAX_STOPS
    if not fits or not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_LENGTH for stop in several):
        raise ValueError(f"a string or up to {MAX_STOPS} of them, each of 1 to {MAX_STOP_LENGTH} characters")
    return tuple(several)


def _calls(value: Any) -> list[dict[str, Any]] | None:
    """Reads the calls of an earlier turn, which the template renders."""
    if value is None:
        return None
    if not isinstance(value, list):
        raise ValueError("a list of calls")
    for place, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _Wrong(f"{place}.function", function, "a function's name and arguments")
        if not isinstance(function.get("arguments", ""), str | dict):
            raise _Wrong(f"{place}.function.arguments", function["arguments"], "a text of JSON, or an object")
    return value


class Message(pydantic.BaseModel):
    """A turn of a conversation."""

    model_config = pydantic.ConfigDict(strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, PlainValidator(lambda value: None if value is None else _text(value))] = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]] | None, PlainValidator(_calls)] = None
    tool_call_id: str | None = None
    function_call: None = None  # the older form of a call, which templates do not render

    @pydantic.model_validator(mode="after")
    def _speaks(self) -> Message:
        """Only a turn with calls may have no content."""
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise _Wrong("content", None, "a string, or a list of parts")
        return self


class StreamOptions(pydantic.BaseModel):
    """Options of a streamed answer."""

    model_config = pydantic.ConfigDict(strict=True)
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # with `include_usage`, every event has the usage so far (vLLM's option)
    include_drafts: bool | None = None  # choices mark tokens that were drafts, and show the last round's drafts


class RequestBody(pydantic.BaseModel):
    """The common fields of both endpoints. None is a field's default."""

    model_config = pydantic.ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    field: ClassVar[str]  # name of the field with the prompt
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None  # answers to each prompt
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None  # the server's default, else OpenAI's 1.0
    top_p: Annotated[float, Field(ge=1e-6, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[_TokenId, _Bias], Field(max_length=MAX_BIASED)] | None = None
    seed: int | None = None  # drawn by default, and for -1 (as in vLLM); equal seeds give equal answers
    stop: Annotated[tuple[str, ...], PlainValidator(_stops)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    drafts: bool | None = None  # false decodes without drafts, for comparison (`Engine.submit`)
    adapt: bool | None = None  # false lets no head learn from the request (`serve.adapt`)
    return_token_ids: bool | None = None  # of the prompts and the answers, where vLLM has them

    @abc.abstractmethod
    def encode(self, pool: EnginePool, prompt: Prompt) -> list[int]:
        """Encodes one prompt. Raises ValueError: the chat template refuses it, or a token id is invalid."""

    @property
    @abc.abstractmethod
    def prompts(self) -> list[Prompt]:
        """The prompts, which are answered independently."""

    @property
    @abc.abstractmethod
    def requested_logprobs(self) -> int | None:
        """Number of best tokens with log-probabilities, beside each token's own; None: no log-probabilities."""

    @property
    def answers(self) -> int:
        """Number of answers to each prompt."""
        return self.n or 1

    @property
    def options(self) -> StreamOptions:
        """Options of the stream."""
        return self.stream_options or StreamOptions()

    def params(self, longest: int, defaults: Mapping[str, Any]) -> SamplingParams:
        """Makes the sampling parameters of each answer. Raises ApiError: the engine refuses one.

        `longest` is the default of `max_tokens`. `defaults` are of fields that the body leaves out; their `max_tokens`
        limits every answer, as in vLLM.
        """
        fields = ("min_tokens", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        given = {field: getattr(self, field) for field in (*fields, "logit_bias", "stop", *_FLAGS)}
        given |= {
            "temperature": self.temperature,
            "max_tokens": min(self.max_tokens or longest, defaults.get("max_tokens", longest)),
            "top_k": 0 if self.top_k == -1 else self.top_k,  # other servers take both for "off"
            "seed": secrets.randbits(32) if self.seed in (None, -1) else self.seed,
            "stop_token_ids": None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            "logprobs": self.requested_logprobs,
        }
        whole: dict[str, Any] = {"temperature": 1.0, **defaults}
        try:
            return SamplingParams(**whole | {field: value for field, value in given.items() if value is not None})
        except ValueError as error:
            raise refusal(error) from error


class Chat(RequestBody):
    """The body of /v1/chat/completions. The template renders `tools`; a call stays in the text."""

    field: ClassVar[str] = "messages"
    messages: Annotated[list[Message], Field(min_length=1), pydantic.FailFast()]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def prompts(self) -> list[Prompt]:
        return [[message.model_dump(exclude_none=True) for message in self.messages]]

    def encode(self, pool: EnginePool, prompt: Prompt) -> list[int]:
        return pool.encode(prompt, self.chat_template_kwargs, self.tools)

    @property
    def requested_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @pydantic.model_validator(mode="after")
    def _fit(self) -> Chat:
        if self.max_completion_tokens is not None:  # the newer name of `max_tokens`
            self.max_tokens = self.max_completion_tokens
        if self.top_logprobs and not self.logprobs:
            raise _Wrong("top_logprobs", self.top_logprobs, "logprobs to be true with it")
        if self.tools and self.tool_choice != "none":
            raise _Wrong("tools", self.tools, 'tool_choice "none" with them: this server reads no calls out of a text')
        return self


class Completion(RequestBody):
    """The body of /v1/completions; `add_special_tokens` lets the tokenizer add its own to a text (the default)."""

    field: ClassVar[str] = "prompt"
    prompt: Annotated[list[Any], PlainValidator(_prompts)]
    add_special_tokens: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def prompts(self) -> list[Prompt]:
        return self.prompt

    def encode(self, pool: EnginePool, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):  # no template: the model continues the text
            return pool.tokenizer(prompt, add_special_tokens=self.add_special_tokens is not False)["input_ids"]
        return pool.encode(prompt)

    @property
    def requested_logprobs(self) -> int | None:
        return self.logprobs

    @pydantic.model_validator(mode="after")
    def _fit(self) -> Completion:
        if self.max_tokens is None:
            self.max_tokens = 16  # OpenAI's default for this endpoint
        return self


class Tokens(pydantic.BaseModel):
    """The body of /detokenize, in vLLM's shape."""

    model_config = pydantic.ConfigDict(strict=True)
    model: str | None = None
    tokens: list[int]


def read(kind: type[RequestBody], body: bytes) -> RequestBody:
    """Parses a body. Raises ApiError, with the field in `param`."""
    parsed = parse(kind, body)
    for field, value in (parsed.model_extra or {}).items():
        if field in _REFUSED:
            harmless, why = _REFUSED[field]
            ignored = (None, *harmless) if True in harmless else (None, False, *harmless)
            if value not in ignored:
                raise _refused(field, _short(value), f"nothing: {why}")
    if parsed.stream_options is not None and not parsed.stream:
        got = _short(parsed.stream_options.model_dump())
        raise _refused("stream_options", got, "stream to be true with it")
    return parsed


def read_text(body: bytes) -> RequestBody:
    """Parses the body of /tokenize: a chat's if it has messages, else a completion's. Raises ApiError."""
    return read(Chat if re.search(rb'"messages"\s*:', body) else Completion, body)


def parse(kind: type[_Body], body: bytes) -> _Body:
    """Parses JSON. Raises ApiError, with the field in `param`."""
    try:
        return kind.model_validate_json(body)
    except pydantic.ValidationError as error:
        raise _first(error.errors(include_url=False)[0]) from error


def refusal(error: ValueError, prompt: str = "prompt") -> ApiError:
    """Converts an engine's error, "field: got X, expected Y"; `prompt` is the prompt's field in the API."""
    message = re.sub(r"^prompt\b", prompt, str(error))
    named = re.match(r"([\w.\[\]]+):", message)
    return ApiError(400, message, param=named[1] if named else None, code="invalid_value")


def _first(item: Any) -> ApiError:
    """Converts pydantic's first error in a body."""
    place, got = [str(part) for part in item["loc"]], _short(item["input"])
    if item["type"] == "json_invalid":
        return _refused("body", "something else", f"JSON: {item['ctx']['error']}")
    if item["type"] == "missing":
        return _refused(".".join(place), "nothing", "a value")
    expected = item["msg"].removeprefix("Input should be ")
    if item["type"] == "value_error":
        expected, error = str(item["ctx"]["error"]), item["ctx"]["error"]
        if isinstance(error, _Wrong):
            place, got, expected = place + error.place, error.got, error.expected
    if place[-1:] == ["[key]"]:
        expected = "token ids: " + expected
    return _refused(".".join(place) or "body", got, expected)


def _refused(field: str, got: str, expected: str) -> ApiError:
    return ApiError(400, f"{field}: got {got}, expected {expected}", param=field, code="invalid_value")


def _short(value: Any) -> str:
    text = reprlib.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
