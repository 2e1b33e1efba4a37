"""A fleet of stand-in servers that fail in every way: no prompt is lost or doubled, and what they say is kept."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import pathlib
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import emulator
import pytest
import tiny
from fake_fleet import FakeServer

from eagle3_jax.config import ConfigError, run_file
from eagle3_jax.data.conversation import read_conversation
from eagle3_jax.models.checkpoint.fetch import load_tokenizer
from eagle3_jax.regenerate import __main__ as regenerate
from eagle3_jax.regenerate import fleet
from eagle3_jax.runs import command, disk, manifest


@pytest.fixture(autouse=True)
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_REST", 0.02)
    monkeypatch.setattr(fleet, "_LONGEST_REST", 0.1)
    monkeypatch.setattr(fleet, "_LOOK", 0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny.write_target(tmp_path_factory.mktemp("fleet") / "target")


@pytest.fixture(scope="module")
def tokenizer(folder: pathlib.Path) -> Any:
    return load_tokenizer(folder)


@pytest.fixture
def server(folder: pathlib.Path, tokenizer: Any) -> Any:
    """Makes servers that listen until the test ends."""
    with contextlib.ExitStack() as stack:

        def make(**settings: Any) -> FakeServer:
            common: dict[str, Any] = {"tokenizer": tokenizer, "model": str(folder)}
            return stack.enter_context(FakeServer(**common | settings))

        yield make


def prompt(name: str, *turns: str) -> dict[str, Any]:
    return {"id": name, "category": "c", "messages": [{"role": "user", "content": turn} for turn in turns]}


@dataclasses.dataclass(frozen=True)
class Run:
    """Some prompts, and a configuration for each fleet that answers them."""

    target: pathlib.Path
    folder: disk.Path
    prompts: Sequence[dict[str, Any]]

    def ask(self, *servers: FakeServer | dict[str, Any], **settings: Any) -> None:
        listed = [server.url if isinstance(server, FakeServer) else server for server in servers]
        common = {"max_tokens": 64, "max_length": 512, "deadline": 20.0, "patience": 5.0, "servers": listed}
        values = {"run_dir": str(self.folder), "target": {"name": str(self.target), "aux_layers": [1, 2, 3]}}
        regenerate.regenerate(run_file.from_dict(values | {"regenerate": common | settings}))

    @property
    def output(self) -> disk.Path:
        return self.folder / "conversations"

    def read(self, name: str) -> list[dict[str, Any]]:
        return list(disk.read_jsonl(self.output / name))

    def conversations(self) -> dict[str, dict[str, Any]]:
        found = {line["id"]: line for line in self.read("train.jsonl")}
        assert len(found) == len(self.read("train.jsonl"))
        return found

    def rejects(self) -> dict[str, str]:
        return {line["id"]: line["reason"] for line in self.read("rejects.jsonl") if line["split"] == "train"}

    def results(self) -> dict[str, Any]:
        return manifest.read(self.output, "regenerate")["results"]["train"]

    def assert_all_there(self) -> None:
        """Every prompt is a conversation or a reject, and none is both."""
        there = [*self.conversations(), *self.rejects()]
        assert sorted(there) == sorted(line["id"] for line in self.prompts)


@pytest.fixture
def run(folder: pathlib.Path, tmp_path: pathlib.Path) -> Callable[..., Run]:
    def make(*prompts: dict[str, Any], at: str | None = None) -> Run:
        place = disk.path_of(at or tmp_path / "run")
        made = run_file.from_dict({"run_dir": str(place)}).folder("prepare")
        manifest.begin(made, {"verb": "prepare"})
        for split, lines in (("train", prompts), ("held_out", [prompt("held out", "apple")])):
            with disk.atomic(made / f"{split}.jsonl") as temporary:
                temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
        manifest.finish(made, files=("train.jsonl", "held_out.jsonl"))
        return Run(folder, place, prompts)

    return make


def many(count: int) -> list[dict[str, Any]]:
    return [prompt(f"p{i}", f"question {i}") for i in range(count)]


def last(body: dict[str, Any]) -> str:
    return body["messages"][-1]["content"]


@pytest.mark.parametrize("form", ["vllm", "sglang"])
def test_every_turn_is_answered_and_its_ids_are_the_server_s(run, server, tokenizer, form):
    made = run(prompt("one", "apple"), prompt("two", "bird cloud", "door"))
    answering = server(form=form)
    made.ask(answering, temperature=[0.0, 0.5])
    made.assert_all_there()
    two = made.conversations()["two"]
    answers = [message["content"] for message in two["messages"] if message["role"] == "assistant"]
    assert [text.split(":")[0] for text in answers] == ["bird cloud", "door"]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] + [2] for text in answers]
    assert two["answer_ids"] == ids
    (trained,) = read_conversation(json.dumps(two), tokenizer, 512)  # one sequence: the history renders as it was asked
    assert trained.loss_mask.sum() == sum(map(len, ids))
    second = next(body for body in answering.asked if last(body) == "door")
    assert second["messages"] == two["messages"][:3]
    of_two = {body["temperature"] for body in answering.asked if body["messages"][0]["content"] == "bird cloud"}
    assert len(of_two) == 1 and of_two < {0.0, 0.5}
    assert all(body["top_k"] == -1 and body["repetition_penalty"] == 1.0 for body in answering.asked)
    results = made.results()
    assert results["servers"] == {answering.url: 3} and results["without_ids"] == 0


def test_reasoning_and_tool_calls_are_kept_as_the_server_says_them(run, server, tokenizer):
    """Reasoning is of its turn alone; a call ends the conversation, as nobody answers for the tool."""
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"where": "north"}'}}
    thought = tokenizer("snow tree\nriver", add_special_tokens=False)["input_ids"] + [2]

    def rule(body: dict[str, Any]) -> Any:
        if last(body) == "think":
            message = {"role": "assistant", "content": "river", "reasoning": "snow tree"}  # vLLM's name
            return {"message": message, "token_ids": thought}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return {"message": message, "finish_reason": "tool_calls"} if last(body) == "call" else None

    made = run(prompt("thinks", "think", "and"), prompt("calls", "call", "never asked"))
    answering = server(rule=rule)
    made.ask(answering)
    thinks, calls = made.conversations()["thinks"], made.conversations()["calls"]
    assert thinks["messages"][1] == {"role": "assistant", "content": "river", "reasoning_content": "snow tree"}
    assert thinks["answer_ids"][0] == thought
    asked = next(body["messages"] for body in answering.asked if last(body) == "and")
    assert asked[1] == {"role": "assistant", "content": "river"}
    assert calls["messages"][1:] == [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert made.results()["ended"] == {"complete": 1, "called": 1}


def test_tools_are_rendered_by_a_server_that_reads_no_calls(run, server):
    """This package's own, or vLLM without a parser: a call stays in the text, and its ids are kept."""
    tools = [{"type": "function", "function": {"name": "look"}}]
    made = run(prompt("calls", "call") | {"tools": tools}, prompt("bad", "bad") | {"tools": tools})
    refused = lambda body: "tools" in body and (last(body) == "bad" or body.get("tool_choice") != "none")  # noqa: E731
    answering = server(rule=lambda body: 400 if refused(body) else None)
    made.ask(answering)
    made.assert_all_there()
    (found,) = made.conversations().values()
    assert found["tools"] == tools and found["messages"][1]["content"].startswith("call: ") and found["answer_ids"]
    assert made.rejects()["bad"].startswith("status 400")
    assert sum(body.get("tool_choice") == "none" for body in answering.asked) == 2


