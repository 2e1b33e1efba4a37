"""Answers over HTTP, by the official client and by plain requests; each equals the engine's own."""

import asyncio
import collections
import copy
import itertools
import json
import logging
import pathlib
import re
import shlex
import socket
import threading
import time
import types
import urllib.parse
from typing import Any

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

import eagle3_jax
from eagle3_jax.decoding.adapt.api import AdaptStats
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.scheduler import EngineStats
from eagle3_jax.serve.bodies import Tokens
from eagle3_jax.serve.metrics import Metrics

MODEL = "org/tiny"
ROOT = pathlib.Path(__file__).parents[2]
MESSAGES: Any = [{"role": "user", "content": "apple bird"}]
LONG: dict[str, Any] = {"max_tokens": 200, "extra_body": {"ignore_eos": True}}


def expected(served, prompt, **params):
    return served.engine.generate([prompt], SamplingParams(**params))[0]


def wait_until(holds, seconds=30):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_idle(engine):
    stats = engine.stats()
    return stats.running == stats.waiting == 0


def test_a_chat_is_the_engine_s_answer(served):
    answer = served.client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=24)
    output = expected(served, MESSAGES, max_tokens=24)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (output.text, output.finish_reason)
    assert (choice.message.role, answer.model, answer.object) == ("assistant", MODEL, "chat.completion")
    assert answer.usage.prompt_tokens == len(served.engine.encode(MESSAGES))
    assert answer.usage.completion_tokens == len(output.token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.slow
def test_a_stream_adds_up_to_the_whole_answer(served):
    asked: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0.9, "seed": 5, "max_tokens": 24, "n": 2}
    whole = served.client.chat.completions.create(**asked)
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = list(served.client.chat.completions.create(**asked, stream=True, stream_options=options))
    counts = [event.usage.completion_tokens for event in stream[2:]]
    assert stream[0].usage is None and counts == sorted(counts) and len(set(counts)) > 2
    texts, reasons = ["", ""], [None, None]
    for event in stream[:-1]:
        assert event.id == stream[0].id and event.object == "chat.completion.chunk"
        for choice in event.choices:
            assert reasons[choice.index] is None, "nothing comes behind the finish reason"
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert texts[0] != texts[1]
    assert stream[-1].choices == [] and stream[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [event.choices[0].delta.role for event in stream[:2]] == ["assistant", "assistant"]


@pytest.mark.slow
def test_token_ids_are_where_vllm_has_them(served):
    """Whole and in a stream; nobody gets them unasked."""
    chat: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    texts: Any = {"model": MODEL, "prompt": ["apple", "bird"], "temperature": 0, "max_tokens": 8}
    ids = {"return_token_ids": True}
    asked, output = served.engine.encode(MESSAGES), expected(served, MESSAGES, max_tokens=24)

    whole = served.http.post("/v1/chat/completions", json=chat | ids).json()
    assert (whole["prompt_token_ids"], whole["choices"][0]["token_ids"]) == (asked, output.token_ids)
    bare = served.http.post("/v1/chat/completions", json=chat).json()
    assert "prompt_token_ids" not in bare and "token_ids" not in bare["choices"][0]

    events = streamed(served, "/v1/chat/completions", chat | ids)
    assert [event.get("prompt_token_ids") for event in events] == [asked, *[None] * (len(events) - 1)]
    pieces = [event["choices"][0].get("token_ids", []) for event in events]
    assert [*itertools.chain(*pieces)] == output.token_ids

    choices = served.http.post("/v1/completions", json=texts | ids).json()["choices"]
    prompts = [served.engine.tokenizer(text)["input_ids"] for text in ("apple", "bird")]
    assert [choice["prompt_token_ids"] for choice in choices] == prompts
    parts: Any = [event["choices"][0] for event in streamed(served, "/v1/completions", texts | ids)]
    for number, choice in enumerate(choices):
        of_choice = [part for part in parts if part["index"] == number]
        assert [*itertools.chain(*(part["token_ids"] for part in of_choice))] == choice["token_ids"]
        assert [part.get("prompt_token_ids") for part in of_choice[:2]] == [prompts[number], None][: len(of_choice)]


def streamed(served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = served.http.post(path, json=body | {"stream": True}).text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]


@pytest.mark.slow
def test_drafts_are_shown_to_who_asks_for_them(served):
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 40, "stream": True, "ignore_eos": True}
    assert "drafts" not in served.http.post("/v1/chat/completions", json=body).text
    body["stream_options"] = {"include_drafts": True}
    lines = served.http.post("/v1/chat/completions", json=body).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    found = [choice for event in events for choice in event["choices"] if "drafts" in choice]
    output = expected(served, MESSAGES, max_tokens=40, ignore_eos=True)
    shown = [token for choice in found for token in choice["drafts"]["tokens"]]
    assert b"".join(bytes(token["bytes"]) for token in shown).decode() == output.text
    depths = [token["depth"] for token in shown]
    assert len(depths) == 40 and sum(depth == 1 for depth in depths) == output.stats.accepted_per_position[0] > 0
    for choice in found:
        tree = choice["drafts"]["tree"]
        assert tree is None or len(tree["texts"]) == len(tree["parents"]) == len(tree["accepted"]) <= 4
    assert any(tree and sum(tree["accepted"]) > 1 for tree in (choice["drafts"]["tree"] for choice in found))
    refused = served.http.post("/v1/chat/completions", json=body | {"drafts": False})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "drafts")  # it has no choice


