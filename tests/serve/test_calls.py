"""Tools and shapes over HTTP: what the engine is asked for, and what the official client reads out of its answers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import openai
import pydantic
import pytest
import tiny

from eagle3_jax.config.serving import CallForm
from eagle3_jax.decoding.device.report import Advance
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.request import Request
from eagle3_jax.serve.tools import FORMS

MODEL = "org/tiny"
HERMES = (
    "{% for tool in tools or [] %}{{ tool | tojson }}<tool_call></tool_call>{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n{{ '<think>\n' if think else '' }}"
)
HARMONY = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant"
HARMONY += "{# <|channel|>commentary to=functions. #}"
MARKS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|im_start|>"]
ASKED: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Sum 2 and 3."}], "max_tokens": 900}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS: Any = [ADD, NOW]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


class Driver:
    """All tokens are there already."""

    def drive(self, ready: Callable[[], bool]) -> None: ...
    def drive_in_background(self) -> None: ...
    def abort(self, *requests: Request) -> None: ...


@dataclasses.dataclass
class Scripted:
    """A server whose answers are written beforehand; `asked` are the prompts' texts and the parameters."""

    client: openai.OpenAI
    http: Any
    answers: list[str]
    asked: list[tuple[str, SamplingParams]]

    def chat(self, answer: str, **asked: Any) -> Any:
        self.answers.append(answer)
        return self.client.chat.completions.create(**ASKED | asked)

    def stream(self, answer: str, **asked: Any) -> Any:
        """A streamed answer, joined by the client's own helper."""
        self.answers.append(answer)
        with self.client.chat.completions.stream(**ASKED | asked) as stream:
            for _ in stream:
                pass
            return stream.get_final_completion()

    @property
    def params(self) -> SamplingParams:
        return self.asked[-1][1]


@pytest.fixture
def scripted(engine, serving, monkeypatch) -> Callable[..., contextlib.AbstractContextManager[Scripted]]:
    @contextlib.contextmanager
    def start(template: str, end: str = "<|im_end|>", **settings: Any) -> Iterator[Scripted]:
        tokenizer: Any = tiny.make_byte_tokenizer(template, additional_special_tokens=MARKS, eos_token=end)
        answers, asked = [], []

        def submit(ids: list[int], params: SamplingParams, **_: Any) -> Request:
            asked.append((tokenizer.decode(ids), params))
            tokens = [*tokenizer(answers.pop(0))["input_ids"], tokenizer.eos_token_id]
            request = Request(Driver(), tokenizer, ids, params, len(tokens), 0)
            ending = request.take(Advance(tokens, [0] * len(tokens), True, False, [], rounds=1), frozenset(tokens[-1:]))
            assert ending is not None
            request.publish(request.finish(*ending))
            return request

        monkeypatch.setattr(engine, "tokenizer", tokenizer)
        monkeypatch.setattr(engine, "submit", submit)
        with serving(**settings) as served:
            yield Scripted(served.client, served.http, answers, asked)

    return start


def calls_of(message: Any) -> list[tuple[str, Any]]:
    assert all(re.fullmatch("[a-z0-9]{9}", call.id) and call.type == "function" for call in message.tool_calls or ())
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


ADDED = ("add", {"a": 2, "b": 3})


def test_calls_are_read_and_their_results_go_into_the_next_turn(scripted):
    with scripted(HERMES) as served:
        for ask in (served.chat, served.stream):
            answer = ask(f"Let me see.\n{CALL}\n{OTHER}", tools=TOOLS)
            (choice,) = answer.choices
            assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
            assert calls_of(choice.message) == [ADDED, ("now", {})]
            assert served.params.structured is None and not served.params.skip_special_tokens
        result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "5"}
        turns = [*ASKED["messages"], choice.message.model_dump(include={"role", "content", "tool_calls"}), result]
        answer = served.chat("It is 5.", messages=turns, tools=TOOLS)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("It is 5.", "stop")
        assert answer.choices[0].message.tool_calls is None
        prompt = served.asked[-1][0]
        assert '"arguments": {"a": 2, "b": 3}' in prompt and prompt.endswith(
            "tool\n5<|im_end|>\n<|im_start|>assistant\n"
        )


