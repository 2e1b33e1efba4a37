"""The model runner: how much memory its caches take."""

import jax
import jax.numpy as jnp
import pytest

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding import runner
from eagle3_jax.decoding.engine import Engine

CHAIN = DraftTree(num_steps=3, topk=1, num_draft_tokens=4)
PAGE_SIZE = 16


def pretend(monkeypatch, **memory: int) -> None:
    """The device says that it has so much memory."""
    monkeypatch.setattr(type(jax.local_devices()[0]), "memory_stats", lambda _: memory)


@pytest.mark.parametrize("kv_dtype", [None, jnp.dtype("float8_e4m3fn")])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_share_of_the_memory_is_filled_and_not_exceeded(toy, monkeypatch, drafts, kv_dtype):
    limit, used = 1 << 20, 100_000
    pretend(monkeypatch, bytes_limit=limit, bytes_in_use=used)
    draft = toy.good if drafts else None
    tokens = runner.tokens_that_fit(toy.target, draft, 0.8, PAGE_SIZE, kv_dtype)
    pages = tokens // PAGE_SIZE + 1  # with the page that nothing is read from

    def bytes_of(pages: int) -> int:
        caches = [toy.target.empty_pages(pages, PAGE_SIZE, kv_dtype)]
        if draft is not None:
            caches.append(draft.head.empty_pages(pages, PAGE_SIZE))
        return sum(leaf.nbytes for leaf in jax.tree.leaves(caches))

    assert used + bytes_of(pages) <= 0.8 * limit < used + bytes_of(pages + 1)


def test_an_engine_of_a_share_of_the_memory_answers(toy, monkeypatch):
    pretend(monkeypatch, bytes_limit=1 << 20, bytes_in_use=100_000)
    engine = Engine(toy.target, None, toy.good, CHAIN, max_length=64, page_size=PAGE_SIZE, memory_fraction=0.8)
    monkeypatch.undo()
    assert engine.stats().pages > 64 // PAGE_SIZE
    with pytest.raises(ValueError, match=r"memory_fraction: .*does not tell its memory; give kv_tokens"):
        Engine(toy.target, None, toy.good, CHAIN, max_length=64, page_size=PAGE_SIZE, memory_fraction=0.8)


def test_memory_without_room_for_one_request_is_refused(toy, monkeypatch):
    pretend(monkeypatch, bytes_limit=110_000, bytes_in_use=100_000)
    with pytest.raises(ValueError, match=r"kv_tokens: got 0, expected at least 80, room for one request"):
        Engine(toy.target, None, max_length=64, page_size=PAGE_SIZE, memory_fraction=0.8)