@pytest.mark.slow
def test_completions_of_several_prompts(served):
    prompts: Any = ["apple bird", "river snow"]
    answer = served.client.completions.create(model=MODEL, prompt=prompts, temperature=0, n=2, max_tokens=8)
    ids = [served.engine.tokenizer(prompt)["input_ids"] for prompt in prompts]
    outputs = [expected(served, prompt, max_tokens=8) for prompt in ids for _ in range(2)]
    assert [choice.text for choice in answer.choices] == [output.text for output in outputs]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    as_ids = served.client.completions.create(model=MODEL, prompt=ids, temperature=0, n=2, max_tokens=8)
    assert [choice.text for choice in as_ids.choices] == [choice.text for choice in answer.choices]


def test_the_tokenizer_s_opening_is_left_out_for_who_asks_for_that(served, engine, monkeypatch):
    opens = copy.deepcopy(engine.tokenizer)
    opening = [("<|endoftext|>", opens.convert_tokens_to_ids("<|endoftext|>"))]
    opens.backend_tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=opening)
    monkeypatch.setattr(engine, "tokenizer", opens)
    ask: Any = {"model": MODEL, "prompt": "apple bird", "temperature": 0, "max_tokens": 1}
    options: Any = ({}, {"add_special_tokens": True}, {"add_special_tokens": None}, {"add_special_tokens": False})
    answers = [served.client.completions.create(**ask, extra_body=more) for more in options]
    bare = len(opens("apple bird", add_special_tokens=False)["input_ids"])
    assert [answer.usage.prompt_tokens - bare for answer in answers] == [1, 1, 1, 0]


def test_a_history_with_calls_tools_and_variables_reach_the_template(served, engine, monkeypatch):
    """As OpenAI's clients send calls back: no content beside them, then what the tool answered."""
    knows = copy.deepcopy(engine.tokenizer)
    knows.chat_template = (
        "{% for tool in tools or [] %}{{ tool['function']['name'] }} {% endfor %}{{ mood or '' }}"
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments.a }}){% endfor %}"
        "{{ m.tool_call_id or '' }};{% endfor %}"
    )
    monkeypatch.setattr(engine, "tokenizer", knows)
    tools = [{"type": "function", "function": {"name": "river"}}]
    asked: Any = {"tools": tools, "tool_choice": "none"}
    call = {"id": "1", "type": "function", "function": {"name": "apple", "arguments": '{"a": "snow"}'}}
    messages: Any = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "b"}], "tool_call_id": "1"},
    ]
    for given, variables, opening in (({}, None, ""), (asked, {"mood": "snow"}, "river snow")):
        more = {"return_token_ids": True, "chat_template_kwargs": variables}
        got = served.client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=1, extra_body=more, **given
        )
        text = f"{opening}user:a;assistant:apple(snow);tool:b1;"
        assert got.prompt_token_ids == knows(text, add_special_tokens=False)["input_ids"]


