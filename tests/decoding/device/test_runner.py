"""The model runner: how much memory its caches take, and what compilers leave behind."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from eagle3_jax.config import DraftTree, MeshConfig
from eagle3_jax.decoding.choice.tiers import WITH_HEAD
from eagle3_jax.decoding.device import calls, runner
from eagle3_jax.decoding.device.calls import Models, PromptChunk
from eagle3_jax.decoding.device.memory import empty_state, tokens_that_fit
from eagle3_jax.decoding.device.shapes import Sizes
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.tier import VANILLA
from eagle3_jax.mesh import make_mesh, put, replicated, shardings
from eagle3_jax.models.families.llama import Llama
from eagle3_jax.models.layers import SHARDING_RULES
from eagle3_jax.runs import machine

CHAIN = DraftTree(num_steps=3, topk=1, num_draft_tokens=4)
PAGE_SIZE = 16


def pretend(monkeypatch, **memory: int) -> None:
    """Makes the device report this much memory."""
    monkeypatch.setattr(type(jax.local_devices()[0]), "memory_stats", lambda _: memory)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", [None, jnp.dtype("float8_e4m3fn")])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_share_of_the_memory_is_filled_and_not_exceeded(toy, monkeypatch, drafts, kv_dtype):
    limit, used = 1 << 20, 100_000
    pretend(monkeypatch, bytes_limit=limit, bytes_in_use=used)
    draft, tiers = (toy.good, WITH_HEAD) if drafts else (None, [VANILLA])
    sizes = Sizes.plan(2, 64, PAGE_SIZE, tiers)
    tokens = tokens_that_fit(toy.target, draft, 0.8, sizes, tiers, kv_dtype)

    def bytes_of(pages: int) -> int:
        planned = dataclasses.replace(sizes, pages=pages)
        return sum(
            x.nbytes for x in jax.tree.leaves(empty_state(Models.of(toy.target, draft), planned, tiers, kv_dtype))
        )

    pages = tokens // PAGE_SIZE
    assert used + bytes_of(pages) <= 0.8 * limit < used + bytes_of(pages + 1)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_on_a_mesh_a_device_is_filled_whether_or_not_the_heads_divide(monkeypatch, kv_heads):
    """One KV head is on both devices whole, so half as many tokens fit."""
    pretend(monkeypatch, bytes_limit=(limit := 1 << 20), bytes_in_use=0)
    mesh, tiers = make_mesh(MeshConfig(data=1, model=2), jax.devices()[:2]), [VANILLA]
    config = tiny.llama_config(num_attention_heads=2, num_key_value_heads=kv_heads, head_dim=16)
    target = Llama(config, rngs=nnx.Rngs(0))
    target = jax.device_put(target, shardings(target, mesh, SHARDING_RULES))
    sizes = Sizes.plan(2, 64, PAGE_SIZE, tiers)
    pages = tokens_that_fit(target, None, 0.8, sizes, tiers, None) // PAGE_SIZE

    def taken(pages: int) -> int:
        planned = dataclasses.replace(sizes, pages=pages)
        runs = runner.ModelRunner(target, None, tiers, planned, None)
        runs.run(calls.note_prompt(runs.sizes, 0, [1, 2]))
        return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(runs._state))

    assert taken(pages) <= 0.8 * limit < taken(pages + 1)


def test_an_engine_of_a_share_of_the_memory_answers(toy, monkeypatch):
    pretend(monkeypatch, bytes_limit=1 << 20, bytes_in_use=100_000)
    engine = Engine(toy.target, None, toy.good, CHAIN, max_length=64, page_size=PAGE_SIZE, memory_fraction=0.8)
    monkeypatch.undo()
    assert engine.stats().pages > 64 // PAGE_SIZE
    with pytest.raises(ValueError, match=r"memory_fraction: .*does not tell its memory; give kv_tokens"):
        Engine(toy.target, None, toy.good, CHAIN, max_length=64, page_size=PAGE_SIZE, memory_fraction=0.8)
    pretend(monkeypatch, bytes_limit=110_000, bytes_in_use=100_000)
    with pytest.raises(ValueError, match=r"kv_tokens: got 0, expected at least 80, room for one request"):
        Engine(toy.target, None, max_length=64, page_size=PAGE_SIZE, memory_fraction=0.8)


def test_what_compilers_freed_goes_back_when_a_program_was_compiled(toy, monkeypatch):
    released = []
    monkeypatch.setattr(machine, "release_freed", lambda: released.append(1))
    odd_length = 72  # which no other test has compiled programs of
    runs = runner.ModelRunner(toy.target, None, [VANILLA], Sizes.plan(1, odd_length, PAGE_SIZE, [VANILLA]), None)
    runs.run(calls.note_prompt(runs.sizes, 0, [1, 2]))
    assert released == [1], "a call that compiles"
    runs.run(calls.note_prompt(runs.sizes, 0, [1, 2]))
    assert released == [1], "a call that compiles nothing"


def test_a_dispatch_sends_one_array(toy, monkeypatch):
    """Whatever it says: a chunk of prompts, rounds of some slots, a head that catches up, a prompt's tokens."""
    mesh, sent = make_mesh(MeshConfig(data=1, model=1), jax.devices()[:1]), []
    target, tiers = jax.device_put(toy.target, replicated(mesh)), [VANILLA, *WITH_HEAD]
    runs = runner.ModelRunner(target, toy.good, tiers, Sizes.plan(5, 64, PAGE_SIZE, tiers), None)
    monkeypatch.setattr(runner, "put", lambda value, sharding: sent.append(value.dtype) or put(value, sharding))
    chunk, sizes = PromptChunk.of((), 4, 16, runs.sizes), runs.sizes
    every = [
        calls.prefill(sizes, rows=4, length=16),
        calls.decode(sizes, width=5, tier=VANILLA),
        calls.decode(sizes, [1], [2, 0], 4, 1, width=4, tier=VANILLA),
        calls.catch_up(sizes, [4], 3),
        calls.note_prompt(sizes, 2, [7, 8]),
        calls.rehearse(sizes.measured_length),
    ]
    placed = [runs._arguments(call, None)[-1] for call in every]
    assert sent == [np.int32] * len(every)
    arguments = [one.arguments() for one in placed]
    for leaf, packed in zip(jax.tree.leaves(chunk), jax.tree.leaves(arguments[0]), strict=True):
        assert leaf.dtype == packed.dtype
        np.testing.assert_array_equal(leaf, packed)
    assert [None if x is None else x.tolist() for x in arguments[1][:4]] == [[False] * 5, None, 0, 0]
    assert [x.tolist() for x in arguments[2][:4]] == [[False, True, False, False, False], [2, 0, 5, 5], 4, 1]
    assert [(x[4].tier, bool(x[4].greedy)) for x in arguments[1:3]] == [(VANILLA, True)] * 2
    assert [x.tolist() for x in arguments[3]] == [[False] * 4 + [True], [3]]
    assert [x.tolist() for x in arguments[4]] == [2, [7, 8] + [-1] * 62]
