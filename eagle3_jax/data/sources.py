"""Reads the sources of prompts, normalised to one record: {"id", "category", "messages"}.

A reader yields a `Prompt` for each usable record and a `Reject` for any other; a broken line never stops a run.
Turns of the assistant and of its tools are dropped, since the target answers the user turns itself (`regenerate`). Only
`conversations` keeps them, with reasoning and tool calls: these are the target's answers from another engine.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NotRequired, TypedDict

from eagle3_jax.config import ConversationsSource, JsonlSource, PackagedSource, SelfSource, Source, TfdsSource
from eagle3_jax.data import filters, lines
from eagle3_jax.models import chat_template
from eagle3_jax.runs import disk, processes

Messages = filters.Messages
_Take = Callable[[Messages], Messages]

# Roles of the OpenAI and the ShareGPT form -> roles of this package.
_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"human": "user"}
_ROLES |= dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant")
# Fields of a turn that `conversations` keeps beside its content.
_KEPT = ("reasoning_content", "tool_calls", "tool_call_id", "name")
# Roles whose turns the target, or a tool that it called, wrote.
_ANSWERING = ("assistant", "tool")
_PLAIN_FIELDS = ("prompt", "question", "text")
_CATEGORY = re.compile(r"[A-Za-z][\w-]{0,39}")
_LICENSE = re.compile(r"[A-Za-z0-9][\w.+ -]{0,59}")
_MIN_CHARS = 8  # of a prompt that the target wrote
UNSTATED = "unstated"  # counts prompts without a licence


class Prompt(TypedDict):
    """A prompt for the target: system and user messages, in order. Those of conversations end with an answer."""

    id: str
    category: str
    line: int  # number in the source
    messages: list[dict[str, Any]]
    license: NotRequired[str]  # of the record or the source's section
    tools: NotRequired[list[dict[str, Any]]]  # functions that the target may call, in OpenAI's form
    truncated: NotRequired[bool]  # whether a conversation's last answer was cut off


@dataclasses.dataclass(frozen=True)
class Reject:
    """An unusable record: its source and line, the reason, and its beginning without personal data."""

    source: str
    line: int
    reason: str
    text: str


Record = Prompt | Reject
FileSource = JsonlSource | ConversationsSource


class BrokenRecord(Exception):
    """A record of no known form; the message is the reason, without the record's content."""


def label(source: Source) -> str:
    """Names a source in counts and among the rejects."""
    if isinstance(source, FileSource):
        return f"{source.kind}:{pathlib.Path(source.path).name}"
    return f"tfds:{source.name}" if isinstance(source, TfdsSource) else source.kind


def read(source: Source, written: Sequence[tuple[list[str], str]] = ()) -> Iterator[Record]:
    """Yields the records of a source, up to its limit of prompts, see `read_part`."""
    prompts, limit = 0, source.count if isinstance(source, SelfSource) else source.limit
    for record in read_part(source, written=written):
        if isinstance(record, dict):
            if prompts == limit:
                return
            prompts += 1
        yield record


def read_part(
    source: Source, part: lines.Part | None = None, written: Sequence[tuple[list[str], str]] = ()
) -> Iterator[Record]:
    """Yields the records of a source, or of a part of its file; those that name no licence get the source's.

    `written`: what the target wrote for a source of kind `self`. Raises ValueError, OSError: an unreadable source.
    """
    license = "apache-2.0" if isinstance(source, PackagedSource) else source.license
    if isinstance(source, FileSource):
        reader = jsonl if isinstance(source, JsonlSource) else conversations
        found = reader(source.path, source.category, part)
    elif isinstance(source, SelfSource):
        found = self_written(written, source.category, source.system)
    elif isinstance(source, TfdsSource):
        found = tfds(source.name, source.field, source.split, source.category)
    else:
        found = packaged()
    for record in found:
        if license is not None and isinstance(record, dict):
            record.setdefault("license", license)
        yield record


def packaged() -> Iterator[Record]:
    """Yields the prompts in this package, categories in turn, so that a limit takes from each."""
    folder = importlib.resources.files("eagle3_jax.data") / "prompts"
    categories = []
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        with entry.open("rb") as stream:
            found = lines.numbered(stream.readline)
            categories.append(list(_records(found, "packaged", entry.name.removesuffix(".jsonl"))))
    for turn in itertools.zip_longest(*categories):
        yield from (prompt for prompt in turn if prompt is not None)


def jsonl(path: str | disk.Path, category: str = "jsonl", part: lines.Part | None = None) -> Iterator[Record]:
    """Reads a JSONL file; each line has one of these forms.

    - OpenAI: {"messages": [{"role": "user", "content": "..."}]}; content may be a list of text parts
    - ShareGPT: {"conversations": [{"from": "human", "value": "..."}]}
    - plain: {"prompt": "..."}, {"question": "..."} or {"text": "..."}

    Each may have "id", "category" (else it is `category`), "license", and "tools" in OpenAI's form. Each line of a .txt
    file is a prompt. A .gz file is decompressed.
    """
    return _records(lines.read(path, part), f"jsonl:{pathlib.Path(path).name}", category)


