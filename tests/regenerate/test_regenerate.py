"""Regeneration with an engine that answers by rule: turns, resumption, and what is left out."""

import dataclasses
import itertools
import json
import pathlib
from typing import Any

import pytest
import tiny

from eagle3_jax.config import run_file
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.request import Output, Stats
from eagle3_jax.models import chat_template
from eagle3_jax.regenerate import __main__ as regenerate
from eagle3_jax.runs import manifest

IDENTITY = tiny.identity((0, 1, 3))


def letters(_: Any, messages: list[dict[str, str]], tools: Any = None) -> list[int]:
    """A chat template of one line a message, tools in front, and a tokenizer of one token a letter."""
    text = f"tools: {json.dumps(tools)}\n" if tools else ""
    text += "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant: "
    return [ord(letter) for letter in text]


class FakeEngine(Engine):
    """Says which random seed it was given, and some words of the prompt decide how it ends.

    Args:
        limit: raises KeyboardInterrupt after so many answers.
    """

    def __init__(self, limit: int = 10**9) -> None:
        self.tokenizer, self.batch_size = None, 3
        self.limit = limit
        self.asked: list[str] = []
        self.temperatures: dict[str, set[float]] = {}

    def converse(self, asked: Any, on_output: Any) -> None:
        running = list(itertools.islice(asked, self.batch_size))
        while running:
            name, prompt, params = running.pop()  # whatever is finished first comes first
            if len(self.asked) == self.limit:
                raise KeyboardInterrupt
            text = "".join(chr(token) for token in prompt)
            self.asked.append(text)
            last = text.splitlines()[-2]
            self.temperatures.setdefault(text.splitlines()[0], set()).add(params.temperature)
            text = "" if "silence" in last else f"answer {params.seed}"
            reason = "error" if "break" in last else "length" if "ramble" in last else "stop"
            ids = [*range(4), params.seed]
            thoughts = "Well" if "thinking" in last else ""
            following = on_output(name, Output(ids, text, reason, Stats(5, []), reasoning=thoughts)) or next(
                asked, None
            )
            running += [following] if following else []


def given(name: str, *turns: str, truncated: bool = False) -> dict:
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return {"id": name, "category": "mine", "messages": messages, "truncated": truncated}


def prompt(name: str, *turns: str, system: str | None = None) -> dict:
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": turn} for turn in turns]
    return {"id": name, "category": "chat", "messages": messages}


PROMPTS = [
    prompt("one", "Hi"),
    prompt("two", "First", "Second", system="Be kind."),
    prompt("silent", "silence please"),
    prompt("late silence", "Talk", "silence now"),
    prompt("cut", "ramble on", "never asked"),
    prompt("long", "x" * 500),
    prompt("late long", "Hello", "x" * 500),
]