def test_a_template_s_date_is_sent_to_servers_that_would_write_today_s(run, server, tokenizer, folder, tmp_path):
    target = tmp_path / "dated"
    shutil.copytree(folder, target)
    dated = load_tokenizer(folder)
    dated.chat_template = "{{ date_string }}\n" + tiny.CHAT_TEMPLATE
    dated.save_pretrained(target)
    made = dataclasses.replace(run(prompt("one", "apple")), target=target)
    today = server(tokenizer=dated, model=str(target))

    def answer(body: dict[str, Any], changes: Any, usual: Any = today.answer) -> dict[str, Any]:
        reply = usual(body, changes)
        if "chat_template_kwargs" not in body:
            reply["prompt_token_ids"] = [7, *reply["prompt_token_ids"]]
        return reply

    today.answer = answer
    made.ask(today)
    made.assert_all_there()
    assert made.rejects() == {}
    assert today.asked[0]["chat_template_kwargs"] == {"date_string": "26 Jul 2024"}


def test_a_server_without_ids_is_asked_in_openai_s_form_and_its_answers_are_marked(run, server, tokenizer):
    made = run(prompt("one", "apple"))
    answering = server(form="openai")
    made.ask(answering)
    found = made.conversations()["one"]
    assert found["answer_ids"] is None and made.results()["without_ids"] == 1
    assert answering.asked[0].keys() == {"model", "messages", "temperature", "max_tokens", "seed"}
    (trained,) = read_conversation(json.dumps(found), tokenizer, 512)  # rendered again
    assert trained.loss_mask.any()