def conversations(
    path: str | disk.Path, category: str = "conversations", part: lines.Part | None = None
) -> Iterator[Record]:
    """Reads a JSONL file of the target's conversations from another engine, in the forms of `jsonl`.

    Answers stay unchanged, with `reasoning_content` and `tool_calls`, and so do the tools' turns; turns after the last
    answer are dropped. A "finish_reason" of "length", or a true "truncated", marks the last answer as cut off. Records
    without an answer, with an empty one, or with one before the first user turn are rejected.
    """
    source = f"conversations:{pathlib.Path(path).name}"
    return _records(lines.read(path, part), source, category, _up_to_the_last_answer)


def tfds(name: str, field: str, split: str = "train", category: str = "tfds") -> Iterator[Record]:
    """Reads a text feature of a TensorFlow Dataset, without TensorFlow. Raises ValueError: it has no such feature."""
    import tensorflow_datasets  # slow to import, and used by this source only

    source: Any = tensorflow_datasets.data_source(name, split=split)
    for number, example in enumerate(source, start=1):
        if field not in example:
            raise ValueError(f"prepare.sources: tfds {name}: field: got {field!r}, expected one of {sorted(example)}")
        text = example[field]
        text = text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text
        yield _record({"prompt": text}, f"tfds:{name}", number, category)


def self_written(
    outputs: Iterable[tuple[list[str], str]], category: str = "self", system: str | None = None
) -> Iterator[Record]:
    """Makes prompts of the user turns that the target wrote; rejects those whose first has no end or is short."""
    head = [] if system is None else [{"role": "system", "content": system}]
    for number, (turns, finish_reason) in enumerate(outputs, start=1):
        if finish_reason == "stop" and len(turns[0].strip()) >= _MIN_CHARS:
            users = [{"role": "user", "content": turn} for turn in turns]
            yield _record({"messages": head + users}, "self", number, category)
        else:
            short, cut = f"shorter than {_MIN_CHARS} characters", "the target did not end its prompt"
            yield Reject("self", number, short if finish_reason == "stop" else cut, filters.excerpt(turns[0]))


def _records(
    numbered: Iterable[tuple[int, bytes]], source: str, category: str, take: _Take | None = None
) -> Iterator[Record]:
    is_text = re.fullmatch(r"jsonl:.*\.txt(\.gz)?", source)
    for number, raw in numbered:
        reason = "not valid JSON"
        try:
            if len(raw) > lines.LONGEST:
                reason = f"a line of more than {lines.LONGEST >> 20} MiB"
                raise ValueError
            text = raw.decode("utf-8")
            record = {"prompt": text} if is_text else json.loads(text)
        except (ValueError, RecursionError) as error:  # RecursionError: thousands of nested brackets
            reason = "not valid UTF-8" if isinstance(error, UnicodeDecodeError) else reason
            beginning = raw[: lines.LONGEST].decode("utf-8", errors="replace")
            yield Reject(source, number, reason, filters.excerpt(beginning))
        else:
            yield _record(record, source, number, category, take)


def _record(record: Any, source: str, number: int, category: str, take: _Take | None = None) -> Record:
    """Makes a record; `take` selects from a conversation's messages, None keeps prompts without answers."""
    try:
        messages = _messages(record, answered=take is not None)
        messages, tools = messages if take is None else take(messages), _objects(record.get("tools") or [], "tools")
        _text(json.dumps(tools, ensure_ascii=False), "tools")
    except BrokenRecord as error:
        return Reject(source, number, str(error), filters.excerpt(json.dumps(record, ensure_ascii=False, default=str)))
    named, given = record.get("category"), record.get("id")
    prompt: Prompt = {
        "id": str(given) if isinstance(given, str | int) else f"{source}:{number}",
        "category": named if isinstance(named, str) and _CATEGORY.fullmatch(named) else category,
        "line": number,
        "messages": messages,
    }
    if isinstance(license := record.get("license"), str) and _LICENSE.fullmatch(license):
        prompt["license"] = license
    if tools:
        prompt["tools"] = tools
    if take is _up_to_the_last_answer:
        prompt["truncated"] = record.get("truncated") is True or record.get("finish_reason") == "length"
    return prompt


def _messages(record: Any, *, answered: bool) -> Messages:
    _require(isinstance(record, dict), f"got {type(record).__name__}, expected an object")
    if "messages" in record:
        turns = _turns(record["messages"], "messages", "role", "content", answered)
    elif "conversations" in record:
        turns = _turns(record["conversations"], "conversations", "from", "value", answered)
    else:
        field = next((name for name in _PLAIN_FIELDS if name in record), None)
        _require(field is not None, f"no field messages, conversations, {', '.join(_PLAIN_FIELDS)}")
        turns = [{"role": "user", "content": _text(record[field], str(field))}]
    messages = [
        turn if turn["role"] in _ANSWERING else turn | {"content": filters.normalise(turn["content"])} for turn in turns
    ]
    messages = [message for message in messages if message["content"] or message["role"] != "system"]
    _require(all(m["role"] != "system" for m in messages[1:]), "a system message after the first message")
    users = [message["content"] for message in messages if message["role"] == "user"]
    _require(bool(users), "no user message")
    _require(all(users), "an empty user message")
    return messages


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise BrokenRecord(reason)


