"""The packaged prompts: enough, distinct, clean, and on both sides of a split."""

import collections
import pathlib

import pytest

from eagle3_jax.data import filters, personal, sources
from eagle3_jax.data.duplicates import Duplicates
from eagle3_jax.data.split import Split, widest


@pytest.fixture(scope="module")
def prompts() -> list[sources.Prompt]:
    found = list(sources.packaged())
    assert all(isinstance(record, dict) for record in found)
    return found  # pyrefly: ignore


def test_at_least_fifty_of_each_category(prompts):
    counts = collections.Counter(prompt["category"] for prompt in prompts)
    assert set(counts) == {"code", "chat", "long_context", "math", "multilingual"}
    assert min(counts.values()) >= 50 and sum(counts.values()) >= 250


def test_ids_are_distinct_and_every_prompt_is_one_user_turn(prompts):
    assert len({prompt["id"] for prompt in prompts}) == len(prompts)
    assert {tuple(message["role"] for message in prompt["messages"]) for prompt in prompts} == {("user",)}


def test_long_context_is_long(prompts):
    lengths = [
        len(filters.content(prompt["messages"]).split()) for prompt in prompts if prompt["category"] == "long_context"
    ]
    assert min(lengths) >= 150 and max(lengths) <= 600


@pytest.mark.slow
def test_nothing_is_filtered(prompts):
    duplicates = Duplicates(near=0.8)
    for prompt in prompts:
        assert filters.refuse(prompt["messages"], max_chars=8000) is None
        redacted, found = filters.redact(prompt["messages"], personal.redact)
        assert (redacted, dict(found)) == (prompt["messages"], {})
        assert duplicates.check(redacted) is None


@pytest.mark.parametrize("held_out", [0.1, 0.2, 0.3])
def test_every_category_is_held_out_in_part(prompts, held_out):
    hashes = [(digest, digest) for digest in (filters.content_hash(prompt["messages"]) for prompt in prompts)]
    split = Split(widest((x, x, y, y) for x, y in hashes), held_out)
    sides = [split.holds_out(*pair) for pair in hashes]
    counts = collections.Counter(prompt["category"] for prompt, held in zip(prompts, sides, strict=True) if held)
    assert len(counts) == 5
    assert abs(sum(counts.values()) / len(prompts) - held_out) < 0.06


def test_a_limit_takes_of_each_category(prompts):
    assert len({prompt["category"] for prompt in prompts[:5]}) == 5


def test_prompts_whose_answers_repeat_them_are_read_whole():
    """`configs/prompts/repeat_and_edit.jsonl`, by which drafts that are copied from the text are measured."""
    path = pathlib.Path(__file__).parents[2] / "configs/prompts/repeat_and_edit.jsonl"
    found, refused = sources.read_file(path)
    assert collections.Counter(prompt["category"] for prompt in found) == {"edit": 10, "summarise": 10, "extract": 10}
    assert refused == 0 and len({prompt["id"] for prompt in found}) == len(found)
    assert all(200 < len(filters.content(prompt["messages"])) < 2000 for prompt in found)