@pytest.mark.slow
def test_no_prompt_is_lost_or_doubled_by_servers_that_fail_die_and_come_back(run, server):
    """One answers 500, one breaks off now and then, one dies in mid-run and returns."""
    flaky: collections.Counter[str] = collections.Counter()

    def sometimes(body: dict[str, Any]) -> Any:
        flaky[last(body)] += 1
        number = int(last(body).split()[1])
        return (429, "half", "drop", None, None)[number % 5] if flaky[last(body)] == 1 else None

    made = run(*many(60))
    broken, shaky = server(rule=lambda _: 500), server(rule=sometimes)
    dying = server()

    def die() -> None:
        while len(dying.asked) < 3:
            time.sleep(0.002)
        dying.down()
        time.sleep(0.15)
        dying.up()

    killer = threading.Thread(target=die)
    killer.start()
    made.ask(*({"url": one.url, "concurrency": 4} for one in (broken, shaky, dying)))
    killer.join(10)
    assert not killer.is_alive()
    made.assert_all_there()
    assert made.rejects() == {}
    assert broken.url not in made.results()["servers"] and set(made.results()["servers"]) == {shaky.url, dying.url}


@pytest.mark.slow
def test_an_ill_server_joins_later(run, server):
    made = run(*many(40))
    late = server()
    late.down()

    def slowly(body: dict[str, Any]) -> None:
        time.sleep(0.02)
        if last(body) == "question 5":
            late.up()

    made.ask({"url": server(rule=slowly).url, "concurrency": 1}, late)
    made.assert_all_there()
    assert late.asked


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (500, "attempts: status 500"),
        ("half", "attempts: answer: body: Invalid JSON"),
        ({"finish_reason": None}, "attempts: answer: got the end None"),
        ({"message": {"content": 7}}, "attempts: answer: choices.0.message.content"),
        (400, "status 400"),
        ({"finish_reason": "content_filter"}, "answer: the server's filter withheld it"),
        ({"token_ids": []}, "answer: got no token ids"),
        ({"token_ids": [5, 9000, 2]}, "answer: got token ids up to 9000, expected less than the target's 448"),
        ({"token_ids": [300, 301, 2]}, "answer: got ids of"),
        ({"token_ids": [5]}, "answer: got token 5 at its end, expected an end of sequence of [2, 0]"),
        ({"message": {"content": " "}}, "the answer has no text"),
    ],
    ids=repr,
)
def test_a_prompt_that_nobody_answers_well_is_a_reject_with_its_reason(run, server, fault, reason):
    made = run(*many(3), prompt("bad", "bad"))
    two = [server(rule=lambda body: fault if last(body) == "bad" else None) for _ in range(2)]
    made.ask(*two)
    made.assert_all_there()
    assert re.sub(r"^\d+ attempts", "attempts", made.rejects()["bad"]).startswith(reason), made.rejects()
    assert len(made.conversations()) == 3