@pytest.mark.slow
def test_equal_prompts_of_one_request_are_different_samples(served):
    ask: Any = {"model": MODEL, "prompt": ["apple"] * 3 + ["snow"], "temperature": 2.0, "max_tokens": 12, "seed": 5}
    texts = [choice.text for choice in served.client.completions.create(**ask).choices]
    several = served.client.completions.create(**ask | {"prompt": "apple", "n": 3}).choices
    assert texts[:3] == [choice.text for choice in several] and len(set(texts)) == 4


def test_every_sampling_field_reaches_the_engine(served):
    fields: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 3, "max_tokens": 12}
    fields |= {"presence_penalty": 0.5, "frequency_penalty": -0.5}
    more: dict[str, Any] = {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 6}
    asked = served.client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        **fields,
        stop=["river", "snow"],
        logit_bias={"300": 2.5},
        extra_body=more | {"stop_token_ids": [301], "ignore_eos": True, "skip_special_tokens": False},
    )
    rest: Any = {"stop": ("river", "snow"), "logit_bias": {300: 2.5}, "stop_token_ids": (301,), "ignore_eos": True}
    rest["skip_special_tokens"] = False
    output = expected(served, MESSAGES, **fields, **more, **rest)
    assert asked.choices[0].message.content == output.text


def test_a_stop_string_ends_the_text_in_front_of_it(served):
    text = expected(served, MESSAGES, max_tokens=24).text
    stop = text.split()[2]
    asked: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24, "stop": stop}
    whole = served.client.chat.completions.create(**asked).choices[0]
    assert (whole.message.content, whole.finish_reason) == (text[: text.index(stop)], "stop")
    events = served.client.chat.completions.create(**asked, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in events) == whole.message.content


@pytest.mark.slow
def test_without_a_seed_answers_differ_and_with_one_they_do_not(served):
    def ask(**more):
        answer = served.client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=16, **more)
        return answer.choices[0].message.content

    assert len({ask() for _ in range(4)}) > 1  # temperature 1 is the default
    assert len({ask(seed=11) for _ in range(2)}) == 1
    assert len({ask(seed=-(2**63)) for _ in range(2)}) == 1
    assert len({ask(seed=-1) for _ in range(4)}) > 1  # vLLM's word for none


def test_logprobs_of_a_chat(served):
    asked: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 8, "logprobs": True}
    whole = served.client.chat.completions.create(**asked, top_logprobs=3).choices[0]
    output = expected(served, MESSAGES, max_tokens=8, logprobs=3)
    found = whole.logprobs.content
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in output.logprobs])
    assert all(len(one.top_logprobs) == 3 and one.top_logprobs[0].logprob == one.logprob for one in found)
    assert b"".join(bytes(one.bytes or ()) for one in found).decode() == whole.message.content
    events = served.client.chat.completions.create(**asked, top_logprobs=3, stream=True)
    parts = [event.choices[0].logprobs for event in events]
    assert [one for part in parts if part for one in part.content] == found
    assert served.client.chat.completions.create(**asked).choices[0].logprobs.content[0].top_logprobs == []


def test_logprobs_of_a_completion(served):
    asked: Any = {"model": MODEL, "prompt": "apple bird cloud", "temperature": 0, "max_tokens": 8, "logprobs": 2}
    whole = served.client.completions.create(**asked).choices[0]
    found = whole.logprobs
    for token, offset, best in zip(found.tokens, found.text_offset, found.top_logprobs, strict=True):
        assert whole.text[offset:].startswith(token) or token.startswith("<|")
        assert len(best) == 2 and token in best
    parts = [event.choices[0].logprobs for event in served.client.completions.create(**asked, stream=True)]
    assert [offset for part in parts if part for offset in part.text_offset] == found.text_offset