def test_several_answers_and_one_call_of_each(scripted):
    with scripted(HERMES) as served:
        served.answers += [OTHER, "No."]
        answer = served.chat(CALL + OTHER, tools=TOOLS, parallel_tool_calls=False, n=2)
        assert [calls_of(choice.message) for choice in answer.choices] == [[("now", {})], []]
        served.answers.pop()
        assert calls_of(served.chat(CALL + OTHER, tools=TOOLS, parallel_tool_calls=False).choices[0].message) == [ADDED]
        served.answers += [OTHER]
        events = list(served.chat("No.", tools=TOOLS, n=2, stream=True))
        deltas = [choice.delta.tool_calls for event in events for choice in event.choices if choice.delta.tool_calls]
        assert [(call.index, call.function.name) for (call,) in deltas] == [(0, "now")]
        assert [choice.finish_reason for event in events for choice in event.choices if choice.finish_reason] == [
            *("tool_calls", "stop")
        ]


def fits(params: SamplingParams, text: str) -> bool:
    assert params.structured is not None and params.structured.regex is not None
    return re.fullmatch(params.structured.regex, text) is not None


def test_what_has_to_be_called_is_a_constraint(scripted):
    named: Any = {"type": "function", "function": {"name": "now"}}
    with scripted(HERMES) as served:
        message = served.chat(f"{CALL}\n{OTHER}", tools=TOOLS, tool_choice="required").choices[0].message
        assert message.content is None and calls_of(message) == [ADDED, ("now", {})]
        assert fits(served.params, f"{CALL}\n{OTHER}") and fits(served.params, CALL) and not fits(served.params, "No.")
        answer = served.stream(OTHER, tools=TOOLS, tool_choice=named)
        assert calls_of(answer.choices[0].message) == [("now", {})]
        assert fits(served.params, OTHER) and not fits(served.params, CALL)
        served.chat(CALL, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        assert fits(served.params, CALL) and not fits(served.params, f"{CALL}\n{OTHER}")
        served.chat(CALL, tools=TOOLS, tool_choice="none")
        assert served.params.structured is None and served.params.skip_special_tokens


class Person(pydantic.BaseModel):
    name: str
    kind: Literal["bird", "apple"]


def test_an_answer_of_a_shape_is_parsed_by_the_client(scripted):
    text = '{"name": "Zoë <think>", "kind": "bird"}'
    with scripted(HERMES) as served:
        served.answers.append(text)
        answer = served.client.chat.completions.parse(**ASKED, response_format=Person)
        assert answer.choices[0].message.parsed == Person(name="Zoë <think>", kind="bird")
        assert json.loads(served.params.structured.json)["properties"].keys() == {"name", "kind"}
        for either in (text, CALL):  # beside tools: an answer of the shape, or calls
            served.chat(either, tools=TOOLS, response_format=shape_of(Person))
            assert fits(served.params, either)
        assert not fits(served.params, "No.") and not fits(served.params, '{"name": 1}')


def shape_of(kind: type[pydantic.BaseModel]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": kind.model_json_schema(), "strict": True}}


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"json": {"type": "null"}, "regex": None}}, {"json": '{"type": "null"}'}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"guided_json": {"type": "null"}}, {"json": '{"type": "null"}'}),
        ({"guided_json": '{"type": "null"}'}, {"json": '{"type": "null"}'}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ("a", "b")}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"json_schema": '{"type": "null"}'}, {"json": '{"type": "null"}'}),
    ],
)
def test_every_name_of_a_shape(scripted, fields, shape):
    with scripted(HERMES) as served:
        served.chat("a", extra_body=fields)
        chat = served.params.structured
        served.answers.append("a")
        served.client.completions.create(model=MODEL, prompt="a", max_tokens=5, extra_body=fields)
        for found in (chat, served.params.structured):
            assert {name: getattr(found, name) for name in shape} == shape and found.after is None


def test_a_shape_begins_behind_the_thought_that_the_prompt_opens(scripted):
    asked: Any = {"extra_body": {"chat_template_kwargs": {"think": True}}}
    with scripted(HERMES) as served:
        answer = served.chat('Hm.\n</think>{"a": 1}', response_format={"type": "json_object"}, **asked)
        message = answer.choices[0].message
        assert (message.content, message.reasoning_content) == ('{"a": 1}', "Hm.\n")
        assert served.params.structured.after == "</think>"
        message = (
            served.stream(f"Hm.\n</think>\n\n{CALL}", tools=TOOLS, tool_choice="required", **asked).choices[0].message
        )
        assert calls_of(message) == [ADDED] and served.params.structured.after == "</think>"
        text = "Hm.\n</think>No."
        plain = served.chat(text, extra_body=asked["extra_body"])
        assert plain.choices[0].message.content == text  # as ever, for who asks for neither


