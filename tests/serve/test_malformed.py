"""Some hundred wrong bodies: each is refused with the field's name, none disturbs the server."""

from typing import Any

import httpx2
import pytest
from wrong_bodies import BODIES, BOTH, CASES, CHAT, OF_CHAT, TEXT, written


def refused(answer: httpx2.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert {"message", "type", "param", "code"} == set(error)
    assert "got" in error["message"] and "expected" in error["message"]
    return error


def test_every_wrong_field_is_named(served):
    assert len(set(BODIES)) >= 200
    wrong = []
    for path, body, field, value in CASES:
        text = written(body, field, value)
        answer = served.http.post(path, content=text, headers={"Content-Type": "application/json"})
        try:
            error = refused(answer)
            assert error["param"].split(".")[0].split("[")[0] == field and error["message"].startswith(field)
            assert error["code"] == "invalid_value"
            assert len(error["message"]) < 500
        except AssertionError as found:
            wrong.append(f"{path} {field}: {str(value)[:60]!r}: {found}")
    assert not wrong, "\n".join(wrong)
    answer = served.http.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 200 and served.http.get("/health").status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("text", TEXT, ids=lambda text: repr(text[:12]))
def test_what_is_no_object_of_json_is_refused(served, path, text):
    error = refused(served.http.post(path, content=text, headers={"Content-Type": "application/json"}))
    assert error["param"] in ("body", "prompt", "messages")


def test_other_content_types_are_refused(served):
    for kind in ("text/plain", "multipart/form-data", "application/x-www-form-urlencoded", ""):
        answer = served.http.post("/v1/completions", content=b"{}", headers={"Content-Type": kind})
        assert refused(answer, 415)["param"] == "content-type"


@pytest.mark.slow
@pytest.mark.parametrize(
    "field",
    [
        {"user": "a", "metadata": {"a": "b"}, "store": False, "something_new": [1]},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]},
        {"best_of": 1, "parallel_tool_calls": True, "use_beam_search": False, "echo": False, "suffix": None},
        {"no_stop_trim": False, "return_hidden_states": False, "stop_regex": [], "documents": []},
        {"length_penalty": 1.0, "spaces_between_special_tokens": True, "add_special_tokens": False},
        {"reasoning_effort": "medium", "verbosity": "medium", "prediction": {"type": "content", "content": "a"}},
        {field: None for field in (BOTH | OF_CHAT) if field != "messages"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "ap"}], "name": "a"}]},
        {"messages": [{"role": "user", "content": "a", "tool_calls": [], "function_call": None}]},
    ],
)
def test_what_asks_for_nothing_is_ignored(served, field):
    answer = served.http.post("/v1/chat/completions", json=CHAT | {"max_completion_tokens": 2} | field)
    assert answer.status_code == 200, answer.text


def test_a_part_of_any_kind_is_named(served):
    parts = [{"type": "text", "text": "ap"}, {"type": "a|b|c"}]
    error = refused(served.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}]}))
    assert error["param"] == "messages.0.content.1.type"
    assert error["message"].startswith("messages.0.content.1.type: got 'a|b|c', expected 'text': this server reads")