def test_bytes_of_tokens_join_to_characters(served):
    tokens = Tokens(served.engine.tokenizer)
    ids = served.engine.tokenizer("é日 apple\n")["input_ids"]
    assert b"".join(tokens.show(token)[1] or b"" for token in ids).decode() == "é日 apple\n"
    assert any(tokens.show(token)[0] == "�" for token in ids)
    assert tokens.show(2) == ("<|im_end|>", None)
    assert tokens.show(447) == ("token_id:447", None)  # a row of the vocabulary without a token
    tokenizer = copy.deepcopy(served.engine.tokenizer)
    tokenizer.add_tokens([AddedToken("<|eom_id|>", special=True), "<tool>"])  # a special token that nothing names
    added = [Tokens(tokenizer).show(token) for token in tokenizer.convert_tokens_to_ids(["<|eom_id|>", "<tool>"])]
    assert added == [("<|eom_id|>", None), ("<tool>", b"<tool>")]


def test_models(served):
    assert [model.id for model in served.client.models.list()] == [MODEL]
    assert served.client.models.retrieve(MODEL).id == MODEL
    assert served.client.models.retrieve("tiny").id == MODEL, "a folder goes by its last name, too"
    with pytest.raises(openai.NotFoundError, match="model: got 'gpt'"):
        served.client.models.retrieve("gpt")
    with pytest.raises(openai.NotFoundError, match="model: got 'gpt'"):
        served.client.chat.completions.create(model="gpt", messages=MESSAGES)
    for path, status in (("/v1/chat/completions", 405), ("/v2", 404)):
        answer = served.http.get(path)
        assert answer.status_code == status and answer.json()["error"]["message"].startswith("GET")


