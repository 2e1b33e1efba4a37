"""A body of OpenAI's API -> prompts and `SamplingParams`, or an error that names the field.

Fields that the engine has and OpenAI has not are called as vLLM and SGLang call them. Unknown fields are ignored, as
they do; known ones that would change the answer, and are not built, are refused.
"""

from __future__ import annotations

import abc
import re
import reprlib
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field, PlainValidator

from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.prompt import Prompt
from eagle3_jax.decoding.rounds.sampling import MAX_BIASED, MAX_LOGPROBS, MAX_STOP_IDS, SamplingParams
from eagle3_jax.serve.errors import ApiError

MAX_STOPS, MAX_STOP_LENGTH = 16, 256  # strings, characters: each token of an answer is searched for all of them

_NOT_BUILT = "this server does not do that"
_TEXT_ALONE = "this server reads and writes text alone"
# Field -> values that ask for nothing, and why others are refused.
_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "tools": (([],), "this server calls no tools"),
    "tool_choice": (("none", "auto"), "this server calls no tools"),
    "functions": (([],), "this server calls no functions"),
    "function_call": (("none", "auto"), "this server calls no functions"),
    "response_format": (({"type": "text"},), "answers here are free text"),
    "structured_outputs": ((), "answers here are free text"),
    "guided_json": ((), "answers here are free text"),
    "guided_regex": ((), "answers here are free text"),
    "guided_choice": ((), "answers here are free text"),
    "guided_grammar": ((), "answers here are free text"),
    "json_schema": ((), "answers here are free text"),
    "regex": ((), "answers here are free text"),
    "ebnf": ((), "answers here are free text"),
    "structural_tag": ((), "answers here are free text"),
    "reasoning_effort": (("medium",), _NOT_BUILT),
    "verbosity": (("medium",), _NOT_BUILT),
    "modalities": ((["text"],), _TEXT_ALONE),
    "audio": ((), _TEXT_ALONE),
    "web_search_options": ((), _NOT_BUILT),
    "best_of": ((1,), "ask for n answers and choose among them"),
    "use_beam_search": ((), _NOT_BUILT),
    "length_penalty": ((1,), "it is one of beam search"),
    "echo": ((), "the answer does not repeat the prompt"),
    "suffix": (("",), "the model writes on from the prompt alone"),
    "prompt_logprobs": ((), "log-probabilities are those of the answer's tokens"),
    "truncate_prompt_tokens": ((), _NOT_BUILT),
    "prompt_embeds": (([],), "a prompt is text or token ids"),
    "documents": (([],), "the target's own template is used as it is"),
    "lora_path": ((), _NOT_BUILT),
    "custom_logit_processor": ((), "use logit_bias"),
    "return_hidden_states": ((), _NOT_BUILT),
    "allowed_token_ids": ((), "use logit_bias"),
    "bad_words": (([],), "use logit_bias"),
    "chat_template": ((), "the target's own template is used"),
    "chat_template_kwargs": (({},), "the target's own template is used as it is"),
    "add_special_tokens": ((), "the target's own template writes them"),  # of a completion it is built
    "add_generation_prompt": ((True,), "an answer is the assistant's next turn"),
    "continue_final_message": ((), "an answer is the assistant's next turn"),
    "stop_regex": (("", []), "use stop"),
    "include_stop_str_in_output": ((), "the text ends in front of the stop string"),
    "no_stop_trim": ((), "the text ends in front of the stop string"),
    "skip_special_tokens": ((True,), "the text is without special tokens"),
    "spaces_between_special_tokens": ((True,), "the text is without special tokens"),
}


class _Wrong(ValueError):
    """What a validator here refuses in a field deeper down."""

    def __init__(self, place: str, got: Any, expected: str) -> None:
        super().__init__(f"{place}: got {got}, expected {expected}")
        self.place, self.got, self.expected = place.split("."), _short(got), expected