def test_a_prompt_that_the_server_renders_otherwise_is_a_reject(run, server):
    """The probe was right, and is again: the fault is this prompt's."""
    made = run(*many(3), prompt("bad", "bad"))
    odd = server(form="sglang", rule=lambda body: {"prompt_token_ids": [1, 2, 3]} if last(body) == "bad" else None)
    odd.answer = lambda body, changes, usual=odd.answer: _with(usual(body, changes), changes)
    made.ask(odd)
    made.assert_all_there()
    assert "expected the target's tokenizer and chat template" in made.rejects()["bad"]


def _with(answer: dict[str, Any], changes: Any) -> dict[str, Any]:
    answer["choices"][0] |= changes
    return answer


def test_a_later_turn_that_fails_leaves_the_first_and_a_late_answer_is_asked_of_another_server(run, server):
    made = run(prompt("two", "apple", "bad"), *many(4))
    slow = server(rule=lambda _: "silent")
    slow.silence = 1.0
    made.ask(slow, server(rule=lambda body: 400 if last(body) == "bad" else None), deadline=0.4)
    made.assert_all_there()
    assert made.rejects() == {} and slow.url not in made.results()["servers"]
    assert len(made.conversations()["two"]["answer_ids"]) == 1
    assert made.results()["ended"] == {"failed": 1, "complete": 4}


@pytest.mark.slow
def test_a_server_that_holds_something_else_is_refused_by_name_before_work_begins(run, server, folder):
    made = run(*many(2))
    other_template = tiny.make_tokenizer()
    other_template.chat_template = tiny.CHAT_TEMPLATE.replace("<|im_start|>", "<|im_start|> ")
    well = server()
    for odd, message in (
        (server(model="org/other"), f"/models: got 'org/other', expected '{folder}'"),
        (server(max_model_len=100), "max_model_len: got 100, expected at least regenerate.max_length = 512"),
        (server(tokenizer=other_template), "expected the target's tokenizer and chat template"),
        (server(tokenizer=other_template, form="sglang"), "expected the target's tokenizer and chat template"),
        (server(tokenizer=other_template, form="openai"), "tokens where the target has"),
        (server(key="secret"), "status 401"),
    ):
        with pytest.raises(ValueError, match="regenerate.servers") as refused:
            made.ask(well, odd)
        assert odd.url in str(refused.value) and message in str(refused.value)
        assert well.url not in str(refused.value)
        assert odd.asked == [] and well.asked == []
    made.ask(well, {"url": server(model="served so").url, "model": "served so"})


def test_keys_are_shown_to_their_server_alone(run, server, monkeypatch):
    made = run(*many(2))
    locked = server(key="secret")
    settings = {"url": locked.url, "api_key_variable": "FLEET_KEY"}
    with pytest.raises(ValueError, match="regenerate.servers: got no FLEET_KEY in the environment"):
        made.ask(settings)
    monkeypatch.setenv("FLEET_KEY", "secret")
    made.ask(settings)
    assert "secret" not in (made.output / "manifest.json").read_text()