def test_tokens_of_a_prompt_in_vllm_s_shapes(served, serving):
    """Those that the same prompt has in a request; special tokens come back as text."""
    tokenizer, ids = served.engine.tokenizer, served.engine.encode(MESSAGES)
    chat = served.http.post("/tokenize", json={"model": MODEL, "messages": MESSAGES}).json()
    assert chat == {"count": len(ids), "max_model_len": 256, "tokens": ids}
    text = served.http.post("/tokenize", json={"prompt": 'apple "messages": bird'}).json()
    assert text["tokens"] == tokenizer('apple "messages": bird')["input_ids"]
    assert served.http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": tokenizer.decode(ids)}
    assert "<|im_end|>" in tokenizer.decode(ids)
    for path, body, field in (
        ("/tokenize", {"prompt": ["a", "b"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [2**40]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "gpt"}, "model"),
    ):
        answer = served.http.post(path, json=body)
        assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == field
    assert served.http.get("/version").json() == {"version": eagle3_jax.__version__}
    with serving(keys=("one",)) as served:
        assert [served.http.post(path, json={}).status_code for path in ("/tokenize", "/detokenize")] == [401, 401]


def test_each_request_has_a_line_with_its_speed(serving, caplog, monkeypatch):
    with serving(access_log=True) as served:
        log = logging.getLogger("uvicorn.error")
        monkeypatch.setattr(log, "handlers", [caplog.handler])  # uvicorn's loggers do not propagate to the root
        asked: Any = {"prompt": [5, 6, 7], "max_tokens": 4, "n": 2, "ignore_eos": True}
        assert served.http.post("/v1/completions", json=asked).status_code == 200
        shown = r"read 3 tokens, wrote 8 in \d+\.\d\d s, \d+\.\d tokens/s: length"
        wait_until(lambda: re.search(shown, caplog.text))


@pytest.mark.slow
def test_metrics_count_what_happened(served):
    def read():
        found: dict[Any, float] = {
            (sample.name.removeprefix("eagle3_jax_"), *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(served.metrics())
            for sample in family.samples
        }
        return found

    ask: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 100}
    before = collections.Counter(read())
    answer = served.client.chat.completions.create(**ask, extra_body={"ignore_eos": True})
    output = expected(served, MESSAGES, max_tokens=100, ignore_eos=True)
    ended = ("acceptance_length_count",)
    wait_until(lambda: read()[ended] > before[ended])
    after = read()

    def grown(*name: Any) -> float:
        return after[name] - before[name]

    assert grown("generated_tokens_total") == answer.usage.completion_tokens == 100
    assert grown("rounds_total") == output.stats.rounds
    accepted = [grown("drafts_accepted_total", str(position)) for position in (1, 2, 3)]
    assert accepted == output.stats.accepted_per_position and sum(accepted) > 0
    assert grown("acceptance_length_sum") == pytest.approx(output.stats.acceptance_length)
    assert grown("requests_ended_total", "length") == 1
    assert grown("responses_total", "/v1/chat/completions", "200") == 1
    assert grown("time_to_first_token_seconds_count") == 1
    assert 0 < grown("inter_token_seconds_count") <= 99  # each token behind the first piece
    assert after[("tier_in_use", "0", "lookup 3")] == 1
    assert after[("batch_size", "0")] == 4
    assert after[("free_pages", "0")] == after[("pages", "0")] == served.engine.stats().pages
    assert after[("kv_cache_usage", "0")] == 0
    assert after[("requests_waiting", "0")] == after[("requests_running", "0")] == 0


def test_a_request_opts_out_of_what_the_head_learns_from(served, monkeypatch):
    asked, submit = [], served.engine.submit
    monkeypatch.setattr(served.engine, "submit", lambda *a, **o: asked.append(o["adapt"]) or submit(*a, **o))
    for more in ({}, {"adapt": True}, {"adapt": False}):
        body = {"model": MODEL, "prompt": "apple", "max_tokens": 2, **more}
        assert served.http.post("/v1/completions", json=body).status_code == 200
    assert asked == [True, True, False]
    assert served.http.post("/v1/completions", json=body | {"adapt": "no"}).status_code == 400


def test_what_a_head_has_learnt_is_measured(engine, monkeypatch):
    assert b"adapt" not in Metrics(engine).text(), "this one learns nothing"
    learnt = AdaptStats(steps=12, loss=1.5, heads=2, rollbacks=1, tau_before=2.0, tau_after=2.5, share=0.1)
    monkeypatch.setattr(engine, "stats", lambda: EngineStats(pages=1, adapt=learnt))
    found = {
        sample.name.removeprefix("eagle3_jax_adapt_"): sample.value
        for family in text_string_to_metric_families(Metrics(engine).text().decode())
        for sample in family.samples
    }
    assert (found["steps_total"], found["heads_total"], found["rollbacks_total"]) == (12, 2, 1)
    assert (found["loss"], found["tau_before"], found["tau_after"], found["share"]) == (1.5, 2.0, 2.5, 0.1)


def test_health_is_false_while_the_device_hangs(serving, engine, monkeypatch):
    goes_on, run = threading.Event(), engine.own_runner.run

    def hang(call):
        goes_on.wait(30)
        return run(call)

    with serving(stall_timeout=0.3) as served:
        assert served.http.get("/health").status_code == 200
        monkeypatch.setattr(engine.own_runner, "run", hang)
        answers: list[Any] = []

        def ask():
            answers.append(served.client.completions.create(model=MODEL, prompt="apple", temperature=0, max_tokens=4))

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: served.http.get("/health").status_code == 503)
        goes_on.set()
        asking.join(30)
        assert len(answers) == 1
        wait_until(lambda: served.http.get("/health").json() == {"healthy": True, "stalled_seconds": 0.0})


def test_health_says_how_far_the_warm_up_is_until_it_is_complete(served, engine, monkeypatch):
    warm_up = types.SimpleNamespace(ready=3, planned=24)
    monkeypatch.setattr(engine, "_warm_up", warm_up)
    state = {"healthy": True, "stalled_seconds": 0.0}
    answer = served.http.get("/health")
    assert (answer.status_code, answer.json()) == (200, state | {"compiling": "3 of 24 programs are ready"})
    warm_up.ready = 24
    assert served.http.get("/health").json() == state


def test_who_has_no_key_is_refused(serving):
    with serving(keys=("first", "second")) as served:
        for key in ("first", "second"):
            assert served.client.with_options(api_key=key).models.list().data
        for key in ("third", "firs", "first2", "é"):
            header = {"Authorization": f"Bearer {key}".encode()}
            answer = served.http.get("/v1/models", headers=header)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        for headers in ({}, {"Authorization": "first"}, {"Authorization": "Basic first"}):
            assert served.http.post("/v1/completions", headers=headers, json={"prompt": "a"}).status_code == 401
        assert served.http.get("/health").status_code == served.http.get("/metrics").status_code == 200


