"""Every form of prompt becomes the same record; what is broken is set aside with its reason."""

import gzip
import json
from typing import Any

import numpy as np
import pytest
import tensorflow_datasets as tfds

from eagle3_jax.data import filters, personal, sources


def read(tmp_path, *lines: object) -> list:
    path = tmp_path / "prompts.jsonl"
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(raw) + b"\n")
    return list(sources.jsonl(path, category="mine"))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "Hi"}, [("user", "Hi")]),
        (
            {
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": "A"},
                    {"role": "assistant", "content": "dropped"},
                    {"role": "user", "content": [{"type": "text", "text": "B"}]},
                ]
            },
            [("system", "Be brief."), ("user", "A"), ("user", "B")],
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "A"},
                    {"from": "gpt", "value": "dropped"},
                    {"from": "human", "value": "B"},
                    {"from": "gpt", "value": None},
                ]
            },
            [("user", "A"), ("user", "B")],
        ),
        ({"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "A"}]}, [("user", "A")]),
    ],
)
def test_forms(tmp_path, record, expected):
    (prompt,) = read(tmp_path, record)
    assert [(message["role"], message["content"]) for message in prompt["messages"]] == expected
    assert (prompt["category"], prompt["id"], prompt["line"]) == ("mine", "jsonl:prompts.jsonl:1", 1)


def test_own_id_and_category(tmp_path):
    not_a_name = "555-123-4567"
    named = {"id": "HumanEval/0", "category": "code", "prompt": "Hi"}
    first, second = read(tmp_path, named, {"id": 7, "category": not_a_name, "prompt": "Hi"})
    assert (first["id"], first["category"]) == ("HumanEval/0", "code")
    assert (second["id"], second["category"]) == ("7", "mine")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "never clo', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"prompt": "\xff\xfe"}', "not valid UTF-8"),
        (["Hi"], "got list, expected an object"),
        ({"promt": "Hi"}, "no field messages, conversations, prompt, question, text"),
        ({"prompt": 5}, "prompt: got int, expected text"),
        ({"prompt": " \n\u200b"}, "an empty user message"),
        ({"prompt": "\ud800"}, "prompt: half a surrogate pair"),
        ({"messages": "Hi"}, "messages: got str, expected a list"),
        ({"messages": [{"role": "assistant", "content": "Hi"}]}, "no user message"),
        ({"messages": [{"role": "critic", "content": "Hi"}]}, "messages: unknown role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a part that is not text"),
        ({"conversations": [{"from": "human"}]}, "conversations: value: got NoneType, expected text"),
        (
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "system", "content": "Late"}]},
            "a system message after the first message",
        ),
    ],
)
def test_broken_lines_are_set_aside(tmp_path, line, reason):
    before, reject, after = read(tmp_path, {"prompt": "before"}, line, {"prompt": "after"})
    assert isinstance(reject, sources.Reject)
    assert reason in reject.reason
    assert (reject.source, reject.line) == ("jsonl:prompts.jsonl", 2)
    assert len(reject.text) <= 200
    json.dumps(vars(reject), ensure_ascii=False).encode("utf-8")
    assert (before["messages"][0]["content"], after["messages"][0]["content"]) == ("before", "after")


def test_blank_lines_and_byte_order_mark_of_plain_and_packed_files(tmp_path):
    content = b"\n".join([b'\xef\xbb\xbf{"prompt": "A"}', b"", b"  \r", b'{"prompt": "B\xe2\x80\xa8C"}\r'])
    for name, data in (("plain.jsonl", content), ("packed.jsonl.gz", gzip.compress(content))):
        (tmp_path / name).write_bytes(data)
        found = list[Any](sources.jsonl(tmp_path / name))
        assert [(prompt["line"], prompt["messages"][0]["content"]) for prompt in found] == [(1, "A"), (4, "B\u2028C")]


@pytest.mark.parametrize("ending", [".txt", ".txt.gz"])
def test_a_line_of_a_text_file_is_a_prompt(tmp_path, ending):
    """For `prepare` and for measurements alike; JSON in it is text."""
    path, content = tmp_path / f"mine{ending}", 'Why?\n\n{"prompt": "no"}\n  \u00dc?  \n'.encode() + b"\xff\n"
    path.write_bytes(gzip.compress(content) if ending.endswith("gz") else content)
    asked = [[{"role": "user", "content": text}] for text in ("Why?", '{"prompt": "no"}', "\u00dc?")]
    *prompts, broken = list[Any](sources.jsonl(path, "own"))
    assert [prompt["messages"] for prompt in prompts] == asked and broken.reason == "not valid UTF-8"
    assert (prompts[2]["id"], prompts[2]["category"]) == (f"jsonl:mine{ending}:4", "own")
    read, rejected = sources.read_file(path)
    assert [prompt["messages"] for prompt in read] == asked and rejected == 1


