"""OpenAI's shapes of an answer, without a server."""

import pytest
import tiny

from eagle3_jax.decoding.request import Output, Piece, Stats
from eagle3_jax.serve.bodies import ChatShape, CompletionShape, Tokens


@pytest.mark.parametrize("reasoning", ["They greet.", ""])
def test_reasoning_stands_beside_the_content(reasoning):
    shape = ChatShape(Tokens(tiny.make_byte_tokenizer(None)))
    extra = {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}
    whole = shape.whole(0, Output([1], "Hello!", "stop", Stats(1, []), reasoning=reasoning))
    assert whole["message"] == {"role": "assistant", "content": "Hello!"} | extra
    part = shape.part(0, Piece("", [1], None, [0], None, reasoning=reasoning))
    assert part["delta"] == extra


def test_a_completion_has_all_of_it_in_its_text():
    shape = CompletionShape(Tokens(tiny.make_byte_tokenizer(None)))
    output = Output([1, 2], "Hello!", "stop", Stats(1, []), reasoning="They greet.")
    assert shape.whole(0, output)["text"] == "They greet.Hello!"
    assert shape.part(0, Piece("", [1], None, [0], None, reasoning="They"))["text"] == "They"