def test_pages_of_an_allowed_origin_may_ask(serving, served):
    def preflight(served, origin):
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        headers["Access-Control-Request-Headers"] = "authorization,content-type"
        return served.http.options("/v1/chat/completions", headers=headers)

    assert preflight(served, "https://example.org").status_code == 405
    with serving(keys=("one",), allowed_origins=("https://example.org",)) as open_to_one:
        answer = preflight(open_to_one, "https://example.org")
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://example.org"
        assert preflight(open_to_one, "https://example.com").status_code == 400
        refused = open_to_one.http.get("/v1/models", headers={"Origin": "https://example.org"})
        assert refused.status_code == 401 and "access-control-allow-origin" in refused.headers


def test_too_many_in_a_minute_are_told_when_to_come_again(serving):
    with serving(keys=("first", "second"), requests_per_minute=2) as served:
        ask: Any = {"model": MODEL, "prompt": "apple", "temperature": 0, "max_tokens": 2}
        begun = time.monotonic()
        for _ in range(2):
            served.client.completions.create(**ask)
        with pytest.raises(openai.RateLimitError) as refused:
            served.client.completions.create(**ask)
        passed = time.monotonic() - begun  # the bucket fills meanwhile
        assert 30 - passed <= int(refused.value.response.headers["retry-after"]) <= 30
        served.client.with_options(api_key="second").completions.create(**ask)


@pytest.mark.slow
def test_a_flood_beyond_the_queue_is_told_to_come_again(serving, engine):
    with serving(queue_limit=2, batch_size=4) as served:
        ask: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "stream": True, **LONG}
        running = [served.client.chat.completions.create(**ask) for _ in range(6)]
        with pytest.raises(openai.RateLimitError, match="queue") as refused:
            served.client.completions.create(model=MODEL, prompt="apple")
        assert refused.value.response.headers["retry-after"] == "1"
        texts = ["".join(event.choices[0].delta.content or "" for event in stream) for stream in running]
        assert texts == [expected(served, MESSAGES, max_tokens=200, ignore_eos=True).text] * 6
        wait_until(lambda: is_idle(engine))
        assert served.client.completions.create(model=MODEL, prompt="apple", temperature=0).choices


def test_all_answers_of_a_request_wait_or_none(serving, engine):
    """Of ten answers the queue would hold four."""
    scheduler = engine._scheduler
    scheduler.queue_limit, before = 4, scheduler.queue_limit
    try:
        with serving(queue_limit=64) as served:
            with pytest.raises(openai.RateLimitError, match="queue"):
                served.client.completions.create(model=MODEL, prompt="apple", n=10, **LONG)
            wait_until(lambda: is_idle(engine), 5)
    finally:
        scheduler.queue_limit = before
    with serving(queue_limit=8) as served, pytest.raises(openai.BadRequestError, match="n: got 9 answers"):
        served.client.completions.create(model=MODEL, prompt="apple", n=9)


def test_an_answer_that_takes_too_long_is_an_error(serving, engine):
    with serving(request_timeout=0.05) as served:
        ask: Any = {"model": MODEL, "messages": MESSAGES, "n": 16, **LONG}
        with pytest.raises(openai.APIStatusError) as late:
            served.client.chat.completions.create(**ask)
        assert late.value.status_code == 504 and late.value.code == "timeout"
        with pytest.raises(openai.APIError, match="in the time that this server gives"):
            list(served.client.chat.completions.create(**ask, stream=True))
        wait_until(lambda: is_idle(engine))


@pytest.mark.parametrize("stream", [True, False])
def test_what_nobody_waits_for_is_aborted(served, engine, stream):
    before = engine.stats().finished.get("abort", 0)
    body = {"messages": MESSAGES, "n": 8, "stream": stream, "max_tokens": 200, "ignore_eos": True}

    async def ask_and_leave():
        async with httpx2.AsyncClient(base_url=served.url) as client:
            asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            while not engine.stats().running:
                await asyncio.sleep(0.001)
            asking.cancel()

    asyncio.run(ask_and_leave())
    wait_until(lambda: is_idle(engine))
    assert engine.stats().finished["abort"] > before


