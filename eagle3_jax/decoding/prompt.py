"""Encodes prompts: a string, messages or token ids -> token ids."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from eagle3_jax.config.checks import require
from eagle3_jax.models import chat_template

_ROLES = ("system", "developer", "user", "assistant", "tool")

Prompt = str | Sequence[dict[str, Any]] | Sequence[int]


def encode(
    tokenizer: Any,
    prompt: Any,
    name: str = "prompt",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """Encodes a prompt, by its name in errors; see `Engine.encode`.

    A string (one user turn) and messages go through the chat template, with the answer's opening behind them, exactly
    as in training and measuring. Token ids stay as they are.

    Raises ValueError: no `Prompt`, messages without text or of an unknown role, messages that the template refuses, or
    arguments of `apply_chat_template` among its variables.
    """
    variables = dict(chat_template_kwargs or {})
    if variables:
        reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
        if wrong := sorted(reserved & set(variables)):
            raise ValueError(f"chat_template_kwargs: got {wrong[0]!r}, expected variables of the chat template")
    if isinstance(prompt, str):
        _check_text(prompt, name)
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, Mapping | bytes) or not hasattr(prompt, "__len__") or getattr(prompt, "shape", None) == ():
        raise ValueError(f"{name}: got {type(prompt).__name__}, expected a string, messages or token ids")
    if isinstance(prompt, list) and set(map(type, prompt)) <= {int}:  # ten times as fast for a long prompt
        return list(prompt)
    if not any(isinstance(item, dict) for item in prompt):
        return [_token_id(item, name, index) for index, item in enumerate(prompt)]
    turns = []
    for index, message in enumerate(prompt):
        if not isinstance(message, dict):
            raise ValueError(f"{name}[{index}]: got {message!r} among messages, expected a message")
        calls = message.get("tool_calls")
        listed = calls is None or (isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls))
        require(listed, f"{name}[{index}].tool_calls", calls, "a list of calls")
        if calls and message.get("content") is None:  # as OpenAI writes a call without words
            message = message | {"content": ""}
        for field in ("role", "content"):
            require(isinstance(message.get(field), str), f"{name}[{index}].{field}", message.get(field), "text")
        role = message["role"]
        require(role in _ROLES, f"{name}[{index}].role", role, f"one of {', '.join(_ROLES)}")
        _check_text(message["content"], f"{name}[{index}].content")
        turns.append(message)
    try:
        return chat_template.prompt_ids(tokenizer, turns, tools, variables)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _check_text(text: str, name: str) -> None:
    """Checks a text. Raises ValueError: half a surrogate pair, which no tokenizer turns into bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = f"{text[error.start]!r} at character {error.start}"
        raise ValueError(f"{name}: got {got}, half a surrogate pair, expected text") from error


def _token_id(item: Any, name: str, index: int) -> int:
    try:
        if not isinstance(item, bool):
            return operator.index(item)  # takes numpy's integers, no floats, no strings, no rows of an array
    except TypeError:
        pass
    raise ValueError(f"{name}[{index}]: got {item!r}, expected a token id or a message")
