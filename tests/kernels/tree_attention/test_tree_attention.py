"""Tree attention against an independent loop, over many shapes; unused slots may hold anything and stay as they are."""

import itertools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType
from races import MODES, cases, no_races

from eagle3_jax.kernels.tree_attention import tpu, tpu_kernel
from eagle3_jax.kernels.tree_attention.api import append, tree_attention
from eagle3_jax.kernels.tree_attention.plan import BLOCKS, plan


def reference(q, k, v, lengths, mask, first=None, sinks=None):
    """One query at a time, in float64."""
    b, t, n, d = q.shape
    group = n // k.shape[1]
    out = np.zeros(q.shape)
    for i in range(b):
        for j in range(t):
            seen = list(range(lengths[i])) + [lengths[i] + m for m in np.flatnonzero(mask[i, j])]
            if first is not None:
                seen = [slot for slot in seen if slot >= first[i][j]]
            for h in range(n):
                scores = k[i, h // group, seen].astype(float) @ q[i, j, h].astype(float) / np.sqrt(d)
                if sinks is not None:
                    scores = np.append(scores, sinks[h])
                weights = np.exp(scores - scores.max())
                out[i, j, h] = (weights / weights.sum())[: len(seen)] @ v[i, h // group, seen].astype(float)
    return out


def taken(cache, at, count, poison):
    """`count` entries of each sequence from slot `at` on, [b, count, k, d], and the cache with poison instead."""
    new, old = [], cache.copy()
    for i in range(len(cache)):
        new.append(cache[i, :, at[i] : at[i] + count].swapaxes(0, 1))
        old[i, :, at[i] : at[i] + count] = poison
    return np.stack(new), old


def random_tree(rng, batch, nodes, tail):
    """Ancestor masks of random trees whose last `nodes` of `tail` are asked, and the nodes' depths."""
    mask, depths = np.zeros((batch, tail, tail), bool), np.zeros((batch, tail), int)
    for i in range(batch):
        for j in range(tail):
            if j:
                parent = rng.integers(0, j)
                mask[i, j], depths[i, j] = mask[i, parent], depths[i, parent] + 1
            mask[i, j, j] = True
    return mask[:, tail - nodes :], depths[:, tail - nodes :]


@pytest.mark.slow
@examples(5)
@given(
    batch=st.integers(1, 3),
    nodes=st.integers(1, 6),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    causal=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_xla_equals_the_loop(batch, nodes, kv_heads, group, causal, seed):
    rng = np.random.default_rng(seed)
    slots, d = 16, 4
    lengths = rng.integers(0, slots - nodes + 1, batch)
    q = rng.normal(size=(batch, nodes, kv_heads * group, d)).astype(np.float32)
    k, v = rng.normal(size=(2, batch, kv_heads, slots, d)).astype(np.float32)
    mask = np.tril(np.ones((nodes, nodes), bool)) & (rng.random((batch, nodes, nodes)) < 0.6)
    mask |= np.eye(nodes, dtype=bool)
    if causal:
        mask = np.broadcast_to(np.tril(np.ones((nodes, nodes), bool)), mask.shape)
    expected = reference(q, k, v, lengths, mask)
    (new_k, old_k), (new_v, old_v) = (taken(x, lengths, nodes, 1e9) for x in (k, v))
    for i in range(batch):  # poison what lies behind the tail
        for x in (k, v, old_k, old_v):
            x[i, :, lengths[i] + nodes :] = 1e9
    arguments: list[Any] = [
        *(jnp.asarray(x) for x in (q, new_k, new_v, old_k, old_v)),
        jnp.asarray(lengths, jnp.int32),
        None if causal else jnp.asarray(mask),
    ]
    got, *caches = tree_attention(*arguments)
    np.testing.assert_allclose(got, expected, atol=2e-5, rtol=2e-5)
    for cache, written in zip(caches, (k, v), strict=True):
        np.testing.assert_array_equal(cache, written)


def paged(rows, table, page_size, poison):
    """[b, k, slots, d] cut into the pages that the table names; the others are poison."""
    pages = np.full((table.size + 2, rows.shape[1], page_size, rows.shape[3]), poison, np.float32)
    for i, j in np.ndindex(table.shape):
        pages[table[i, j]] = rows[i, :, j * page_size : (j + 1) * page_size]
    return pages


# Every two values of any two of these meet in some case; a third of them is tried every day.
NAMES = "batch, nodes, extra, kv_heads, group, head_dim, dtype, kind, contiguous, page_size, block, rows"
FAST_CASES = [
    (2, 1, 5, 1, 1, 96, "float32", "tree", True, 256, 256, 64),
    (3, 1, 0, 1, 9, 128, "bfloat16", "causal", False, 32, 128, 64),
]
CASES = [
    (3, 2, 5, 1, 1, 128, "bfloat16", "window", False, 256, 2048, 64),
    (1, 1, 5, 1, 1, 96, "float8_e4m3fn", "causal", False, 256, 2048, 64),
    (1, 33, 0, 2, 1, 128, "float8_e4m3fn", "sinks", False, 32, 2048, 512),
    (1, 70, 5, 1, 4, 256, "bfloat16", "window", False, 128, 128, 64),
    (2, 2, 0, 1, 3, 64, "float8_e4m3fn", "causal", True, 128, 2048, 512),
    (3, 7, 5, 2, 4, 80, "float8_e4m3fn", "causal", False, 256, 128, 64),
    (3, 16, 5, 1, 3, 64, "bfloat16", "sinks", True, 32, 256, 64),
    (3, 1, 0, 2, 3, 96, "float8_e4m3fn", "window", True, 256, 128, 512),
    (2, 2, 0, 2, 3, 256, "float32", "tree", False, 32, 128, 512),
    (1, 2, 0, 1, 4, 128, "float8_e4m3fn", "causal", True, 256, 256, 64),
    (3, 16, 0, 2, 4, 80, "bfloat16", "tree", False, 128, 2048, 512),
    (2, 7, 5, 1, 1, 80, "float8_e4m3fn", "window", True, 128, 2048, 512),
    (2, 33, 5, 1, 4, 64, "float32", "sinks", False, 256, 128, 64),
    (3, 70, 5, 2, 1, 256, "float8_e4m3fn", "sinks", False, 128, 256, 512),
    (3, 33, 5, 2, 3, 128, "float32", "window", True, 128, 2048, 512),
    (1, 70, 0, 1, 3, 64, "float8_e4m3fn", "window", True, 32, 256, 64),
    (1, 7, 0, 1, 4, 256, "float32", "causal", True, 32, 2048, 512),
    (2, 16, 0, 1, 1, 96, "bfloat16", "window", False, 256, 128, 64),
    (1, 2, 5, 1, 3, 80, "float8_e4m3fn", "sinks", True, 32, 256, 512),
    (1, 16, 0, 1, 3, 128, "float8_e4m3fn", "tree", False, 32, 128, 512),
    (3, 7, 5, 2, 3, 64, "bfloat16", "tree", False, 128, 256, 64),
    (2, 33, 0, 1, 4, 96, "bfloat16", "causal", True, 256, 256, 512),
    (2, 70, 0, 2, 4, 80, "float8_e4m3fn", "tree", False, 256, 2048, 512),
    (2, 1, 5, 1, 4, 96, "bfloat16", "sinks", True, 128, 128, 512),
    (1, 33, 0, 2, 4, 256, "float8_e4m3fn", "tree", False, 256, 256, 64),
    (3, 70, 5, 1, 1, 96, "float32", "causal", False, 32, 128, 512),
    (3, 16, 0, 1, 1, 64, "float8_e4m3fn", "causal", True, 256, 2048, 512),
    (2, 7, 0, 1, 3, 128, "bfloat16", "sinks", True, 128, 128, 64),
    (2, 1, 0, 2, 4, 80, "float32", "tree", False, 32, 256, 64),
    (1, 16, 0, 1, 3, 256, "float32", "sinks", False, 128, 256, 512),
    (2, 1, 5, 1, 3, 128, "float8_e4m3fn", "window", True, 128, 2048, 64),
    (2, 1, 5, 2, 1, 64, "float8_e4m3fn", "window", False, 256, 128, 512),
    (1, 2, 5, 2, 3, 96, "float8_e4m3fn", "window", True, 32, 2048, 512),
    (3, 7, 5, 2, 1, 96, "bfloat16", "sinks", False, 128, 128, 64),
    (3, 70, 0, 2, 3, 128, "float32", "sinks", True, 128, 2048, 512),
    (3, 1, 5, 2, 3, 256, "float8_e4m3fn", "sinks", False, 256, 128, 512),
    (1, 33, 5, 2, 3, 80, "float8_e4m3fn", "window", False, 32, 2048, 512),
]


@pytest.mark.parametrize(
    NAMES,
    [
        *FAST_CASES,
        *(pytest.param(*case, marks=pytest.mark.long if i % 18 else pytest.mark.slow) for i, case in enumerate(CASES)),
    ],
)
def test_pallas_equals_the_loop(
    batch, nodes, extra, kv_heads, group, head_dim, dtype, kind, contiguous, page_size, block, rows
):
    check(batch, nodes, extra, kv_heads, group, head_dim, dtype, kind, contiguous, page_size, block, rows, seed=0)


@pytest.mark.long
@settings(max_examples=200)
@given(
    batch=st.integers(1, 3),
    nodes=st.sampled_from([1, 2, 7, 16, 33, 70]),
    extra=st.sampled_from([0, 0, 5]),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3, 4, 9]),
    head_dim=st.sampled_from([64, 80, 96, 128, 256]),
    dtype=st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]),
    kind=st.sampled_from(["tree", "tree", "causal", "window", "sinks"]),
    contiguous=st.booleans(),
    page_size=st.sampled_from([32, 128, 256]),
    block=st.sampled_from([128, 256, 2048]),
    rows=st.sampled_from([64, 512]),
    seed=st.integers(0, 1000),
)
def test_pallas_equals_the_loop_in_any_case(**case):
    check(**case)


