"""Text that comes in pieces is the text: no piece cuts a character, and gpt-oss' channels are sorted."""

import itertools
from typing import Any

import pytest
import tiny
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from eagle3_jax.decoding.device.report import Advance
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.request import Output, Piece, Request
from eagle3_jax.decoding.text import Channels, Detokenizer

MARKS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"]
OPENING = "<|start|>user<|message|>What is <|channel|> ?<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>They greet.<|end|>"
TOOL = "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
ANSWER = "<|start|>assistant<|channel|>final<|message|>Hello, Zoë!<|return|>"


class ByteTokenizer:
    """As byte-level BPE: a token is a byte, or these bytes, which may be parts of two characters; 256 is special."""

    more = (b"\x82\xe3\x81", b"\x80\xf0\x9f\x98", b" \xf0\x9f", " あ".encode())

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        held = (bytes([i]) if i < 256 else b"" if i == 256 else self.more[i - 257] for i in ids)
        return b"".join(held).decode(errors="replace")


def in_pieces(tokenizer: Any, ids: list[int], sizes: list[int]) -> list[str]:
    detokenizer, pieces = Detokenizer(tokenizer), []
    for size in sizes:
        pieces.append(detokenizer.add(ids[:size], last=False))
        ids = ids[size:]
    return [*pieces, detokenizer.add(ids, last=True)]


@pytest.mark.slow
@examples(50)
@given(st.text(max_size=12), st.lists(st.integers(1, 4), max_size=20))
def test_pieces_join_to_the_text(text, sizes):
    pieces = in_pieces(ByteTokenizer(), [*text.encode(), 256], sizes)
    assert "".join(pieces).rstrip("�") == text.rstrip("�")
    assert "�" in text or not any("�" in piece for piece in pieces)


@examples(100)
@given(
    st.lists(st.sampled_from([97, 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 0xE3, 0x81, 0x82, 256, 257, 258, 259, 260])),
    st.lists(st.integers(1, 5), max_size=20),
)
def test_bytes_of_no_character_and_parts_of_two_are_shown_as_they_are(ids, sizes):
    joined = "".join(in_pieces(ByteTokenizer(), ids, sizes))
    assert joined == "".join(in_pieces(ByteTokenizer(), ids, [])), "the same, wherever it is cut"
    assert joined.rstrip("�") == ByteTokenizer().decode(ids, True).rstrip("�")


@pytest.mark.parametrize("sizes", [[], [1], [1, 1]])
def test_a_character_that_never_ends_is_left_out(sizes):
    assert "".join(in_pieces(ByteTokenizer(), [97, 0xC3], sizes)) == "a"
    assert "".join(in_pieces(ByteTokenizer(), [97, 259], sizes)) == "a "  # of a token with a part of it


class WordTokenizer:
    """As Llama 2's: 0 is special and left out, a word carries the space in front of it, a text's first one loses it."""

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return "".join(" " + "_abc"[token] for token in ids if token).removeprefix(" ")


def test_a_special_token_eats_no_space():
    for ids in (*itertools.product(range(4), repeat=5), (1, *[0] * 9, 2)):
        pieces = in_pieces(WordTokenizer(), list(ids), [1] * len(ids))
        assert "".join(pieces) == WordTokenizer().decode(ids, skip_special_tokens=True), ids


