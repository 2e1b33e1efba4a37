"""Text that comes in pieces is the text, and no piece cuts a character."""

import itertools

from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from eagle3_jax.decoding.detokenizer import Detokenizer


class ByteTokenizer:
    """One token a byte; 256 is special."""

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return bytes(token for token in ids if token < 256).decode(errors="replace")


@examples(50)
@given(st.text(max_size=12), st.lists(st.integers(1, 4), max_size=20))
def test_pieces_join_to_the_text(text, sizes):
    ids = [*text.encode(), 256]
    detokenizer, pieces = Detokenizer(ByteTokenizer()), []
    for size in sizes:
        if len(ids) > size:
            pieces.append(detokenizer.add(ids[:size], last=False))
            ids = ids[size:]
    pieces.append(detokenizer.add(ids, last=True))
    assert "".join(pieces) == text
    assert "�" in text or not any("�" in piece for piece in pieces)


def test_a_character_that_never_ends_is_shown_at_the_end():
    detokenizer = Detokenizer(ByteTokenizer())
    assert detokenizer.add([97, 0xC3], last=False) == ""
    assert detokenizer.add([], last=True) == "a�"


class WordTokenizer:
    """As Llama 2's: 0 is special and left out, a word carries the space in front of it, a text's first one loses it."""

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return "".join(" " + "_abc"[token] for token in ids if token).removeprefix(" ")


def test_a_special_token_eats_no_space():
    for ids in itertools.product(range(4), repeat=5):
        detokenizer = Detokenizer(WordTokenizer())
        pieces = [detokenizer.add([token], last=False) for token in ids] + [detokenizer.add([], last=True)]
        assert "".join(pieces) == WordTokenizer().decode(ids, skip_special_tokens=True), ids