def check(
    batch, nodes, extra, kv_heads, group, head_dim, dtype, kind, contiguous, page_size, block, rows, seed, races=None
):
    """Whatever the page size and what is computed at a time: up to four blocks of several pages, or all pages in one,
    and queries in one or several tiles."""
    rng = np.random.default_rng(seed)
    slots = 480 if page_size == 32 else 512  # a whole number of blocks or not
    tail = nodes if kind == "causal" else nodes + extra
    lengths = rng.integers(0, slots - tail + 1, batch)
    q = rng.normal(size=(batch, nodes, kv_heads * group, head_dim)).astype(np.float32)
    k, v = rng.normal(size=(2, batch, kv_heads, slots, head_dim)).astype(np.float32)
    options, compute = {}, jnp.float32
    if dtype == "bfloat16":
        compute, q = jnp.bfloat16, np.array(jnp.asarray(q, jnp.bfloat16), np.float32)
    k, v = (np.array(jnp.asarray(x, dtype), np.float32) for x in (k, v))
    mask, depths = random_tree(rng, batch, nodes, tail)
    if kind == "causal":
        mask = np.broadcast_to(np.tril(np.ones((nodes, nodes), bool)), mask.shape)
    first = np.maximum(lengths[:, None] + depths - 59, 0) if kind == "window" else None
    sinks = rng.normal(size=kv_heads * group).astype(np.float32) if kind == "sinks" else None
    expected = reference(q, k, v, lengths, mask, first, sinks)
    if first is not None:
        options["first"] = jnp.asarray(first, jnp.int32)
    if sinks is not None:
        options["sinks"] = jnp.asarray(sinks)
    poison, begin = np.nan, lengths + tail - nodes
    (new_k, old_k), (new_v, old_v) = (taken(x, begin, nodes, poison) for x in (k, v))
    for i in range(batch):
        for x in (k, v, old_k, old_v):
            x[i, :, lengths[i] + tail :] = poison
    if not contiguous:
        table = rng.permutation(batch * slots // page_size + 2)[:-2].reshape(batch, -1)
        k, v, old_k, old_v = (paged(x, table, page_size, poison) for x in (k, v, old_k, old_v))
        for i in range(batch):  # entries behind the tail may be anything
            table[i, -(-(lengths[i] + tail) // page_size) :] = 10**6
        options["page_table"] = jnp.asarray(table, jnp.int32)
    arguments: tuple[Any, ...] = (
        *(jnp.asarray(x, compute) for x in (q, new_k, new_v)),
        *(jnp.asarray(x).astype(dtype) for x in (old_k, old_v)),
        jnp.asarray(lengths, jnp.int32),
        None if kind == "causal" else jnp.asarray(mask),
    )
    tolerance = 2e-2 if dtype == "bfloat16" else 5e-5
    for implementation in ("pallas", "xla"):
        if implementation == "xla" and (contiguous or races):  # no NaNs in rows: it has them times 0
            continue
        with mock.patch.dict(BLOCKS["default"], keys_per_head=block, rows=rows):
            got, *caches = tree_attention(
                *arguments, **options, implementation=implementation, interpret=races or pltpu.InterpretParams()
            )
        np.testing.assert_allclose(
            np.asarray(got, np.float32), expected, atol=tolerance, rtol=tolerance, err_msg=implementation
        )
        for cache, written in zip(caches, (k, v), strict=True):
            assert np.asarray(cache).tobytes() == np.asarray(jnp.asarray(written).astype(dtype)).tobytes()


def example(batch=2, nodes=20, kv_heads=2, group=2, slots=512, seed=0):
    """Arguments of a call with a tree, contiguous."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(batch, nodes, kv_heads * group, 64)).astype(np.float32)
    k, v = rng.normal(size=(2, batch, kv_heads, slots, 64)).astype(np.float32)
    lengths = rng.integers(0, slots - nodes + 1, batch).astype(np.int32)
    new_k, new_v = rng.normal(size=(2, batch, nodes, kv_heads, 64)).astype(np.float32)
    return [jnp.asarray(x) for x in (q, new_k, new_v, k, v, lengths, random_tree(rng, batch, nodes, nodes)[0])]


def assert_equal(got, expected):
    np.testing.assert_allclose(got[0], expected[0], atol=2e-5, rtol=2e-5)
    for cache, other in zip(got[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(cache, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "cores", "case"),
    cases(
        ((mode, 1 + (i + j) % 2, case) for i, case in enumerate(CASES) for j, mode in enumerate(MODES)),
        daily=[("eager", 1, CASES[0]), ("on_wait", 2, CASES[4])],
    ),
)
def test_races_and_reads_of_what_was_never_written(mode, cores, case, monkeypatch):
    """Two cores of a device share the sequences where they divide, the KV heads of each where they do not."""
    for module in (tpu, tpu_kernel):
        monkeypatch.setattr(module, "cores", lambda: cores)
    with no_races(mode, cores) as races:
        check(*case, seed=0, races=races)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", pytest.param("on_wait", marks=pytest.mark.long)])
def test_a_sequence_may_continue_the_one_before_it(mode):
    """Two rows of 16 tokens of one prompt, on its pages: what the first writes the second reads."""
    rng = np.random.default_rng(0)
    q, new_k, new_v = (jnp.asarray(rng.normal(size=(1, 32, n, 64)), jnp.float32) for n in (4, 2, 2))
    k, v = jnp.asarray(rng.normal(size=(2, 3, 2, 128, 64)), jnp.float32)
    table = jnp.array([[2, 1]], jnp.int32)
    whole = tree_attention(q, new_k, new_v, k, v, jnp.array([120]), page_table=table, implementation="xla")
    rows_q, rows_k, rows_v = (x.reshape(2, 16, *x.shape[2:]) for x in (q, new_k, new_v))
    with no_races(mode) as races:  # eager: what is fetched ahead is fetched then, not when it is waited for
        got = tree_attention(
            *(rows_q, rows_k, rows_v, k, v, jnp.array([120, 136])),
            page_table=jnp.repeat(table, 2, axis=0),
            continued=True,
            implementation="pallas",
            interpret=races,
        )
        assert_equal((got[0].reshape(whole[0].shape), *got[1:]), whole)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "mode"), cases(itertools.product((5, 40), MODES), daily=[(5, "eager")]))
def test_entries_are_appended_without_attention(tokens, mode):
    """Behind different lengths, over a page's end, next to slots that were never written."""
    rng = np.random.default_rng(0)
    new_k, new_v = jnp.asarray(rng.normal(size=(2, 2, tokens, 2, 64)), jnp.float32)
    cache = np.full((2, 6, 2, 128, 64), np.nan, np.float32)
    cache[:, :, :, :20] = 1.0
    keys, values = jnp.asarray(cache)
    operands = new_k, new_v, keys, values, jnp.array([126, 20])
    table = jnp.array([[3, 1], [2, 5]], jnp.int32)
    with no_races(mode) as races:
        got = append(*operands, page_table=table, implementation="pallas", interpret=races)
        assert_equal(got, append(*operands, page_table=table, implementation="xla"))
    written = np.asarray(got[0])[[3, 1]].swapaxes(0, 1).reshape(2, 256, 64)[:, 126 : 126 + tokens]
    np.testing.assert_array_equal(written, np.asarray(new_k)[0].swapaxes(0, 1))


@pytest.mark.parametrize("implementation", ["xla", "cpu", pytest.param("pallas", marks=pytest.mark.slow)])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("nodes, extra", [(5, 0), (5, 2), (1, 0)])
def test_keys_that_are_the_values_are_one_cache(implementation, paged, nodes, extra):
    """It says what two equal caches say, to the bit, and holds what each of them holds."""
    rng, slots, d = np.random.default_rng(1), 128, 192
    keys = jnp.asarray(rng.normal(size=(6, 1, 64, d) if paged else (2, 1, slots, d)), jnp.float32)
    table = jnp.asarray([[3, 1], [5, 0]], jnp.int32) if paged else None
    new = jnp.asarray(rng.normal(size=(2, nodes, 1, d)), jnp.float32)
    queries, lengths = jnp.asarray(rng.normal(size=(2, nodes, 3, d)), jnp.float32), jnp.asarray([60, 17])
    mask = jnp.asarray(np.tril(np.ones((2, nodes, nodes + extra), bool), extra)) if extra else None
    given = {"page_table": table, "implementation": implementation, "interpret": implementation == "pallas"}
    expected, own, _ = tree_attention(queries, new, new, keys, keys, lengths, mask, **given)
    got, kept, nothing = tree_attention(queries, new, None, keys, None, lengths, mask, **given)
    assert nothing is None
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(kept, own)
    if implementation != "cpu":
        written, nothing = append(new, None, keys, None, lengths + extra, **given)
        assert nothing is None
        np.testing.assert_array_equal(written, own)


@pytest.mark.slow
# 3 sequences do not divide over the data axis.
@pytest.mark.parametrize("batch", [pytest.param(4, marks=pytest.mark.long), 3])
def test_sharded_equals_unsharded(batch):
    arguments = example(batch=batch, kv_heads=4)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    expected = tree_attention(*arguments, implementation="xla")
    with jax.set_mesh(mesh):
        got = jax.jit(lambda *x: tree_attention(*x, implementation="pallas", interpret=True))(*arguments)
    assert_equal(got, expected)


@pytest.mark.parametrize("tokens", [64, 256, 1024])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [(32, 32, 128, jnp.bfloat16), (40, 40, 128, jnp.bfloat16), (32, 32, 128, jnp.float32), (16, 8, 256, jnp.float32)],
)
def test_prompts_of_targets_with_many_kv_heads_fit(heads, kv_heads, head_dim, dtype, tokens):
    """Llama 2 7B and 13B, Gemma 3 12B, on one chip."""
    shapes = (1, tokens, heads, head_dim), (64, kv_heads, 128, head_dim)
    shape = plan(*shapes, (dtype, dtype), tail=tokens, pages=64, continued=True)
    assert shape.tile * shape.tiles == shape.nodes >= tokens


def test_what_cannot_be_is_refused_with_numbers():
    bf16 = (jnp.bfloat16, jnp.bfloat16)
    with pytest.raises(ValueError, match=r"slots: got 200, expected a multiple of 16"):
        plan((1, 4, 8, 128), (1, 8, 200, 128), bf16, tail=4, pages=None)
    with pytest.raises(ValueError, match=r"VMEM: got \d+\.\d MiB .* expected at most 56 MiB"):
        plan((1, 64, 512, 128), (1, 512, 4096, 128), bf16, tail=64, pages=None)
    # 256 sequences of 128k tokens in pages of 16: the page table alone.
    with pytest.raises(
        ValueError, match=r"SMEM: got 8\.0 MiB for 256 sequences, 8192 pages each, expected at most 0\.9375 MiB"
    ):
        plan((256, 64, 32, 128), (4096, 8, 16, 128), bf16, tail=64, pages=8192)
    plan((256, 64, 32, 128), (256, 8, 131072, 128), bf16, tail=64, pages=None)  # contiguous: no table