@pytest.mark.slow
@pytest.mark.parametrize("start", ["", "a", "\xc3"], ids=["", "behind a letter", "behind half a character"])
@pytest.mark.parametrize("token", [256, 0xC3, 97, 257, 259], ids=["special", "half", "whole", "two halves", "space"])
@pytest.mark.parametrize("size", [1, 600])
def test_few_tokens_are_decoded_again_whatever_they_are(start, token, size):
    decoded = []

    class Counting(ByteTokenizer):
        def decode(self, ids, skip_special_tokens):
            decoded.append(len(ids))
            return super().decode(ids, skip_special_tokens)

    ids = [*start.encode("latin-1"), *[token] * 1200]
    in_pieces(Counting(), ids, [size] * (len(ids) // size))
    assert sum(decoded) < 40 * len(ids)


# A token a byte, as Gemma 3 and Llama 2 have them for what is no word: a run of them is text whole, or not at all.
BYTES = {"<unk>": 0, "</s>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)} | {"▁ok": 258, "▁": 259}


@pytest.fixture(scope="module")
def fallback() -> Any:
    backend = Tokenizer(models.BPE(vocab=BYTES, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


@examples(100)
@given(st.lists(st.one_of(st.sampled_from("éあ🙂 "), st.sampled_from([0xC3, 0xF0, 1, 258, 259]))), st.data())
def test_a_run_of_bytes_is_the_same_wherever_it_is_cut(fallback, parts, data):
    runs = [[2 + byte for byte in x.encode()] if isinstance(x, str) else [x] for x in parts]
    ids = list(itertools.chain.from_iterable(runs))
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    joined = "".join(in_pieces(fallback, ids, data.draw(st.lists(st.integers(1, 5), max_size=20))))
    assert joined == "".join(in_pieces(fallback, ids, []))
    whole = fallback.decode(ids, skip_special_tokens=True)
    assert "�" in whole or joined == whole


@pytest.mark.parametrize("sizes", [[], [3], [1] * 9])
def test_a_byte_of_no_character_takes_none_of_those_before_it_along(fallback, sizes):
    ids = [258, *(2 + byte for byte in "éあ".encode()), 2 + 0xC3, 258]
    assert "".join(in_pieces(fallback, ids, sizes)).replace("�", "") == "okéあ ok"


class Driver:
    """All tokens are there already."""

    def drive(self, ready):
        assert ready()

    def drive_in_background(self):
        raise AssertionError

    def abort(self, *requests):
        raise AssertionError


def asked(tokenizer: Any, prompt: list[int], ids: list[int], eos: int, **params: Any) -> tuple[Output, list[Piece]]:
    """A request's output, a token at a time, and its pieces; it ends with these tokens."""
    request = Request(Driver(), tokenizer, prompt, SamplingParams(max_tokens=len(ids), **params), len(ids), 0)
    pieces, stream = [], iter(request)
    for place, token in enumerate(ids, 1):
        ending = request.take(Advance([token], [0], place == len(ids), False, [], rounds=1), frozenset({eos}))
        if ending is not None:
            request.publish(request.finish(*ending))
        pieces.append(next(stream))
        if request.done:
            break
    assert request.output is not None
    return request.output, pieces


def answer(tokenizer: Any, ids: list[int], **params: Any) -> tuple[Output, str]:
    output, pieces = asked(tokenizer, [258], ids, 1, **params)
    return output, "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("stop", [(), ("never",)])
@pytest.mark.parametrize("missing", [0, 1, 2, 3])
def test_of_an_answer_that_is_cut_in_a_character_all_others_stay(fallback, stop, missing):
    text = "አማርኛ🙂".encode()
    ids = [258, *(2 + byte for byte in text[: len(text) - missing])]
    output, streamed = answer(fallback, ids, stop=stop)
    assert output.text == streamed == ("okአማርኛ" if missing else "okአማርኛ🙂")
    assert output.finish_reason == "length"


def test_a_stop_token_s_own_text_is_no_part_of_the_answer():
    tokenizer = tiny.make_tokenizer()
    ids = tokenizer(" apple bird snow", add_special_tokens=False)["input_ids"]
    for params in ({"stop_token_ids": (ids[-1],)}, {"stop_token_ids": (ids[-1],), "stop": ("w", "never")}):
        output, streamed = answer(tokenizer, ids, **params)
        assert output.text == streamed == " apple bird"
        assert (output.finish_reason, output.token_ids) == ("stop", ids)
    for params in ({}, {"stop_token_ids": (ids[0],), "ignore_eos": True}):  # cut by the limit
        output, streamed = answer(tokenizer, ids, **params)
        assert output.text == streamed == " apple bird snow"
    assert answer(tokenizer, [*ids, 1])[0].text == " apple bird snow"
    assert answer(tokenizer, ids, stop=(" snow",))[0].text == " apple bird"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny.make_byte_tokenizer(None, additional_special_tokens=MARKS, eos_token="<|return|>")


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("prompt", "generated", "answer", "reasoning"),
    [
        (OPENING, THOUGHT + ANSWER, "Hello, Zoë!", "They greet."),
        (OPENING, THOUGHT + TOOL + ANSWER, "Hello, Zoë!", "They greet.{}"),
        (OPENING, "<|message|>No channel.<|end|>", "No channel.", ""),
        (OPENING + "<|channel|>analysis<|message|>So", " they greet.<|end|>" + ANSWER, "Hello, Zoë!", " they greet."),
        (OPENING + "<|channel|>final<|message|>", "Hello!<|return|>", "Hello!", ""),
        ("Once upon", " a time", " a time", ""),
    ],
)
def test_tokens_are_sorted_by_channel_wherever_they_are_cut(tokenizer, prompt, generated, answer, reasoning):
    ids = ids_of(tokenizer, generated)
    for size in (1, 3, len(ids)):
        channels, got = Channels(tokenizer, ids_of(tokenizer, prompt)), ([], [])
        for start in range(0, len(ids), size):
            for part, new in zip(got, channels.split(ids[start : start + size]), strict=True):
                part.extend(new)
        text = [tokenizer.decode(part, skip_special_tokens=True) for part in got]
        assert text == [answer, reasoning]


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_a_call_stays_in_the_text_as_it_is_written_for_who_asks_for_special_tokens(tokenizer, stop):
    other = "<|channel|>commentary to=functions.g <|constrain|>json<|message|>{1}<|return|>"
    prompt, ids = ids_of(tokenizer, OPENING), ids_of(tokenizer, THOUGHT + TOOL + ANSWER[:-10] + "<|end|>" + other)
    output, pieces = asked(tokenizer, prompt, ids, ids[-1], stop=stop, skip_special_tokens=False)
    assert output.text == "".join(piece.text for piece in pieces) == TOOL + "Hello, Zoë!" + other[:-10]
    assert output.reasoning == "".join(piece.reasoning for piece in pieces) == "They greet."
    direct = ids_of(tokenizer, TOOL.removeprefix("<|start|>assistant"))  # its header begins in the prompt
    assert asked(tokenizer, prompt, direct, direct[-1], skip_special_tokens=False)[0].text == TOOL[:-8]


@pytest.mark.parametrize("stop", [(), ("greet", ", Z")])
def test_a_request_streams_both_and_stops_in_the_answer_alone(tokenizer, stop):
    prompt, ids = ids_of(tokenizer, OPENING), ids_of(tokenizer, THOUGHT + ANSWER)
    output, pieces = asked(tokenizer, prompt, ids, ids[-1], stop=stop)
    assert output.text == "".join(piece.text for piece in pieces) == ("Hello" if stop else "Hello, Zoë!")
    assert output.reasoning == "".join(piece.reasoning for piece in pieces) == "They greet."
    assert output.finish_reason == "stop"


def test_a_tokenizer_may_have_none(tokenizer):
    other = tiny.make_byte_tokenizer(None, eos_token="</s>", unk_token="<unk>")
    ids = ids_of(other, "<|channel|>analysis<|message|>x")
    assert Channels(other, ids).split(ids) == (ids, [])