def _up_to_the_last_answer(messages: Messages) -> Messages:
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    _require(bool(answers), "no assistant message")
    contents = (messages[index]["content"].strip() or messages[index].get("tool_calls") for index in answers)
    _require(all(contents), "an empty assistant message")
    asked = any(message["role"] == "user" for message in messages[: answers[0]])
    _require(asked, "an assistant message before the first user message")
    return messages[: answers[-1] + 1]


def _one_request(messages: Messages) -> Messages:
    """Selects one request for an engine: the messages up to the last user turn before which all others are answered."""
    end = 0
    for index, (message, before) in enumerate(zip(messages, [None, *messages], strict=False)):
        if message["role"] == "user":
            if before is not None and before["role"] == "user":
                break
            end = index + 1
    return messages[:end]


def _turns(turns: Any, name: str, role_field: str, content_field: str, answered: bool) -> Messages:
    _require(isinstance(turns, list), f"{name}: got {type(turns).__name__}, expected a list")
    found = []
    for turn in turns:
        _require(isinstance(turn, dict), f"{name}: got {type(turn).__name__} in the list, expected an object")
        role = turn.get(role_field)
        known = isinstance(role, str) and role in _ROLES
        _require(known, f"{name}: unknown {role_field}, expected one of {', '.join(_ROLES)}")
        if not answered and _ROLES[role] in _ANSWERING:
            continue
        content = turn.get(content_field)
        if content is None and turn.get("tool_calls"):  # OpenAI's form of a turn that only calls
            content = ""
        kept: dict[str, Any] = {"role": _ROLES[role], "content": _text(content, f"{name}: {content_field}")}
        if _ROLES[role] in _ANSWERING:
            for field in filter(turn.get, _KEPT):
                kept[field] = (_objects if field == "tool_calls" else _text)(turn[field], f"{name}: {field}")
        found.append(kept)
    return found


def _objects(value: Any, field: str) -> list[dict[str, Any]]:
    holds = isinstance(value, list) and all(isinstance(item, dict) for item in value)
    _require(holds, f"{field}: got {type(value).__name__}, expected a list of objects")
    return value


def _text(value: Any, field: str) -> str:
    if isinstance(value, list):  # OpenAI content parts
        are_texts = all(isinstance(part, dict) and part.get("type") == "text" for part in value)
        _require(are_texts, f"{field}: a part that is not text")
        value = "\n".join(str(part.get("text", "")) for part in value)
    _require(isinstance(value, str), f"{field}: got {type(value).__name__}, expected text")
    # Half of a \uXXXX pair: no file could hold it.
    _require(not any("\ud800" <= char <= "\udfff" for char in value), f"{field}: half a surrogate pair")
    return value


def read_file(path: str | disk.Path) -> tuple[list[Prompt], int]:
    """Reads the prompts of a file, as `jsonl`, for a measurement. Returns them, and the number of rejected lines.

    A conversation gives one request: its last question after its answers, or the first question if answers are missing.
    Raises ValueError: no file, or no usable prompt in it.
    """
    path = disk.path_of(path)
    if not path.is_file():
        raise ValueError(f"--prompts {path}: not found, expected a JSONL file of prompts, or a .txt file")
    prompts, rejected = [], 0
    for item in _records(lines.read(path), f"jsonl:{path.name}", "all", _one_request):
        if isinstance(item, Reject):
            rejected += 1
            processes.say(f"{path}, line {item.line}: left out: {item.reason}")
        else:
            prompts.append(item)
    if not prompts:
        raise ValueError(f"--prompts {path}: got no usable prompt, {rejected} lines refused")
    return prompts, rejected


def encode(
    prompts: Sequence[Prompt], tokenizer: Any, room: int, name: str
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Adds token ids to prompts, as `prompt`. Returns them, and the numbers dropped as "too_long" and "refused".

    `room`: longest prompt in tokens. Raises ValueError, with the file's `name`: no prompt is left.
    """
    fitting: list[dict[str, Any]] = []
    left_out = {"too_long": 0, "refused": 0}
    for prompt in prompts:
        try:
            ids = chat_template.prompt_ids(tokenizer, prompt["messages"], prompt.get("tools"))
        except chat_template.RefusedError:
            left_out["refused"] += 1
            continue
        if len(ids) <= room:
            fitting.append({**prompt, "prompt": ids})
        else:
            left_out["too_long"] += 1
    if not fitting:
        reasons = f"{left_out['too_long']} are longer, the chat template refuses {left_out['refused']}"
        raise ValueError(f"{name}: got no prompt within {room} tokens: {reasons}")
    return fitting, left_out


def spread(prompts: Sequence[Any], limit: int | None) -> list[Any]:
    """Returns the first `limit` prompts, taken from the categories in turn; None is all of them."""
    by_category: dict[str, list[Any]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt["category"], []).append(prompt)
    turns = itertools.zip_longest(*by_category.values())
    return [prompt for turn in turns for prompt in turn if prompt is not None][:limit]
