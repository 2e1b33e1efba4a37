"""Request bodies of OpenAI's API, parsed into prompts and `SamplingParams`, or refused by field.

Fields beyond OpenAI's have the names of vLLM and SGLang. Unknown fields are ignored, as in both. Known fields that
would change the answer but are not supported are refused.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import re
import reprlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic
from pydantic import Field, PlainValidator

from eagle3_jax.decoding.params import MAX_BIASED, MAX_LOGPROBS, MAX_STOP_IDS, SamplingParams
from eagle3_jax.decoding.pool import EnginePool
from eagle3_jax.decoding.prompt import Prompt
from eagle3_jax.decoding.structured.params import StructuredOutputsParams
from eagle3_jax.decoding.text import answer_opening
from eagle3_jax.models.chat_template import THOUGHT_END
from eagle3_jax.serve import bodies
from eagle3_jax.serve.bodies import ApiError
from eagle3_jax.serve.tools import FORMS, Form, Reader, written

MAX_STOPS, MAX_STOP_LENGTH = 16, 256  # strings, characters: every token is searched for all stop strings

_FLAGS = ("ignore_eos", "skip_special_tokens")
_Body = TypeVar("_Body", bound=pydantic.BaseModel)
_TokenId, _Bias = Annotated[int, Field(strict=False)], Annotated[float, Field(ge=-100, le=100)]

_TEXT_ONLY = "this server reads and writes text only"
# Reason to refuse fields -> each with its values that have no effect.
_REASONS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "use response_format": {"structural_tag": ()},
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
# Fields of a whole shape, vLLM's older ones and SGLang's -> the kind of shape in `StructuredOutputsParams`.
_SHAPES = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
_SHAPES |= {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
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


def _tools(value: Any) -> list[dict[str, Any]] | None:
    """Reads the definitions of functions, which the template renders."""
    if value is not None and not isinstance(value, list):
        raise ValueError("a list of tools")
    for place, tool in enumerate(value or ()):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _Wrong(f"{place}", tool, "a tool of type 'function', with the function's name")
        if not isinstance(parameters := function.get("parameters"), dict | None):
            raise _Wrong(f"{place}.function.parameters", parameters, "a JSON schema")
    return value


def _choice(value: Any) -> str | dict[str, Any] | None:
    """Reads which tools have to be called."""
    if value in (None, "none", "auto", "required"):
        return value
    named = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(named, dict) or not isinstance(named.get("name"), str):
        raise ValueError("'none', 'auto', 'required', or a function by name")
    return named


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


class JsonSchema(pydantic.BaseModel):
    """A shape by its schema; answers keep to it whether it is `strict` or not."""

    model_config = pydantic.ConfigDict(strict=True)
    name: str | None = None
    of: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(pydantic.BaseModel):
    """The shape of an answer, in OpenAI's form."""

    model_config = pydantic.ConfigDict(strict=True)
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @pydantic.model_validator(mode="after")
    def _fits(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise _Wrong("json_schema", None, "an object with the schema")
        return self


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
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
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
            if self.shape is not None:
                _, kind, value = self.shape
                given["structured"] = StructuredOutputsParams(**{kind: value})
            return SamplingParams(**whole | {field: value for field, value in given.items() if value is not None})
        except ValueError as error:
            raise refusal(error, self.places) from error

    def opening(self, tokenizer: Any, prompt: Sequence[int]) -> str | None:
        """Returns the text behind which the answer to an encoded prompt begins, see `answer_opening`."""
        return None

    def for_model(self, params: SamplingParams, form: Form | None, opening: str | None) -> SamplingParams:
        """Adds to `params` what depends on the model's form of calls and on the answer's `opening`.

        Raises ValueError: the tools' calls have no form, or a schema no regex.
        """
        return params

    @abc.abstractmethod
    def choices(self, tokens: bodies.Tokens, form: Form | None, opening: str | None) -> bodies.Shape:
        """Makes the writer of the answers' choices; arguments as `for_model`."""

    @property
    def shape(self) -> tuple[str, str, Any] | None:
        """The shape that the body asks for: its field, kind and value. Raises ApiError: several, or another kind."""
        extra, asked = self.model_extra or {}, self.response_format
        found = [(field, kind, extra[field]) for field, kind in _SHAPES.items() if extra.get(field) is not None]
        for kind, value in (self.structured_outputs or {}).items():
            if value is not None and value is not False:
                found.append((f"structured_outputs.{kind}", kind, value))
        if asked is not None and asked.json_schema is not None and asked.type == "json_schema":
            found.append(("response_format.json_schema.schema", "json", asked.json_schema.of))
        elif asked is not None and asked.type == "json_object":
            found.append(("response_format", "json_object", True))
        for field, kind, value in found:
            if kind not in _KINDS:
                raise _refused(field, _short(value), f"one of {', '.join(_KINDS)}")
            if field != found[0][0]:
                raise _refused(field, _short(value), f"no second shape, beside {found[0][0]}")
        return found[0] if found else None

    @property
    def places(self) -> dict[str, str]:
        """Names of the engine's errors -> fields of the body."""
        field, kind = (self.shape or ("", ""))[:2]
        places = {"prompt": self.field, "regex": "tools", "structured": "tool_choice"}
        return places | ({kind: field, "structured": field} if field else {})


class Chat(RequestBody):
    """The body of /v1/chat/completions. The template renders `tools`; calls are read out of the answer."""

    field: ClassVar[str] = "messages"
    messages: Annotated[list[Message], Field(min_length=1), pydantic.FailFast()]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]] | None, PlainValidator(_tools)] = None
    tool_choice: Annotated[str | dict[str, Any] | None, PlainValidator(_choice)] = None
    parallel_tool_calls: bool | None = None
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
        names, choice = list(self.functions), self.tool_choice
        if (choice == "required" and not names) or (isinstance(choice, dict) and choice["name"] not in names):
            raise _Wrong("tool_choice", choice, f"one of the tools, {', '.join(names) or 'none'}")
        return self

    @property
    def functions(self) -> dict[str, Any]:
        """The tools' parameters by name."""
        return {tool["function"]["name"]: tool["function"].get("parameters") for tool in self.tools or ()}

    @property
    def calls(self) -> bool:
        """True if the model may call tools."""
        return bool(self.tools) and self.tool_choice != "none"

    def opening(self, tokenizer: Any, prompt: Sequence[int]) -> str | None:
        return answer_opening(tokenizer, prompt)

    def for_model(self, params: SamplingParams, form: Form | None, opening: str | None) -> SamplingParams:
        structured, choice = params.structured, self.tool_choice
        if self.calls:
            if form is None:
                expected = f"none, or one of {', '.join(FORMS)} for --tool-call-parser: the chat template tells no form"
                raise ValueError(f"tools: got {', '.join(self.functions)}, expected {expected}")
            params = dataclasses.replace(params, skip_special_tokens=False)
            one, free = isinstance(choice, dict), choice in (None, "auto")
            if structured is not None or not free:
                tools = {choice["name"]: self.functions[choice["name"]]} if isinstance(choice, dict) else self.functions
                regex = written(form, tools, parallel=self._parallel and not one)
                if structured is not None and free:  # an answer of this shape, or calls
                    regex = f"(?:{structured.pattern})|(?:{regex})"
                structured = StructuredOutputsParams(regex=regex)
        if structured is not None:
            structured = dataclasses.replace(structured, after=opening)
        return dataclasses.replace(params, structured=structured)

    def choices(self, tokens: bodies.Tokens, form: Form | None, opening: str | None) -> bodies.Shape:
        if not self.calls and self.shape is None:
            return bodies.ChatShape(tokens)
        form, thinks = form if self.calls else None, opening == THOUGHT_END
        read = functools.partial(Reader, form, self.functions, thinks=thinks, parallel=self._parallel)
        return bodies.ChatShape(tokens, read)

    @property
    def _parallel(self) -> bool:
        return self.parallel_tool_calls is not False


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

    def choices(self, tokens: bodies.Tokens, form: Form | None, opening: str | None) -> bodies.Shape:
        return bodies.CompletionShape(tokens)

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


def refusal(error: ValueError, places: Mapping[str, str] | None = None) -> ApiError:
    """Converts an engine's error, "field: got X, expected Y"; `places` has the fields of the API by the engine's."""
    message = re.sub(r"^\w+", lambda found: (places or {}).get(found[0], found[0]), str(error))
    named = re.match(r"([^\s:]+):", message)
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
