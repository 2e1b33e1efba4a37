"""The split: stable, and never with an empty side."""

import hashlib

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from eagle3_jax.data.split import StratifiedSplit, by_category, joined


def of_all(hashes: list[tuple[str, str]], held_out: float) -> StratifiedSplit:
    """Of prompts of one category, each given as its (opening hash, content hash)."""
    return StratifiedSplit(by_category(("", *pair) for pair in hashes), held_out)


def sides(hashes: list[str], held_out: float) -> list[bool]:
    """Of prompts whose openings are all different where their contents are."""
    split = of_all([(digest, digest) for digest in hashes], held_out)
    return [split.holds_out("", digest, digest) for digest in hashes]


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
    alike = [(hashes[0], content) for content in hashes]  # where all begin alike, what follows decides
    split = of_all(alike, 0.1)
    assert abs(sum(split.holds_out("", *pair) for pair in alike) / 2000 - 0.1) < 0.02


def test_every_category_is_on_both_sides():
    """Of two prompts too, where hashing alone would put all on one; parts of the prompts give the same split."""
    hashes = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(300)]
    prompts = [("many" if i < 290 else f"few {i // 2}" if i < 299 else "one", x, x) for i, x in enumerate(hashes)]
    split = StratifiedSplit(by_category(prompts), 0.1)
    sides: dict[str, list[bool]] = {}
    for category, *rest in prompts:
        sides.setdefault(category, []).append(split.holds_out(category, *rest))
    assert all(set(found) == {True, False} for category, found in sides.items() if len(found) > 1)
    assert sides["one"] == [of_all([(x, x) for x in hashes], 0.1).holds_out("", hashes[-1], hashes[-1])]
    assert abs(sum(sides["many"]) / 290 - 0.1) < 0.05
    assert by_category(prompts) == joined([by_category(prompts[:7]), {}, by_category(prompts[7:])])
    with pytest.raises(ValueError, match="got 1 usable prompts"):
        StratifiedSplit(by_category(prompts[:1]), 0.1)
    alone = [("a", hashes[0], hashes[0]), ("b", hashes[1], hashes[1])]
    assert sorted(StratifiedSplit(by_category(alone), 0.001).holds_out(*x) for x in alone) == [False, True]