def test_gpt_oss_calls_in_a_channel(scripted):
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2, "b": 3}'
    with scripted(HARMONY, end="<|call|>") as served:
        for ask in (served.chat, served.stream):
            (choice,) = ask(thought + call, tools=TOOLS).choices
            assert calls_of(choice.message) == [ADDED] and not choice.message.content
            assert (choice.message.reasoning_content, choice.finish_reason) == ("Hm.", "tool_calls")
        text = '[{"name": "add", "arguments": {"a": 2, "b": 3}}]'
        (choice,) = served.chat(
            f"{thought}<|channel|>final<|message|>{text}", tools=TOOLS, tool_choice="required"
        ).choices
        assert calls_of(choice.message) == [ADDED] and fits(served.params, text)
        assert served.params.structured.after == "<|channel|>final<|message|>"
        (choice,) = served.chat(thought + call).choices
        assert choice.message.content == "" and choice.message.reasoning_content.startswith("Hm.{"), "as ever"


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": fields}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": TOOLS}, "tools: got add, now, expected none, or one of openai, glm45"),
        ({"tools": [function(name="a", parameters=1)]}, "tools.0.function.parameters: got 1"),
        ({"tools": TOOLS, "tool_choice": function(name="sub")}, "tool_choice: got .*sub.* add, now"),
        ({"tool_choice": "required"}, "tool_choice: got 'required', expected one of the tools, none"),
        (
            {"guided_regex": "a", "guided_json": {}},
            "guided_regex: got 'a', expected no second shape, beside",
        ),
        ({"structured_outputs": {"lark": "a"}}, "structured_outputs.lark: got 'a', expected one of json, json_object"),
        ({"guided_grammar": "root ::= a"}, "guided_grammar: got .* expected None: a grammar has no finite table"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: got None"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema: got"),
    ],
)
def test_what_cannot_be_is_refused_by_name(scripted, fields, named):
    with scripted("{{ messages }}") as served:
        answer = served.http.post("/v1/chat/completions", json=ASKED | fields)
        assert answer.status_code == 400 and not served.asked
        error = answer.json()["error"]
        assert re.match(named, error["message"]) and error["message"].startswith(f"{error['param']}: got")


def test_a_part_of_a_tool_s_schema_is_named(scripted):
    tool = {"type": "function", "function": {"name": "a", "parameters": {"type": "object", "minProperties": 2}}}
    with scripted("{{ messages }}", tool_call_parser="hermes") as served:
        served.chat("a", tools=[tool])
        with pytest.raises(openai.BadRequestError, match=r"tools.a.parameters.minProperties: got 2, expected none"):
            served.chat("a", tools=[tool], tool_choice="required")


# An agent of OpenAI's library with a tool and a type for its answer, run whole and streamed.
AGENT = """
import asyncio, sys
import agents, openai, pydantic

@agents.function_tool
def add(a: int, b: int) -> int:
    return a + b

class Sum(pydantic.BaseModel):
    value: int

async def main():
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=sys.argv[1], api_key="none")
    model = agents.OpenAIChatCompletionsModel("org/tiny", client)
    agent = agents.Agent(name="a", instructions="Add.", tools=[add], model=model, output_type=Sum)
    print((await agents.Runner.run(agent, "Sum 2 and 3.")).final_output)
    streamed = agents.Runner.run_streamed(agent, "Sum 2 and 3.")
    async for _ in streamed.stream_events():
        pass
    print(streamed.final_output)

asyncio.run(main())
"""


@pytest.mark.long
def test_an_agent_calls_a_tool_and_answers_in_its_type(scripted):
    subprocess.run(["bash", "tools/install_agents.sh"], check=True, cwd=tiny.REPOSITORY, timeout=600)
    python = tiny.REPOSITORY / ".venv-agents/bin/python"
    with scripted(HERMES) as served:
        served.answers += [CALL, '{"value": 5}'] * 2
        command = [str(python), "-c", AGENT, str(served.client.base_url)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.stdout.splitlines() == ["value=5", "value=5"], done.stderr
        assert [prompt.count("tool\n5<|im_end|>") for prompt, _ in served.asked] == [0, 1, 0, 1]
        assert fits(served.params, '{"value": 5}') and fits(served.params, CALL) and not fits(served.params, "5")


def test_the_flag_names_every_form():
    assert {*get_args(CallForm)} == FORMS.keys()
