"""Attention of the training-time test against a dense softmax in float64, and the kernels against the plain form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.test_util import check_grads
from races import MODES, cases, no_races

from eagle3_jax.kernels.ttt_attention import tpu, xla
from eagle3_jax.kernels.ttt_attention.api import document_starts, ttt_attention
from eagle3_jax.kernels.ttt_attention.tpu import plan


def example(batch=2, length=20, kv_heads=2, group=2, head_dim=8, steps=3, documents=3, seed=0, dtype=jnp.float32):
    """Queries, keys, values, segment ids; the keys of all steps."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(batch, length, kv_heads * group, head_dim))
    k, v = rng.normal(size=(2, steps, batch, length, kv_heads, head_dim))
    segments = np.sort(rng.integers(1, documents + 1, (batch, length)), axis=1)
    return [*(jnp.asarray(x, dtype) for x in (q, k, v)), jnp.asarray(segments)]


def dense(q, k, v, segments, newest, window):
    """One softmax over every key of every step, under a mask of all of them, float64."""
    q, k, v, segments = (np.asarray(x).astype(np.float64) for x in (q, k, v, segments))
    group = q.shape[2] // k.shape[3]
    k, v = (np.repeat(x[: newest + 1], group, axis=3) for x in (k, v))
    steps, batch, length = k.shape[:3]
    index = np.arange(length)
    same = segments[:, :, None] == segments[:, None, :]
    mask = np.stack([same & (index[:, None] >= index), *[np.broadcast_to(np.eye(length) > 0, same.shape)] * newest])
    behind = index[:, None] + newest - (index + np.arange(steps)[:, None, None])  # a key of step s stands s further
    mask &= (behind < (window or np.inf))[:, None]
    scores = np.einsum("btnd,sbund->bntsu", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(mask.transpose(1, 2, 0, 3)[:, None], scores, -np.inf).reshape(batch, -1, length, steps * length)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True)).reshape(batch, -1, length, steps, length)
    return np.einsum("bntsu,sbund->btnd", weights, v)


def with_gradients(arguments, newest, cotangent, **options):
    """The result, and gradients of queries, keys and values."""
    *floats, segments = arguments

    def weighed(q, k, v):
        attended = ttt_attention(q, k, v, segments, newest, **options)
        return jnp.sum(attended.astype(jnp.float32) * cotangent), attended

    (_, attended), gradients = jax.jit(jax.value_and_grad(weighed, argnums=(0, 1, 2), has_aux=True))(*floats)
    return [np.asarray(x, np.float32) for x in (attended, *gradients)]


@pytest.mark.slow
@examples(5)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 40),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    steps=st.integers(1, 5),
    beyond=st.one_of(st.none(), st.integers(0, 9)),
    seed=st.integers(0, 1000),
)
def test_xla_equals_one_dense_softmax(batch, length, kv_heads, group, steps, beyond, seed):
    q, k, v, segments = example(batch, length, kv_heads, group, steps=steps, seed=seed)
    newest, window = seed % steps, None if beyond is None else steps + beyond
    got = ttt_attention(q, k, v, segments, newest, window=window, implementation="xla")
    np.testing.assert_allclose(got, dense(q, k, v, segments, newest, window), atol=2e-5, rtol=2e-5)


@pytest.mark.long
def test_blocks_of_queries_change_nothing(monkeypatch):
    arguments = example(length=37)
    whole = with_gradients(arguments, 2, 1.0, implementation="xla")
    monkeypatch.setattr(xla, "_QUERIES", 8)
    for got, expected in zip(with_gradients(arguments, 2, 1.0, implementation="xla"), whole, strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.long
@examples(6)
@given(
    batch=st.integers(1, 2),
    length=st.integers(1, 700),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([64, 80, 128, 256]),
    steps=st.integers(1, 4),
    documents=st.integers(1, 4),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
    window=st.sampled_from([None, 4, 100, 600]),
    seed=st.integers(0, 1000),
)
def test_pallas_equals_xla_with_its_gradients(
    batch, length, kv_heads, group, head_dim, steps, documents, dtype, window, seed
):
    arguments = example(batch, length, kv_heads, group, head_dim, steps, documents, seed, dtype)
    cotangent = np.random.default_rng(seed + 1).normal(size=arguments[0].shape).astype(np.float32)
    newest = seed % steps
    exact = [x.astype(jnp.float32) for x in arguments[:3]] + arguments[3:]
    expected = with_gradients(exact, newest, cotangent, window=window, implementation="xla")
    got = with_gradients(arguments, newest, cotangent, window=window, implementation="pallas", interpret=True)
    tolerance = 1e-4 if dtype == jnp.float32 else 4e-2
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=tolerance * max(1, np.abs(y).max()), rtol=0)