HELD_OUT = [prompt("held out", "Hi")]


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """Makes a run folder with prompts, and a function that runs the verb there with a fake engine."""

    nobody = tiny.make_target(tiny.llama_config())

    def make(name: str, train=PROMPTS, held_out=HELD_OUT, loaded=[], temperature=0.7, **identity):  # noqa: B006
        values = {"max_length": 500, "temperature": temperature}
        config = run_file.from_dict({"run_dir": str(tmp_path / name), "mesh": {"data": 1}, "regenerate": values})
        prompts = config.folder("prepare")
        manifest.begin(prompts, {"verb": "prepare"} | identity)
        for split, lines in (("train", train), ("held_out", held_out)):
            (prompts / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        manifest.finish(prompts, files=("train.jsonl", "held_out.jsonl"))

        def run(engine: FakeEngine | None, **changes) -> None:
            target = dataclasses.replace(nobody, identity=IDENTITY | changes)
            monkeypatch.setattr(regenerate, "load_target", lambda *_, only: loaded.append(only) or target)
            monkeypatch.setattr(regenerate, "load_engines", lambda *_: [engine])
            monkeypatch.setattr(chat_template, "prompt_ids", letters)
            regenerate.regenerate(config)

        return config.folder("regenerate"), run

    return make


def read(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_target_answers_every_turn_in_its_context(prepared):
    folder, run = prepared("run")
    engine = FakeEngine()
    run(engine)
    conversations = {line["id"]: line for line in read(folder / "train.jsonl")}
    assert list(conversations) == ["one", "two", "late silence", "cut", "late long"]  # the prompts' order
    two = conversations["two"]
    assert [m["role"] for m in two["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    first, second = two["messages"][2]["content"], two["messages"][4]["content"]
    assert first != second
    assert f"system: Be kind.\nuser: First\nassistant: {first}\nuser: Second\nassistant: " in engine.asked
    assert two["category"] == "chat" and two["truncated"] is False
    for line in conversations.values():  # the fake engine's text and its last id both say the seed
        answers = [message["content"] for message in line["messages"] if message["role"] == "assistant"]
        assert [text.split()[1] for text in answers] == [str(ids[-1]) for ids in line["answer_ids"]]
        assert all(ids[:-1] == [0, 1, 2, 3] for ids in line["answer_ids"])


def test_tools_are_in_every_prompt_count_and_are_kept(prepared):
    tools = [{"type": "function", "function": {"name": "add"}}]
    asked = [prompt("short", "First", "Second") | {"tools": tools}, prompt("none", "Hello")]
    asked += [prompt("long", "Hi") | {"tools": [{"type": "function", "function": {"name": "x" * 500}}]}]
    folder, run = prepared("run", train=asked)
    engine = FakeEngine()
    run(engine)
    conversations = {line["id"]: line for line in read(folder / "train.jsonl")}
    assert list(conversations) == ["short", "none"]
    assert conversations["short"]["tools"] == tools and "tools" not in conversations["none"]
    assert sum(text.startswith(f"tools: {json.dumps(tools)}\nuser: First\n") for text in engine.asked) == 2
    assert manifest.read(folder, "regenerate")["results"]["train"]["dropped"] == {"too_long": 1}


def test_what_failed_is_no_answer_and_what_was_cut_off_in_its_reasoning_is_one(prepared):
    prompts = [prompt("whole", "Hello"), prompt("failed", "break"), prompt("late", "Talk", "break it", "And?")]
    cut = [prompt("thought", "ramble, thinking in silence"), prompt("blank", "ramble in silence")]
    folder, run = prepared("run", train=[*prompts, *cut])
    run(FakeEngine())
    conversations = {line["id"]: line for line in read(folder / "train.jsonl")}
    assert list(conversations) == ["whole", "late", "thought"]
    assert len(conversations["late"]["answer_ids"]) == 1
    assert conversations["thought"]["messages"][1]["content"] == ""
    results = manifest.read(folder, "regenerate")["results"]["train"]
    assert results["ended"] == {"complete": 1, "failed": 1, "truncated": 1}
    assert results["dropped"] == {"failed": 1, "empty": 1}


def test_each_prompt_has_one_of_several_temperatures(prepared):
    given = [0.0, 0.5, 1.0]
    folder, run = prepared("run", train=[prompt(f"p{i}", f"{i}?", "And?") for i in range(30)], temperature=given)
    engine = FakeEngine()
    run(engine)
    taken = [*engine.temperatures.values()]
    assert all(len(of_prompt) == 1 for of_prompt in taken)  # in all its turns
    assert all(sum({one} == of_prompt for of_prompt in taken) >= 5 for one in given)
    assert manifest.read(folder, "regenerate")["identity"]["temperature"] == given


def test_conversations_end_where_the_target_ends_them(prepared):
    folder, run = prepared("run")
    run(FakeEngine())
    conversations = {line["id"]: line for line in read(folder / "train.jsonl")}
    assert conversations["cut"]["truncated"] is True
    for name in ("late silence", "cut", "late long"):
        assert [m["role"] for m in conversations[name]["messages"]] == ["user", "assistant"]
    results = manifest.read(folder, "regenerate")["results"]["train"]
    assert results["ended"] == {"complete": 2, "empty": 1, "truncated": 1, "too_long": 1}
    assert results["dropped"] == {"empty": 1, "too_long": 1}
    counted = {"prompts": 7, "conversations": 5, "answers": 6, "tokens": 30}
    assert {name: results[name] for name in counted} == counted
    assert manifest.read(folder, "regenerate")["results"]["tokens_per_second"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 1, 5, 9])
def test_a_killed_run_goes_on_to_the_same_conversations(prepared, limit):
    whole, run = prepared("whole")
    engine = FakeEngine()
    run(engine)
    assert len(engine.asked) == 9

    folder, run = prepared("killed")
    first = FakeEngine(limit)
    try:
        run(first)
    except KeyboardInterrupt:
        with (folder / "answers.0.jsonl.partial").open("a") as stream:
            stream.write('{"id": "torn", "tu')
    second = FakeEngine()
    run(second)
    assert sorted(first.asked + second.asked) == sorted(engine.asked)  # nothing is answered twice
    for split in ("train.jsonl", "held_out.jsonl"):
        assert (folder / split).read_bytes() == (whole / split).read_bytes()
    assert not list(folder.glob("*.partial"))
    third = FakeEngine()
    run(third)
    assert third.asked == []


def test_another_target_is_refused_but_other_aux_layers_are_not(prepared):
    _, run = prepared("run")
    run(FakeEngine())
    run(FakeEngine(limit=0), aux_layers=[0, 2, 3])
    with pytest.raises(manifest.ManifestError, match=r"target\.weights: found 'w', expected 'other'"):
        run(FakeEngine(), weights="other")


def test_nothing_to_answer_is_an_error(prepared, tmp_path):
    lonely = {"id": "lonely", "category": "chat", "messages": [{"role": "system", "content": "Alone."}]}
    _, run = prepared("run", train=[PROMPTS[2], lonely])
    with pytest.raises(ValueError, match=r"none of the prompts was answered: {'empty': 1, 'refused': 1}"):
        run(FakeEngine())
    with pytest.raises(manifest.ManifestError, match=r"eagle3_jax\.prepare"):  # unfinished prompts
        regenerate.regenerate(run_file.from_dict({"run_dir": str(tmp_path)}))


def test_conversations_that_were_given_are_passed_on_in_their_place(prepared):
    """Mixed with prompts: the order stays, nothing is asked about them, and the manifest says whose they are."""
    mine = [given("mine", "Hi", "Hello"), given("cut", "Count", "1 2", truncated=True)]
    sources = {"sources": [{"kind": "conversations", "path": "mine.jsonl"}, {"kind": "jsonl", "path": "prompts.jsonl"}]}
    digests = {"mine.jsonl": "digest of mine", "prompts.jsonl": "digest of prompts"}
    folder, run = prepared("run", train=[mine[0], PROMPTS[0], mine[1]], prepare=sources, inputs=digests)
    engine = FakeEngine()
    run(engine)
    first, asked, last = read(folder / "train.jsonl")
    assert first == mine[0] | {"answer_ids": None} and last == mine[1] | {"answer_ids": None}
    assert asked["id"] == "one" and asked["answer_ids"] is not None
    assert not any("Hello" in text or "Count" in text for text in engine.asked)
    found = manifest.read(folder, "regenerate")
    assert found["identity"]["given"] == {"mine.jsonl": "digest of mine"}
    assert found["results"]["train"]["answered_by"] == {"target": 1, "given": 2}
    assert found["results"]["train"]["ended"] == {"given": 2, "complete": 1}
    assert found["results"]["held_out"]["answered_by"] == {"target": 1, "given": 0}


def test_where_all_is_given_no_parameter_is_loaded(prepared):
    loaded: list[object] = []
    mine = [given("mine", "Hi", "Hello")]
    folder, run = prepared("run", train=mine, held_out=mine, loaded=loaded)
    run(None)
    assert loaded == [()]
    assert [line["id"] for line in read(folder / "train.jsonl")] == ["mine"]
    assert manifest.read(folder, "regenerate")["results"]["tokens_per_second"] is None
