"""The accepted path moves to the front of the tail, bit for bit, and nothing else changes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType
from races import MODES, cases, no_races

from eagle3_jax.kernels.cache.api import commit

SLOTS = 512


def example(seed, *, batch=2, kv_heads=2, head_dim=64, nodes=5, tail=40, page_size=None, count=2):
    """Caches of random bits with a page table or None, lengths, a path, and the caches that a loop makes of them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, SLOTS - tail + 1, batch)
    path = np.stack([np.sort(rng.choice(tail, nodes, replace=False)) for _ in range(batch)])
    path = np.take_along_axis(path, np.minimum(np.arange(nodes)[None], rng.integers(0, nodes, (batch, 1))), axis=1)
    size = page_size or SLOTS
    table = rng.permutation(batch * SLOTS // size + 2)[:-2].reshape(batch, -1) if page_size else None
    rows = batch if table is None else table.size + 2
    caches = rng.integers(0, 1 << 32, (count, rows, kv_heads, size, head_dim), np.uint32).view(np.int32)
    expected = caches.copy()
    for i in range(batch):

        def place(slot, i=i):
            return (i, slot) if table is None else (table[i, slot // size], slot % size)

        for j in range(nodes):
            (row, at), (to, there) = place(lengths[i] + path[i, j]), place(lengths[i] + j)
            expected[:, to, :, there] = caches[:, row, :, at]
    if table is not None:
        for i in range(batch):  # entries behind the tail may be anything
            table[i, -(-(lengths[i] + tail) // size) :] = 10**6
    return [*caches], lengths, path, table, [*expected]


@pytest.mark.slow
@examples(5)
@given(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([64, 80, 128, 256]),
    nodes=st.sampled_from([1, 5, 9, 20]),
    dtype=st.sampled_from(["float32", "bfloat16", "int8", "float8_e4m3fn"]),
    page_size=st.sampled_from([None, None, 128, 256]),
    seed=st.integers(0, 1000),
)
def test_commit_equals_the_loop(batch, kv_heads, head_dim, nodes, dtype, page_size, seed):
    caches, lengths, path, table, expected = example(
        seed, batch=batch, kv_heads=kv_heads, head_dim=head_dim, nodes=nodes, page_size=page_size
    )
    integers = {1: jnp.int8, 2: jnp.int16, 4: jnp.int32}[jnp.dtype(dtype).itemsize]

    def held(x):
        return jax.lax.bitcast_convert_type(jnp.asarray(x).astype(integers), dtype)

    for implementation in ("pallas", "xla"):
        got = commit(
            [held(x) for x in caches],
            jnp.asarray(lengths, jnp.int32),
            jnp.asarray(path, jnp.int32),
            page_table=None if table is None else jnp.asarray(table, jnp.int32),
            implementation=implementation,
            interpret=pltpu.InterpretParams(),
        )
        for cache, want in zip(got, expected, strict=True):
            if implementation == "pallas":
                assert np.asarray(cache).tobytes() == np.asarray(held(want)).tobytes()
            else:  # XLA for CPU may give a NaN other bits
                np.testing.assert_array_equal(np.asarray(cache, np.float32), np.asarray(held(want), np.float32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "cores", "page_size"),
    cases(itertools.product(MODES, (1, 2), (None, 128)), daily=[("eager", 2, 128)]),
)
def test_races_and_reads_of_what_was_never_written(mode, cores, page_size):
    caches, lengths, path, table, expected = example(0, batch=3, nodes=20, page_size=page_size)
    arguments = [jnp.asarray(x) for x in caches], jnp.asarray(lengths, jnp.int32), jnp.asarray(path, jnp.int32)
    table = None if table is None else jnp.asarray(table, jnp.int32)
    with no_races(mode, cores) as races:
        got = commit(*arguments, page_table=table, implementation="pallas", interpret=races)
        for cache, want in zip(got, expected, strict=True):
            np.testing.assert_array_equal(cache, want)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [None, 128])
def test_sharded_equals_unsharded(page_size):
    caches, lengths, path, table, expected = example(1, batch=4, kv_heads=4, page_size=page_size)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    arguments = [jnp.asarray(x) for x in caches], jnp.asarray(lengths, jnp.int32), jnp.asarray(path, jnp.int32)
    table = None if table is None else jnp.asarray(table, jnp.int32)
    with jax.set_mesh(mesh):
        got = jax.jit(lambda *x: commit(*x, page_table=table, implementation="pallas", interpret=True))(*arguments)
    for cache, want in zip(got, expected, strict=True):
        np.testing.assert_array_equal(cache, want)


def test_caches_of_different_shapes_are_refused():
    row = jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match=r"caches: got .*, expected one shape and dtype"):
        commit([jnp.zeros((1, 1, 128, 8)), jnp.zeros((1, 1, 256, 8))], row, row[:, None])
