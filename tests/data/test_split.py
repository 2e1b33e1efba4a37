"""The split: stable, and never with an empty side."""

import hashlib

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from eagle3_jax.data.split import Split, bounds, widest


def sides(hashes: list[str], held_out: float) -> list[bool]:
    """Of prompts whose openings are all different where their contents are."""
    pairs = [(digest, digest) for digest in hashes]
    split = Split(bounds(pairs), held_out)
    assert Split(widest(filter(None, (bounds([pair]) for pair in pairs))), held_out) == split
    return [split.holds_out(*pair) for pair in pairs]


@examples(30)
@given(st.sets(st.text(min_size=1), min_size=3, max_size=40), st.floats(0.05, 0.95))
def test_is_stable_when_prompts_are_added(texts, held_out):
    hashes = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest() for text in sorted(texts)]
    whole = dict(zip(hashes, sides(hashes, held_out), strict=True))
    assert set(whole.values()) == {True, False}
    by_hash = {digest: int(digest[:16], 16) / 2**64 < held_out for digest in hashes}
    if set(by_hash.values()) == {True, False}:
        assert whole == by_hash


def test_share_and_minimum():
    hashes = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(2000)]
    assert abs(sum(sides(hashes, 0.1)) / 2000 - 0.1) < 0.02
    assert sorted(sides(hashes[:2], 0.001)) == [False, True]
    assert sorted(sides(hashes[:2], 0.999)) == [False, True]
    with pytest.raises(ValueError, match="got 1 usable prompts, expected at least 2"):
        sides(hashes[:1], 0.5)
    for held_out in (0.001, 0.999):  # prompts that begin alike stay together there too
        first, second, third = sides([hashes[0], hashes[1], hashes[0]], held_out)
        assert first == third != second
