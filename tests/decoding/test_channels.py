"""gpt-oss' channels: the answer is what `final` holds, the reasoning all else, however the tokens come."""

from typing import Any

import pytest
import tiny

from eagle3_jax.decoding.channels import Channels
from eagle3_jax.decoding.device.report import Progress
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.request import Request

MARKS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"]
OPENING = "<|start|>user<|message|>What is <|channel|> ?<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>They greet.<|end|>"
TOOL = "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
ANSWER = "<|start|>assistant<|channel|>final<|message|>Hello, Zoë!<|return|>"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny.make_byte_tokenizer(None, additional_special_tokens=MARKS, eos_token="<|return|>")


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("prompt", "said", "answer", "reasoning"),
    [
        (OPENING, THOUGHT + ANSWER, "Hello, Zoë!", "They greet."),
        (OPENING, THOUGHT + TOOL + ANSWER, "Hello, Zoë!", "They greet.{}"),
        (OPENING, "<|message|>No channel.<|end|>", "No channel.", ""),
        (OPENING + "<|channel|>analysis<|message|>So", " they greet.<|end|>" + ANSWER, "Hello, Zoë!", " they greet."),
        (OPENING + "<|channel|>final<|message|>", "Hello!<|return|>", "Hello!", ""),
        ("Once upon", " a time", " a time", ""),
    ],
)
def test_tokens_are_sorted_by_channel_wherever_they_are_cut(tokenizer, prompt, said, answer, reasoning):
    ids = ids_of(tokenizer, said)
    for size in (1, 3, len(ids)):
        channels, got = Channels(tokenizer, ids_of(tokenizer, prompt)), ([], [])
        for start in range(0, len(ids), size):
            for part, new in zip(got, channels.split(ids[start : start + size]), strict=True):
                part.extend(new)
        text = [tokenizer.decode(part, skip_special_tokens=True) for part in got]
        assert text == [answer, reasoning]


class Driver:
    """All tokens are there already."""

    def drive(self, ready):
        assert ready()

    def drive_in_background(self):
        raise AssertionError

    def abort(self, *requests):
        raise AssertionError


@pytest.mark.parametrize("stop", [(), ("greet", ", Z")])
def test_a_request_streams_both_and_stops_in_the_answer_alone(tokenizer, stop):
    prompt, ids = ids_of(tokenizer, OPENING), ids_of(tokenizer, THOUGHT + ANSWER)
    request = Request(Driver(), tokenizer, prompt, SamplingParams(max_tokens=len(ids), stop=stop), len(ids), 0)
    pieces, stream = [], iter(request)
    for place, token in enumerate(ids, 1):
        done = place == len(ids)
        progress = Progress([token], [0], None, done, False, 1, 0, 0, [], [])
        if ending := request.take(progress, frozenset({ids[-1]})):
            request.publish(request.finish(*ending))
        pieces.append(next(stream))
        if request.done:
            break
    assert request.output is not None
    assert request.output.text == "".join(piece.text for piece in pieces) == ("Hello" if stop else "Hello, Zoë!")
    assert request.output.reasoning == "".join(piece.reasoning for piece in pieces) == "They greet."
    assert request.output.finish_reason == "stop"


def test_a_tokenizer_may_have_none(tokenizer):
    other = tiny.make_byte_tokenizer(None, eos_token="</s>", unk_token="<unk>")
    ids = ids_of(other, "<|channel|>analysis<|message|>x")
    assert Channels(other, ids).split(ids) == (ids, [])