@pytest.mark.slow
def test_gradients_by_finite_differences():
    q, k, v, segments = example(batch=1, length=6, steps=3)

    @jax.jit
    def attend(q, k, v):
        return ttt_attention(q, k, v, segments, 2, implementation="pallas", interpret=True)

    check_grads(attend, (q, k, v), order=1, modes=["rev"], atol=1e-2, rtol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_steps_that_are_still_to_come_are_not_read(implementation):
    """NaN there reaches neither the result nor a gradient."""
    q, k, v, segments = example(steps=4)
    options = {"implementation": implementation, "interpret": True}
    clean = with_gradients((q, k, v, segments), 1, 1.0, **options)
    poisoned = with_gradients((q, k.at[2:].set(jnp.nan), v.at[2:].set(jnp.nan), segments), 1, 1.0, **options)
    for got, expected in zip(poisoned, clean, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert not np.any(poisoned[2][2:])
    assert not np.any(poisoned[3][2:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "length", "head_dim", "blocks", "dtype"),
    cases(
        (
            (mode, *case)
            for mode in MODES
            for case in ((100, 64, 1, "float32"), (600, 128, 5, "float32"), (300, 80, 1, "bfloat16"))
        ),
        daily=[("on_wait", 100, 64, 1, "float32")],
    ),
)
def test_races_and_reads_of_what_was_never_written(mode, length, head_dim, blocks, dtype, monkeypatch):
    """Forward and backward, with a row's keys in VMEM at once or in blocks."""
    arguments = example(batch=1, length=length, kv_heads=1, head_dim=head_dim, dtype=dtype)
    if blocks > 1:
        monkeypatch.setattr(tpu, "VMEM_LIMIT", 4 << 20)
    assert plan(arguments[0].shape, arguments[1].shape, dtype).blocks == blocks
    with no_races(mode) as races:
        got = with_gradients(arguments, 2, 1.0, implementation="pallas", interpret=races)
    exact = [x.astype(jnp.float32) for x in arguments[:3]] + arguments[3:]
    tolerance = 1e-4 if dtype == "float32" else 4e-2
    for x, y in zip(got, with_gradients(exact, 2, 1.0, implementation="xla"), strict=True):
        np.testing.assert_allclose(x, y, atol=tolerance * max(1, np.abs(y).max()), rtol=0)


# 3 rows do not divide over the data axis.
@pytest.mark.slow
@pytest.mark.parametrize("batch", [4, 3])
def test_sharded_equals_unsharded(batch):
    arguments = example(batch, length=30, kv_heads=4)
    expected = with_gradients(arguments, 2, 1.0, implementation="xla")
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        got = with_gradients(arguments, 2, 1.0, implementation="pallas", interpret=True)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5, rtol=2e-5)


@pytest.mark.long
@examples(20)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_documents_start_where_the_segment_id_changes(lengths):
    segments = np.repeat(np.arange(1, len(lengths) + 1), lengths)[None]
    expected = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    np.testing.assert_array_equal(document_starts(jnp.asarray(segments))[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "documents", "window"),
    [("xla", 3, None), ("pallas", 3, 300), pytest.param("pallas", 1, None, marks=pytest.mark.long)],
)
def test_stretches_of_a_row_attend_as_the_whole_row_does(implementation, documents, window, monkeypatch):
    """Its keys pass in two blocks and more: gradients of a key are summed over blocks, stretches, and tiles."""
    monkeypatch.setattr(tpu, "VMEM_LIMIT", 8 << 20)
    q, k, v, segments = example(1, 768, 1, 2, 128, 3, documents)
    assert plan((1, 256, 2, 128), (3, 1, 768, 1, 128), q.dtype).blocks > 1
    cotangent = np.random.default_rng(1).normal(size=q.shape).astype(np.float32)
    expected = with_gradients((q, k, v, segments), 2, cotangent, window=window, implementation="xla")

    def stretches(q, k, v):
        options = {"row": (k[0], v[0]), "window": window, "implementation": implementation, "interpret": True}
        parts = [
            ttt_attention(q[:, at], k[:, :, at], v[:, :, at], segments, 2, begin=at.start, **options)
            for at in (slice(0, 256), slice(256, 456), slice(456, 768))
        ]
        attended = jnp.concatenate(parts, axis=1)
        return jnp.sum(attended * cotangent), attended

    (_, attended), gradients = jax.jit(jax.value_and_grad(stretches, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    for x, y in zip((attended, *gradients), expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * max(1, np.abs(y).max()), rtol=0)


def test_a_long_row_passes_through_vmem_in_blocks():
    keys = functools.partial(lambda row, heads=8: (7, 1, row, heads, 128))
    assert plan((1, 8192, 32, 128), keys(8192), jnp.bfloat16).blocks == 1
    assert plan((1, 4096, 32, 128), keys(32768), jnp.bfloat16).blocks == 2
    with pytest.raises(ValueError, match=r"VMEM: got \d+\.\d MiB .* expected at most 56 MiB"):
        plan((1, 8192, 128, 128), keys(8192, 1), jnp.bfloat16)