def _text(value: Any) -> str:
    """Of a message: a string, or the parts that newer clients send."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        for place, part in enumerate(value):
            kind = part.get("type") if isinstance(part, dict) else part
            if kind != "text":
                raise _Wrong(f"{place}.type", kind, f"'text': {_TEXT_ALONE}")
            if not isinstance(part.get("text"), str):
                raise _Wrong(f"{place}.text", part.get("text"), "a string")
        return "\n".join(part["text"] for part in value)
    raise ValueError("a string, or a list of parts of type 'text'")


def _prompts(value: Any) -> list[Any]:
    """Strings or token ids, each a prompt."""
    is_id = lambda item: type(item) is int  # noqa: E731
    several = value if isinstance(value, list) and not all(map(is_id, value)) else [value]
    for prompt in several:
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and prompt and all(map(is_id, prompt))):
            raise ValueError("a string, a list of token ids, or a list of either, none of them empty")
    return several


def _stops(value: Any) -> tuple[str, ...]:
    several = [value] if isinstance(value, str) else value
    if (
        not isinstance(several, list)
        or len(several) > MAX_STOPS
        or not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_LENGTH for stop in several)
    ):
        raise ValueError(f"a string or up to {MAX_STOPS} of them, each of 1 to {MAX_STOP_LENGTH} characters")
    return tuple(several)


def _no_call(value: Any) -> None:
    """Of a message: the template would be given the text without it."""
    if value:
        raise ValueError("nothing: this server calls no tools")


class Message(pydantic.BaseModel):
    """A turn of a conversation."""

    model_config = pydantic.ConfigDict(strict=True)
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, PlainValidator(_text)]
    tool_calls: Annotated[None, PlainValidator(_no_call)] = None
    function_call: Annotated[None, PlainValidator(_no_call)] = None


class StreamOptions(pydantic.BaseModel):
    """Of a streamed answer.

    Attributes:
        continuous_usage_stats: with `include_usage`, every event says how many tokens there are by then (vLLM's).
        include_drafts: every choice says which of its tokens were drafts, and what the last round drafted.
    """

    model_config = pydantic.ConfigDict(strict=True)
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_drafts: bool | None = None


Stops = Annotated[tuple[str, ...], PlainValidator(_stops)]
Prompts = Annotated[list[Any], PlainValidator(_prompts)]


class Asked(pydantic.BaseModel):
    """What both ways of asking have in common. None is a field's default.

    Attributes:
        field: that holds the prompt.
        n: answers to each prompt.
        temperature: 1.0 where nothing is said, as OpenAI has it; the engine's own default is greedy.
        seed: drawn where nothing is said, and for -1 (as in vLLM); the same seed gives the same answer.
        drafts: false answers without them, to compare with (`Engine.submit`).
    """

    model_config = pydantic.ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    field: ClassVar[str]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=1e-6, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[int, Field(strict=False)], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_BIASED),
        ]
        | None
    ) = None
    seed: int | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    drafts: bool | None = None

    @property
    @abc.abstractmethod
    def prompts(self) -> list[Prompt]:
        """Each is answered by itself."""

    @abc.abstractmethod
    def encode(self, engine: Engine, prompt: Prompt) -> list[int]:
        """Token ids of one of the prompts. Raises ValueError: the chat template refuses it, a token id is none."""

    @property
    def answers(self) -> int:
        """To each prompt."""
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        """Whether the last event of a stream shall say how many tokens there were."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def counts_on(self) -> bool:
        """Whether the events in front of the last one shall say how many there are by then."""
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def shows_drafts(self) -> bool:
        """Whether the events of a stream shall say which tokens were drafts."""
        return bool(self.stream_options and self.stream_options.include_drafts)

    def params(self, longest: int) -> SamplingParams:
        """Of each answer.

        Args:
            longest: tokens of an answer for which nothing is said; the engine ends it where its context does.

        Raises:
            ApiError: what the engine refuses.
        """
        fields = ("min_tokens", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        given = {field: getattr(self, field) for field in (*fields, "logit_bias", "stop", "ignore_eos")}
        given |= {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "max_tokens": longest if self.max_tokens is None else self.max_tokens,
            "top_k": 0 if self.top_k == -1 else self.top_k,  # both are "off" elsewhere
            "seed": secrets.randbits(32) if self.seed in (None, -1) else self.seed,
            "stop_token_ids": None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            "logprobs": self.asked_logprobs,
        }
        try:
            return SamplingParams(**{field: value for field, value in given.items() if value is not None})
        except ValueError as error:
            raise refusal(error) from error

    @property
    @abc.abstractmethod
    def asked_logprobs(self) -> int | None:
        """How many of the best tokens' log-probabilities each token comes with; None: without its own, too."""


class Chat(Asked):
    """The body of /v1/chat/completions."""

    field: ClassVar[str] = "messages"
    messages: Annotated[list[Message], Field(min_length=1), pydantic.FailFast()]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def prompts(self) -> list[Prompt]:
        return [[{"role": message.role, "content": message.content} for message in self.messages]]

    def encode(self, engine: Engine, prompt: Prompt) -> list[int]:
        return engine.encode(prompt)

    @property
    def asked_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @pydantic.model_validator(mode="after")
    def _fit(self) -> Chat:
        if self.max_completion_tokens is not None:  # the newer name of the same
            self.max_tokens = self.max_completion_tokens
        if self.top_logprobs and not self.logprobs:
            raise _Wrong("top_logprobs", self.top_logprobs, "logprobs to be true with it")
        return self


class Completion(Asked):
    """The body of /v1/completions.

    Attributes:
        add_special_tokens: the tokenizer's own opening in front of a prompt that is text; true where nothing is said.
    """

    field: ClassVar[str] = "prompt"
    prompt: Prompts
    add_special_tokens: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def prompts(self) -> list[Prompt]:
        return self.prompt

    def encode(self, engine: Engine, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):  # no template: the model writes on
            return engine.tokenizer(prompt, add_special_tokens=self.add_special_tokens is not False)["input_ids"]
        return engine.encode(prompt)

    @property
    def asked_logprobs(self) -> int | None:
        return self.logprobs

    @pydantic.model_validator(mode="after")
    def _fit(self) -> Completion:
        if self.max_tokens is None:
            self.max_tokens = 16  # OpenAI's default, of this way alone
        return self


def read(kind: type[Asked], body: bytes) -> Asked:
    """What a body asks for. Raises ApiError, with the field in `param`."""
    try:
        asked = kind.model_validate_json(body)
    except pydantic.ValidationError as error:
        raise _first(error.errors(include_url=False)[0]) from error
    for field, value in (asked.model_extra or {}).items():
        if field in _REFUSED:
            harmless, why = _REFUSED[field]
            nothing = (None, *harmless) if True in harmless else (None, False, *harmless)
            if value not in nothing:
                raise _refused(field, value, f"nothing: {why}")
    if asked.stream_options is not None and not asked.stream:
        raise _refused("stream_options", asked.stream_options.model_dump(), "stream to be true with it")
    return asked


def refusal(error: ValueError, prompt: str = "prompt") -> ApiError:
    """An error of the engine, "field: got X, expected Y", as one of the API.

    Args:
        prompt: what the prompt is called there.
    """
    message = re.sub(r"^prompt\b", prompt, str(error))
    named = re.match(r"([\w.\[\]]+):", message)
    return ApiError(400, message, param=named[1] if named else None, code="invalid_value")


def _first(item: Any) -> ApiError:
    """The first thing that is wrong in a body."""
    place, got = [str(part) for part in item["loc"]], _short(item["input"])
    if item["type"] == "json_invalid":
        return _refused("body", None, f"JSON: {item['ctx']['error']}", got="something else")
    if item["type"] == "missing":
        return _refused(".".join(place), None, "a value", got="nothing")
    expected = item["msg"].removeprefix("Input should be ")
    if item["type"] == "value_error":
        expected, error = str(item["ctx"]["error"]), item["ctx"]["error"]
        if isinstance(error, _Wrong):
            place, got, expected = place + error.place, error.got, error.expected
    if place[-1:] == ["[key]"]:
        expected = "token ids: " + expected
    return _refused(".".join(place) or "body", None, expected, got=got)


def _refused(field: str, value: Any, expected: str, got: str | None = None) -> ApiError:
    shown = _short(value) if got is None else got
    return ApiError(400, f"{field}: got {shown}, expected {expected}", param=field, code="invalid_value")


def _short(value: Any) -> str:
    text = reprlib.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
