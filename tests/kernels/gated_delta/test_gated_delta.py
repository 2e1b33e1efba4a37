"""The gated delta rule: trees, prompts and commits are the recurrence along each path, token by token in numpy."""

import functools
import itertools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from races import MODES, no_races

from eagle3_jax.kernels.gated_delta import api, solve, tpu, walk
from eagle3_jax.kernels.gated_delta.solve import Tokens

# Heads of keys and of values, d_k, d_v.
SHAPES = ((1, 1, 4, 16), (2, 4, 8, 48), (3, 3, 5, 16))
NODES, LONGEST = 9, 150


def recurrence(*operands):
    """One sequence, [t, heads, d] and [n, d_k, d_v], in float64."""
    queries, keys, values, decays, betas, states = operands
    state, group, outputs = np.array(states, np.float64), values.shape[1] // keys.shape[1], []
    for query, key, value, decay, beta in zip(queries, keys, values, decays, betas, strict=True):
        outputs.append(np.zeros(value.shape))
        for h in range(len(value)):
            state[h] *= np.exp(decay[h])
            update = beta[h] * (value[h] - state[h].T @ key[h // group])
            state[h] += np.outer(key[h // group], update)
            outputs[-1][h] = state[h].T @ query[h // group]
    return np.array(outputs), state


@functools.cache
def operands(shape: tuple[int, int, int, int], b: int, t: int, seed: int = 0) -> tuple[Any, ...]:
    """Queries, keys, values, decays, betas and states."""
    rng, (k, n, d_k, d_v) = np.random.default_rng(seed), shape
    queries, keys = rng.normal(size=(2, b, t, k, d_k))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    decays, betas = -rng.exponential(size=(b, t, n)), rng.uniform(size=(b, t, n))
    every = queries, keys, rng.normal(size=(b, t, n, d_v)), decays, betas, rng.normal(size=(b, n, d_k, d_v))
    return tuple(x.astype(np.float32) for x in every)


def placed(tokens: Any) -> Tokens:
    return Tokens(*(jnp.asarray(x) for x in tokens))


def random_mask(draws: list[int]) -> np.ndarray:
    mask = np.eye(len(draws), dtype=bool)
    for node, draw in enumerate(draws):
        if draw % (node + 1):
            mask[node] |= mask[draw % (node + 1) - 1]
    return mask


# What XLA's implementation is on CPUs, what it is elsewhere, and the kernel for TPUs in the interpreter.
INTERPRETED = {name: functools.partial(getattr(tpu, name), interpret=True) for name in ("chain", "tree")}
BEHIND_XLA: Any = {"walk": walk, "solve": solve, "kernel": types.SimpleNamespace(**INTERPRETED, fold=solve.fold)}
FORMS = ["cpu", *BEHIND_XLA]


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    """The implementation to ask for."""
    if request.param != "cpu":
        monkeypatch.setattr(api, "_form", lambda: BEHIND_XLA[request.param])
    return "cpu" if request.param == "cpu" else "xla"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draws=st.lists(st.integers(0, 50), min_size=NODES, max_size=NODES), leaf=st.integers(0, NODES - 1))
def test_a_tree_is_its_branches_and_a_committed_path_the_recurrence(form, shape, draws, leaf):
    """In slots that are not the rows'; a row without one, and a row that commits nothing, write none."""
    *tokens, states = operands(shape, 4, NODES)
    slots = np.array([2, 0, 4, 1], np.int32)
    mask = np.stack([random_mask(draws), random_mask(draws[::-1]), random_mask(draws), random_mask(draws)])
    tree = jax.jit(functools.partial(api.tree, implementation=form))
    outputs, updates = tree(placed(tokens), states, slots, mask)
    for row in range(2):
        for node in range(NODES):
            path = np.flatnonzero(mask[row, node])
            expected, _ = recurrence(*(x[row, path] for x in tokens), states[slots[row]])
            np.testing.assert_allclose(outputs[row, node], expected[-1], atol=1e-4)
    paths = [np.flatnonzero(x[leaf]) for x in mask]
    along = np.stack([np.pad(path, (0, NODES - len(path)), mode="edge") for path in paths])
    _, keys, _, decays, _ = tokens
    nodes = (np.take_along_axis(x, along.reshape(4, -1, *[1] * (x.ndim - 2)), axis=1) for x in (keys, updates, decays))
    counts = np.array([len(paths[0]), 0, len(paths[2]), len(paths[3])], np.int32)
    folded = jax.jit(functools.partial(api.fold, implementation=form))(states, slots, *nodes, counts)
    for row in (0, 3):
        _, expected = recurrence(*(x[row, paths[row]] for x in tokens), states[slots[row]])
        np.testing.assert_allclose(folded[slots[row]], expected, atol=1e-4)
    np.testing.assert_array_equal(folded[0], states[0])
    np.testing.assert_array_equal(folded[3], states[3])


@pytest.mark.parametrize(("shape", "t"), [(SHAPES[0], 3), (SHAPES[1], 64), (SHAPES[2], LONGEST)], ids=str)
def test_a_prompt_is_the_recurrence_and_a_document_begins_anew(form, shape, t):
    """Documents begin inside a chunk and at its edge; a token without decay and beta changes nothing."""
    *tokens, states = (np.array(x) for x in operands(shape, 3, t))
    begins, slots, kept = np.zeros((3, t), bool), np.array([2, 0, 3], np.int32), np.array([True, False, True])
    begins[0, [place for place in (1, 40, 64, 100) if place < t]] = True
    padding = slice(t - t // 4, t)
    tokens[3][1, padding], tokens[4][1, padding] = 0, 0
    chain = jax.jit(functools.partial(api.chain, implementation=form))
    outputs, after = chain(placed(tokens), states, slots, begins, kept)
    for row in range(2):  # the third one has no slot
        edges = [0, *(place for place in np.flatnonzero(begins[row]) if place), t]
        state = states[slots[row]]
        for start, end in itertools.pairwise(edges):
            state = np.zeros_like(state) if begins[row, start] else state
            expected, state = recurrence(*(x[row, start:end] for x in tokens), state)
            np.testing.assert_allclose(outputs[row, start:end], expected, atol=2e-4)
        if kept[row]:
            np.testing.assert_allclose(after[slots[row]], state, atol=2e-4)
    np.testing.assert_array_equal(after[:2], states[:2])


def test_a_row_goes_on_where_the_one_before_it_ends(form):
    *tokens, states = operands(SHAPES[2], 3, 6)
    follows, slots = np.array([False, True, False]), np.arange(3, dtype=np.int32)
    chain = jax.jit(functools.partial(api.chain, implementation=form))
    outputs, after = chain(placed(tokens), states, slots, np.zeros((3, 6), bool), np.ones(3, bool), follows=follows)
    expected, state = recurrence(*(x[:2].reshape(12, *x.shape[2:]) for x in tokens), states[0])
    np.testing.assert_allclose(np.concatenate(outputs[:2]), expected, atol=1e-4)
    np.testing.assert_allclose(after[1], state, atol=1e-4)
    np.testing.assert_allclose(after[2], recurrence(*(x[2] for x in tokens), states[2])[1], atol=1e-4)


def test_the_kernel_reads_trees_of_several_blocks_on_a_mesh():
    """Rows are split over the data axis, heads over the model axis, as the caches are."""
    *tokens, states = operands((2, 4, 128, 128), 2, 40)
    mask = np.stack([random_mask(list(np.random.default_rng(row).integers(0, 500, 40))) for row in range(2)])
    read = functools.partial(api.tree, implementation="pallas", interpret=True)
    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)):
        outputs, updates = jax.jit(read)(placed(tokens), states, None, mask)
    for got, expected in zip((outputs, updates), jax.jit(solve.tree)(placed(tokens), states, mask), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4)
    for node in range(40):
        path = np.flatnonzero(mask[1, node])
        expected, _ = recurrence(*(x[1, path] for x in tokens), states[1])
        np.testing.assert_allclose(outputs[1, node], expected[-1], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_kernel_carries_states_without_races(mode):
    *tokens, states = operands((5, 10, 8, 8), 1, 100)
    begins = np.arange(100)[None] == 70
    with no_races(mode) as races:
        got = tpu.chain(placed(tokens), jnp.asarray(states), jnp.asarray(begins), interpret=races)
        for x, expected in zip(got, jax.jit(solve.chain)(placed(tokens), states, begins), strict=True):
            np.testing.assert_allclose(x, expected, atol=2e-4)


@pytest.mark.parametrize(("d", "t"), [(64, 8), (128, 65)])
def test_the_kernel_takes_heads_of_128_numbers_and_trees_of_64_nodes(d, t):
    *tokens, states = operands((1, 1, d, 128), 1, t)
    with pytest.raises(ValueError, match="implementation: got 'pallas', expected 'xla' or 'cpu' for these arguments"):
        api.tree(placed(tokens), jnp.asarray(states), None, None, implementation="pallas")


@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize("form", ["cpu", "xla"])
def test_on_a_cpu_drafts_change_no_bit(form, b):
    """A chain of nodes, a tree that holds it, one token after another, and a prompt: one answer, and one state."""
    shape, length = (2, 4, 16, 32), 6
    chain, tree, fold = (jax.jit(functools.partial(f, implementation=form)) for f in (api.chain, api.tree, api.fold))
    *tokens, states = operands(shape, b, length)
    slots = None if b == 1 else np.arange(b, dtype=np.int32)
    expected, state = chain(placed(tokens), states, slots, np.zeros((b, length), bool), np.ones(b, bool))
    spread = [np.repeat(x, 2, axis=1) for x in tokens]  # each node twice: the second one is a leaf
    mask = np.kron(np.tril(np.ones((length, length), bool)), [[1, 0], [1, 0]]) | np.eye(2 * length, dtype=int)
    twice = spread, np.stack([mask] * b).astype(bool), slice(None, None, 2)
    for nodes, sees, at in ((tokens, None, slice(None)), twice):
        outputs, updates = tree(placed(nodes), states, slots, sees)
        np.testing.assert_array_equal(outputs[:, at], expected)
        rows = nodes[1][:, at], updates[:, at], nodes[3][:, at]
        np.testing.assert_array_equal(fold(states, slots, *rows, np.full(b, length, np.int32)), state)
    one_by_one = jnp.asarray(states)
    for place in range(length):
        token = [x[:, place : place + 1] for x in tokens]
        output, update = tree(placed(token), one_by_one, slots, None)
        np.testing.assert_array_equal(output[:, 0], expected[:, place])
        one_by_one = fold(one_by_one, slots, token[1], update, token[3], np.ones(b, np.int32))
    np.testing.assert_array_equal(one_by_one, state)