@pytest.mark.slow
def test_a_server_that_comes_back_as_another_model_leaves_and_a_rerun_goes_on(run, server):
    """Its first answer shows it: the prompt is nobody's reject. Only what is missing is asked again."""
    made = run(*many(8))
    other = tiny.make_tokenizer()
    other.chat_template = tiny.CHAT_TEMPLATE.replace("assistant", "model")
    changing = server()

    def change(body: dict[str, Any]) -> None:
        if len(changing.asked) == 4:
            changing.tokenizer = other

    changing.rule = change
    with pytest.raises(ValueError, match="expected the target's tokenizer and chat template"):
        made.ask({"url": changing.url, "concurrency": 1})
    well = server()
    made.ask(well)
    made.assert_all_there()
    assert made.rejects() == {}
    asked = [last(body) for body in well.asked]
    assert len(set(asked)) == len(asked) == 8 - 3 + 1  # and the held-out prompt
    assert made.results()["servers"] == {changing.url: 3, well.url: 5}
    made.ask(well)
    assert len(well.asked) == len(asked)  # finished


def test_a_fleet_of_which_nobody_answers_is_one_error(run, server):
    made = run(*many(2))
    gone, busy = server(), server()
    gone.down()
    busy._models = lambda handler: busy._send(handler, {"error": "starting"}, 503)
    with pytest.raises(ValueError, match=r"regenerate.servers:\n  \S+: got no connection.*\n  \S+: status 503"):
        made.ask(gone, busy)
    dying = server(rule=lambda _: dying.down() or "drop")
    with pytest.raises(ValueError, match=r"got no connection.*\n.*run it again: it goes on from here"):
        made.ask(dying, patience=0.3)


def test_a_prompt_that_alone_is_turned_away_at_last_is_a_reject(run, server):
    """The probes are well all the time, and the others were answered."""
    made = run(*many(3), prompt("large", "large"))
    made.ask(server(rule=lambda body: 429 if last(body) == "large" else None), patience=0.5)
    made.assert_all_there()
    assert re.match(r"\d+ attempts: status 429: ", made.rejects()["large"])
    assert len(made.conversations()) == 3


def test_a_server_that_turns_all_away_is_waited_for(run, server):
    """No prompt is given up, and the next run goes on."""
    made = run(*many(3))
    with pytest.raises(ValueError, match=r"status 503.*\n.*run it again: it goes on from here"):
        made.ask(server(rule=lambda _: 503), patience=0.5)
    made.ask(server())
    made.assert_all_there()
    assert made.rejects() == {}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["local", "bucket"])
def test_a_run_that_sigterm_stops_asks_for_the_rest_alone(run, server, monkeypatch, where):
    made = run(*many(60), at=None if where == "local" else f"{emulator.new_bucket()}/run")

    stopped = threading.Event()

    def rule(body: dict[str, Any]) -> None:
        time.sleep(0.04)
        if len(answering.asked) >= 12 and not stopped.is_set():  # of two at a time, none may see the twelfth alone
            stopped.set()
            monkeypatch.setattr(command, "_asked", signal.SIGTERM)

    answering = server(rule=rule)
    with pytest.raises(command.Stopped):
        made.ask({"url": answering.url, "concurrency": 2})
    assert 12 <= len(answering.asked) < 60
    monkeypatch.setattr(command, "_asked", None)
    made.ask({"url": answering.url, "concurrency": 2})
    made.assert_all_there()
    assert made.rejects() == {}
    assert 61 <= len(answering.asked) <= 63  # those on their way at the stop were asked twice


def test_urls_are_checked_with_the_other_fields():
    for url in (
        "127.0.0.1:8000",
        "http://user:word@host/v1",
        "http://host/v1?key=1",
        "ftp://host/v1",
        "http://a..x/v1",
    ):
        with pytest.raises(ConfigError, match=r"regenerate\.servers\.0.*url: got .*, expected an address"):
            run_file.from_dict({"run_dir": "run", "regenerate": {"servers": [url]}})
    run_file.from_dict(
        {"run_dir": "run", "regenerate": {"servers": ["http://[::1]:80/v1", "https://b\u00fccher.de/v1"]}}
    )
    twice = ["http://host/v1", {"url": "http://host/v1/", "concurrency": 2}]
    with pytest.raises(ConfigError, match="each server once"):
        run_file.from_dict({"run_dir": "run", "regenerate": {"servers": twice}})
