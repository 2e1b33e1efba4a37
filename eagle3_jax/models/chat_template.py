"""Renders chat templates, messages -> text -> prompt ids, for training, measuring and serving."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

Messages = Sequence[Mapping[str, Any]]
# Definitions of functions that the target may call, in OpenAI's form: {"type": "function", "function": {...}}.
Tools = Sequence[Mapping[str, Any]]

# A fixed date: templates that print today's date would give other tokens each day. They read it from `date_string`, or
# from a clock, `strftime_now`, in a format of their own (gpt-oss: "%Y-%m-%d"). `trim_blocks` removes the line break
# after the macro, so the template still begins at the start of a line.
_DATE = "26 Jul 2024"
_PARTS = {f"%{name}": datetime.datetime(2024, 7, 26).strftime(f"%{name}") for name in "aAbBdHIjmMpSyY"}
_FIXED_CLOCK = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f" | replace('{part}', '{text}')" for part, text in _PARTS.items())
    + " }}{% endmacro %}\n"
)
# Names of templates, where a tokenizer has several.
_DEFAULT, _TOOL_USE = "default", "tool_use"
# The texts around thoughts inside an answer (DeepSeek R1, QwQ, Qwen 3); gpt-oss has channels.
THOUGHT, THOUGHT_END = "<think>", "</think>"
# Special tokens that templates write by name.
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class RefusedError(ValueError):
    """The chat template refuses the messages: an unknown role, or an unknown order of roles."""


def render(
    tokenizer: Any,
    messages: Messages,
    *,
    generation_prompt: bool,
    tools: Tools | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Renders a conversation as text. The role "developer" becomes "system" for templates without it.

    Arguments of tool calls, text in OpenAI's form, are rendered as the object that they spell, as SGLang and vLLM do.

    Args:
        tokenizer: a Hugging Face tokenizer; of several templates the default one is used, or "tool_use" for tools.
        generation_prompt: append the opening of the assistant's next turn.
        tools: given to the template, which may ignore them.
        variables: variables of the template, such as `enable_thinking` (`chat_template_kwargs` of vLLM and SGLang).

    Raises:
        RefusedError: the template refuses the messages.
        ValueError: no template, or a content that is not text.
    """
    for place, message in enumerate(messages):
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        other = next((part for part in parts if not isinstance(part, dict) or part.get("type") != "text"), None)
        if other is not None:
            kind = other.get("type") if isinstance(other, dict) else other
            raise ValueError(f"messages[{place}].content: got a part {kind!r}, expected 'text': images are not read")
    template = of(tokenizer, tools=bool(tools))
    if not template:
        name = getattr(tokenizer, "name_or_path", "")
        raise ValueError(f"tokenizer {name!r}: got no chat_template, expected one")
    turns = [_with_parsed_arguments(message) for message in messages]
    if "developer" not in template:  # a template may drop unknown roles silently (Qwen 3)
        turns = [turn | {"role": "system"} if turn.get("role") == "developer" else turn for turn in turns]
    try:
        return tokenizer.apply_chat_template(
            turns,
            tools=[dict(tool) for tool in tools] if tools else None,
            chat_template=_FIXED_CLOCK + template,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **{"date_string": _DATE, **(variables or {})},
        )
    except (jinja2.TemplateError, TypeError) as error:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise RefusedError(f"chat template: refuses messages of roles [{roles}]: {error}") from error


def tokenize(tokenizer: Any, text: str) -> list[int]:
    """Tokenises rendered text, which already contains its special tokens."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def prompt_ids(
    tokenizer: Any, messages: Messages, tools: Tools | None = None, variables: Mapping[str, Any] | None = None
) -> list[int]:
    """Returns the ids of a prompt, tools and generation prompt included. Raises as `render` does."""
    text = render(tokenizer, messages, generation_prompt=True, tools=tools, variables=variables)
    return tokenize(tokenizer, text)


def dated(tokenizer: Any) -> dict[str, str]:
    """Returns the variables by which another renderer of the template writes this module's date; empty without one."""
    return {"date_string": _DATE} if "date_string" in (of(tokenizer) or "") else {}


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Maps the id of each special token to its text, unnamed ones included (<|eom_id|> of Llama 3.1)."""
    named = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return named | {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def digest(tokenizer: Any) -> str:
    """Hashes everything that decides the rendering: template, fixed clock and named special tokens; sha256 in hex."""
    template, with_tools = of(tokenizer), of(tokenizer, tools=True)
    others = [] if with_tools == template else [with_tools]
    if template:  # the macro's first form, kept for the digests that stored heads hold
        template = f"{{% macro strftime_now(format) %}}{_DATE}{{% endmacro %}}\n{template}"
    tokens = {name: str(getattr(tokenizer, name, None)) for name in _NAMED_TOKENS}
    return hashlib.sha256(json.dumps([template, _DATE, tokens, *others], sort_keys=True).encode()).hexdigest()


def of(tokenizer: Any, *, tools: bool = False) -> str | None:
    """Returns the template, of several the default one, or the one for tools if there is one; None without any."""
    found = tokenizer.chat_template
    if isinstance(found, dict):
        found = found.get(_TOOL_USE if tools else _DEFAULT, found.get(_DEFAULT))
    return found or None


def _with_parsed_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a message whose tool calls' arguments are objects, where their text spells one."""
    turn = dict(message)
    if turn.get("tool_calls"):
        turn["tool_calls"] = [_parsed(call) for call in turn["tool_calls"]]
    return turn


def _parsed(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else dict(call)