@pytest.mark.slow
def test_a_client_that_takes_nothing_is_left(serving, engine):
    """Events of log-probabilities are large: more than what the kernel holds for a client."""
    with serving(client_timeout=0.5) as served:
        body = {"prompt": [[5, 6]] * 16, "n": 4, "stream": True, "logprobs": 20, "max_tokens": 200, "ignore_eos": True}
        text = json.dumps(body)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", int(served.url.rsplit(":", 1)[1])))
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode())
            wait_until(lambda: not is_idle(engine))
            wait_until(lambda: is_idle(engine))
        assert 'responses_total{endpoint="/v1/completions",status="200"} 1.0' in served.metrics()


def test_a_body_that_is_too_large_or_too_slow(serving):
    with serving(max_body_bytes=2000, client_timeout=0.3) as served:
        large = {"prompt": "apple " * 1000}
        answer = served.http.post("/v1/completions", json=large)
        assert (answer.status_code, answer.json()["error"]["param"]) == (413, "body")

        def parts():
            for _ in range(100):
                yield b" " * 100

        chunked = served.http.post("/v1/completions", content=parts(), headers={"Content-Type": "application/json"})
        assert chunked.status_code == 413
        with socket.create_connection(("127.0.0.1", int(served.url.rsplit(":", 1)[1]))) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
            client.sendall(b"Content-Length: 10\r\n\r\n{")
            client.settimeout(20)
            assert b" 408 " in client.recv(1000)


def test_a_failure_of_the_device_is_an_error_and_the_next_request_is_not(served, engine, monkeypatch):
    def fail(*_: Any, **__: Any):
        raise RuntimeError("the device is gone")

    ask: Any = {"model": MODEL, "prompt": "apple", "temperature": 0, "max_tokens": 4}
    with monkeypatch.context() as patched:
        patched.setattr(engine.own_runner, "run", fail)
        with pytest.raises(openai.InternalServerError, match="RuntimeError: the device is gone"):
            served.client.completions.create(**ask)
    assert served.client.completions.create(**ask).choices[0].finish_reason == "length"


def test_the_server_s_own_failure_is_counted(served, monkeypatch):
    def count() -> float:
        families = text_string_to_metric_families(served.metrics())
        samples = [sample for family in families for sample in family.samples]
        return sum(x.value for x in samples if x.name.endswith("responses_total") and x.labels["status"] == "500")

    before = count()
    monkeypatch.setattr("eagle3_jax.serve.answers.Answers.usage", lambda *_: 1 / 0)
    with pytest.raises(openai.InternalServerError, match="the server failed"):
        served.client.completions.create(model=MODEL, prompt="apple", temperature=0, max_tokens=2)
    assert count() == before + 1


def test_the_documented_client_works(served, capsys):
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/serve.md").read_text(), re.MULTILINE | re.DOTALL)
    exec(block.replace("http://127.0.0.1:8000", served.url), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


def test_the_curl_of_the_readme_answers_within_a_screen(served):
    (command,) = re.findall(r"^    (curl .*\\\n.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    _, url, *options = shlex.split(command.replace("\\\n", " "))
    given = dict(zip(options[::2], options[1::2], strict=True))
    headers, body = dict([given["-H"].split(": ")]), json.loads(given["-d"])
    assert body["temperature"] == 0 and body["max_tokens"] <= 128
    first, second = (
        served.http.post(urllib.parse.urlparse(url).path, content=given["-d"], headers=headers) for _ in "12"
    )
    assert 0 < first.json()["usage"]["completion_tokens"] <= body["max_tokens"]
    assert first.json()["choices"] == second.json()["choices"]


def test_the_documented_metrics_are_there(served):
    text = (ROOT / "docs/serve.md").read_text().partition("## Metrics")[2]
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`(\w+)", row)]
    shown = {family.name for family in text_string_to_metric_families(served.metrics())}
    assert len(names) > 15
    for name in names:
        assert f"eagle3_jax_{name.removesuffix('_total')}" in shown, name
