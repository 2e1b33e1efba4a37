"""Messages -> text -> prompt ids: the one rendering of a chat template that training, measuring and serving share."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

Messages = Sequence[Mapping[str, Any]]

# Templates that print today's date would make other tokens each day. They take it from one of two names: the text
# itself, or a clock that they ask in a format of their own (gpt-oss: "%Y-%m-%d"). The line break behind the macro is
# removed with it (`trim_blocks`): the template still begins at the beginning of a line.
_DATE = "26 Jul 2024"
_PARTS = {f"%{name}": datetime.datetime(2024, 7, 26).strftime(f"%{name}") for name in "aAbBdHIjmMpSyY"}
_FIXED_CLOCK = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f" | replace('{part}', '{text}')" for part, text in _PARTS.items())
    + " }}{% endmacro %}\n"
)
# Special tokens that templates write by name.
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class RefusedError(ValueError):
    """The chat template refuses the messages: a role, or an order of roles, that it does not know."""


def render(tokenizer: Any, messages: Messages, *, generation_prompt: bool) -> str:
    """The text of a conversation. A "developer" is "system" to templates that know no such role.

    Args:
        tokenizer: a Hugging Face tokenizer; of several templates its default is used.
        generation_prompt: whether the opening of the assistant's next turn follows.

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
    template = _template(tokenizer)
    if not template:
        name = getattr(tokenizer, "name_or_path", "")
        raise ValueError(f"tokenizer {name!r}: got no chat_template, expected one")
    turns = [dict(message) for message in messages]
    if "developer" not in template:  # it may leave out what it does not know (Qwen 3)
        turns = [turn | {"role": "system"} if turn.get("role") == "developer" else turn for turn in turns]
    try:
        return tokenizer.apply_chat_template(
            turns,
            chat_template=_FIXED_CLOCK + template,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            date_string=_DATE,
        )
    except (jinja2.TemplateError, TypeError) as error:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise RefusedError(f"chat template: refuses messages of roles [{roles}]: {error}") from error


def tokenize(tokenizer: Any, text: str) -> list[int]:
    """Token ids of rendered text; the template has written its special tokens already."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def prompt_ids(tokenizer: Any, messages: Messages) -> list[int]:
    """The ids after which the assistant's answer follows (generation prompt included). Raises as `render` does."""
    return tokenize(tokenizer, render(tokenizer, messages, generation_prompt=True))


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Id -> text, also of those that no attribute of the tokenizer names (<|eom_id|> of Llama 3.1)."""
    named = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return named | {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def digest(tokenizer: Any) -> str:
    """sha256 in hex over all that decides how messages are rendered: template, fixed clock and named special tokens."""
    template = _template(tokenizer)
    if template:  # the clock as digests have always named it: heads know their target by them
        template = f"{{% macro strftime_now(format) %}}{_DATE}{{% endmacro %}}\n{template}"
    tokens = {name: str(getattr(tokenizer, name, None)) for name in _NAMED_TOKENS}
    return hashlib.sha256(json.dumps([template, _DATE, tokens], sort_keys=True).encode()).hexdigest()


def _template(tokenizer: Any) -> str | None:
    """What is rendered, of several templates the default one; None where there is none."""
    found = tokenizer.chat_template
    return (found.get("default") if isinstance(found, dict) else found) or None