@pytest.mark.filterwarnings("ignore:label\\(\\) is deprecated:DeprecationWarning")  # tfds asks protobuf so
def test_tfds(tmp_path):
    features = tfds.features.FeaturesDict({"question": tfds.features.Text(), "number": np.int64})

    class TinyQuestions(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> tfds.core.DatasetInfo:
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager: object) -> dict:
            return {"test": self._generate_examples()}

        def _generate_examples(self):
            yield from enumerate({"question": text, "number": 1} for text in ("One?", "Zwei – ja?", ""))

    TinyQuestions(data_dir=str(tmp_path), file_format="array_record").download_and_prepare()
    tfds.core.add_data_dir(str(tmp_path))
    found = list(sources.tfds("tiny_questions", "question", split="test", category="math"))
    prompts = [record for record in found if isinstance(record, dict)]
    assert {prompt["messages"][0]["content"] for prompt in prompts} == {"One?", "Zwei – ja?"}
    assert {prompt["category"] for prompt in prompts} == {"math"}
    assert [record.reason for record in found if isinstance(record, sources.Reject)] == ["an empty user message"]
    with pytest.raises(ValueError, match=r"field: got 'answer', expected one of \['number', 'question'\]"):
        list(sources.tfds("tiny_questions", "answer", split="test"))


def test_self_written():
    outputs = [(["What is a good name?"], "stop"), (["An endless sto"], "length"), (["Hm"], "stop")]
    outputs.append((["a\ud800bcdefgh"], "stop"))
    first, cut, short, broken = sources.self_written(outputs)
    assert isinstance(first, dict) and (first["category"], first["id"]) == ("self", "self:1")
    assert isinstance(cut, sources.Reject) and cut.reason == "the target did not end its prompt"
    assert isinstance(short, sources.Reject) and short.reason == "shorter than 8 characters"
    assert isinstance(broken, sources.Reject)


def conversations(tmp_path, *lines: object) -> list:
    path = tmp_path / "answered.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return list(sources.conversations(path))


def test_conversations_keep_the_answers(tmp_path):
    """Letter by letter, up to the last one; either field says that it was cut off."""
    plain = {"messages": [{"role": "user", "content": " A\r\n"}, {"role": "assistant", "content": " B\r\n"}]}
    talk = [("system", "Be brief."), ("human", "A"), ("gpt", "B"), ("human", "C"), ("gpt", "D"), ("human", "no more")]
    long = {"conversations": [{"from": role, "value": text} for role, text in talk], "finish_reason": "length"}
    first, second, third = conversations(tmp_path, plain, long, plain | {"truncated": True})
    assert [message["content"] for message in first["messages"]] == ["A", " B\r\n"]
    assert [message["content"] for message in second["messages"]] == [text for _, text in talk[:-1]]
    assert [message["role"] for message in second["messages"]] == ["system", *["user", "assistant"] * 2]
    assert (first["category"], first["id"]) == ("conversations", "conversations:answered.jsonl:1")
    assert [found["truncated"] for found in (first, second, third)] == [False, True, True]


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([("user", "A")], "no assistant message"),
        ([("user", "A"), ("assistant", " ")], "an empty assistant message"),
        ([("assistant", "B"), ("user", "A"), ("assistant", "B")], "an assistant message before the first user message"),
        ([("user", "A"), ("assistant", None)], "messages: content: got NoneType, expected text"),
        ([("user", ""), ("assistant", "B")], "an empty user message"),
        ([("assistant", "B")], "no user message"),
    ],
)
def test_records_without_an_answer_are_set_aside(tmp_path, turns, reason):
    messages = [{"role": role, "content": content} for role, content in turns]
    (reject,) = conversations(tmp_path, {"messages": messages})
    assert isinstance(reject, sources.Reject) and reject.reason == reason


def test_conversations_keep_reasoning_and_tools(tmp_path):
    call = {"type": "function", "function": {"name": "mail", "arguments": '{"to": "bob@example.org"}'}}
    talk = [
        {"role": "user", "content": " Ask Bob "},
        {"role": "assistant", "content": None, "reasoning_content": "bob@example.org it is", "tool_calls": [call]},
        {"role": "tool", "content": " done ", "tool_call_id": "1"},
        {"role": "assistant", "content": "Asked."},
    ]
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": talk}) + "\n")
    (found,) = sources.conversations(path)
    assert isinstance(found, dict)
    kept = found["messages"]
    assert kept == [talk[0] | {"content": "Ask Bob"}, talk[1] | {"content": ""}, *talk[2:]]
    assert filters.asked(kept) == kept[:1]
    redacted, kinds = filters.redact(kept, personal.redact)
    assert kinds == {"EMAIL_ADDRESS": 2} and "bob@" not in json.dumps(redacted)
    (prompt,) = sources.jsonl(path)
    assert isinstance(prompt, dict) and prompt["messages"] == kept[:1]
