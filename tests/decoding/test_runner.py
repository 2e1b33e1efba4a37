"""The model runner: how much memory its caches take, and what compilers leave behind."""

import ctypes
import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import pytest

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding import runner
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.programs import Models, Sizes, empty_state
from eagle3_jax.decoding.tiers import VANILLA, WITH_HEAD

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
    draft, tiers = (toy.good, WITH_HEAD) if drafts else (None, [VANILLA])
    sizes = Sizes.plan(2, 64, PAGE_SIZE, tiers)
    tokens = runner.tokens_that_fit(toy.target, draft, 0.8, sizes, tiers, kv_dtype)

    def bytes_of(pages: int) -> int:
        planned = dataclasses.replace(sizes, pages=pages)
        return sum(
            x.nbytes for x in jax.tree.leaves(empty_state(Models.of(toy.target, draft), planned, tiers, kv_dtype))
        )

    pages = tokens // PAGE_SIZE
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


def resident_mib() -> float:
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


@pytest.mark.any_jax
def test_memory_that_was_freed_between_what_is_in_use_goes_back():
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("needs glibc")
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    runner._release_freed_memory()  # holes that other tests left would be filled
    size, before = 1 << 14, resident_mib()
    blocks = [libc.malloc(size) for _ in range(1 << 14)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for number, block in enumerate(blocks):
        if number % 64 < 63:
            libc.free(block)
    assert resident_mib() - before > 200, "without help it stays"
    runner._release_freed_memory()
    assert resident_mib() - before < 60
    for block in blocks[63::64]:
        libc.free(block)


def test_it_goes_back_when_a_program_was_compiled(toy, monkeypatch):
    released = []
    monkeypatch.setattr(runner, "_release_freed_memory", lambda: released.append(1))
    odd_length = 72  # which no other test has compiled programs of
    runs = runner.ModelRunner(toy.target, None, [VANILLA], Sizes.plan(1, odd_length, PAGE_SIZE, [VANILLA]), None)
    runs.note_prompt(0, [1, 2])
    assert released == [1], "a call that compiles"
    runs.note_prompt(0, [1, 2])
    assert released == [1], "a call that compiles nothing"
