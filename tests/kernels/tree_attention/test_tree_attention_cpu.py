"""Tree attention for CPUs against the form in XLA's operations, which test_tree_attention.py holds to a loop."""

import itertools

import arm
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from llvmlite import ir

from eagle3_jax.kernels.cpu import compiler
from eagle3_jax.kernels.tree_attention import xla as tree_attention_xla
from eagle3_jax.kernels.tree_attention.api import tree_attention
from eagle3_jax.kernels.tree_attention.cpu import supports, write_attention

TOLERANCE = {"float32": 2e-6, "bfloat16": 0.02}


def operands(rng, *, batch, nodes, kv_heads, group, d, page_size, lengths, extra, dtype):
    """Queries, new entries, caches in poisoned pages, lengths, a tree's mask (none where extra is None), page table."""
    tail = nodes if extra is None else nodes + extra
    columns = -(-(max(lengths) + tail) // page_size)
    pages = batch * columns + 1
    table = 1 + rng.permutation(batch * columns).reshape(batch, columns)
    caches = rng.normal(size=(2, pages, kv_heads, page_size, d))
    caches[:, 0] = np.nan
    for i, length in enumerate(lengths):  # nothing was written behind the tail, nor where the new entries go
        for slot in range(length + tail - nodes, columns * page_size):
            caches[:, table[i, slot // page_size], :, slot % page_size] = np.nan
    mask = None
    if extra is not None:
        mask = rng.random((batch, nodes, tail)) < 0.5
        mask[:, np.arange(nodes), extra + np.arange(nodes)] = True
    queries = rng.normal(size=(batch, nodes, kv_heads * group, d))
    new = rng.normal(size=(2, batch, kv_heads, nodes, d))
    floats = (jnp.asarray(x, dtype) for x in (queries, *new, *caches))
    return (
        *floats,
        jnp.asarray(lengths, jnp.int32),
        None if mask is None else jnp.asarray(mask),
        jnp.asarray(table, jnp.int32),
    )


in_xla = jax.jit(
    lambda *operands: tree_attention_xla.attend_xla(tree_attention_xla.Operands._make((*operands, None, None)))
)


@jax.jit
def run(queries, new_keys, new_values, *rest, table):
    """`tree_attention`, which takes new entries a token at a time."""
    return tree_attention(queries, new_keys.swapaxes(1, 2), new_values.swapaxes(1, 2), *rest, page_table=table)


def rows_in_use(caches, lengths, tail, table):
    """What the sequences have written, one after the other."""
    for cache in caches:
        for i, length in enumerate(lengths):
            rows = np.asarray(cache, np.float32)[np.asarray(table)[i]].swapaxes(0, 1)
            yield rows.reshape(rows.shape[0], -1, rows.shape[-1])[:, : length + tail]


@pytest.mark.slow
@examples(15)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=3),
    st.sampled_from([1, 2, 3, 5, 17, 130]),
    st.sampled_from([(1, 1), (3, 3), (2, 4)]),
    st.sampled_from([16, 64, 80]),
    st.sampled_from([4, 16, 64, 192, 256]),
    st.sampled_from([None, 0, 3]),
    st.sampled_from(sorted(TOLERANCE)),
    st.integers(0, 99),
)
def test_it_equals_the_form_of_xla(lengths, nodes, heads, d, page_size, extra, dtype, seed):
    sizes = {"batch": len(lengths), "nodes": nodes, "kv_heads": heads[0], "group": heads[1], "d": d}
    *tensors, mask, table = operands(
        np.random.default_rng(seed), **sizes, page_size=page_size, lengths=lengths, extra=extra, dtype=dtype
    )
    assert supports(tensors[0].dtype, tensors[3].dtype, d)
    got, *caches = run(*tensors, mask, table=table)
    expected, *written = in_xla(*tensors, mask, table)
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(expected, np.float32), rtol=0, atol=TOLERANCE[dtype]
    )
    tail = nodes + (extra or 0)
    for mine, other in zip(
        rows_in_use(caches, lengths, tail, table), rows_in_use(written, lengths, tail, table), strict=True
    ):
        np.testing.assert_array_equal(mine, other)


def test_neighbours_change_no_bit():
    """A query's result does not depend on other sequences, or on the queries beside it."""
    rng = np.random.default_rng(0)
    sizes = {"batch": 3, "nodes": 7, "kv_heads": 2, "group": 3, "d": 32, "page_size": 16, "dtype": "float32"}
    queries, new_keys, new_values, keys, values, lengths, _, table = operands(
        rng, **sizes, lengths=[40, 3, 200], extra=None
    )
    together, *_ = run(queries, new_keys, new_values, keys, values, lengths, None, table=table)
    for i, count in itertools.product(range(3), (1, 2, 6)):
        one = slice(i, i + 1)
        alone, *_ = run(
            *(queries[one, :count], new_keys[one, :, :count], new_values[one, :, :count], keys, values),
            *(lengths[one], None),
            table=table[one],
        )
        np.testing.assert_array_equal(alone[0], together[i, :count])


@examples(25)
@given(
    st.integers(0, 300),
    st.sampled_from([1, 5, 16, 60, 130]),
    st.sampled_from([0, 3]),
    st.sampled_from([4, 16, 64, 192, 512]),
    st.sampled_from(sorted(TOLERANCE)),
    st.integers(0, 99),
)
def test_what_a_node_sees_decides_its_bits(length, nodes, extra, page_size, dtype, seed):
    """A node of a tree has the result of the same tokens in a row, wherever hidden slots lie between them."""
    sizes = {"batch": 1, "nodes": nodes, "kv_heads": 2, "group": 3, "d": 32, "page_size": page_size, "dtype": dtype}
    rng = np.random.default_rng(seed)
    queries, *new, keys, values, lengths, mask, table = operands(rng, **sizes, lengths=[length], extra=extra)
    got, *caches = run(queries, *new, keys, values, lengths, mask, table=table)
    node = int(rng.integers(nodes))
    assert mask is not None
    slots = [*range(length), *(length + np.flatnonzero(mask[0, node]))]
    rows = [rows_of[0] for rows_of in (list(rows_in_use([x], [length], nodes + extra, table)) for x in caches)]
    path = [jnp.asarray(x[:, slots], dtype)[None] for x in rows]  # [1, k, seen, d]
    empty = [jnp.zeros_like(x) for x in caches]
    before = jnp.asarray([0], jnp.int32)
    whole = jnp.repeat(queries[:, node : node + 1], len(slots), axis=1)
    expected, *_ = run(whole, *path, *empty, before, None, table=table)
    np.testing.assert_array_equal(got[0, node], expected[0, -1])


def test_a_sequence_may_continue_the_one_before_it():
    """Three rows of 16 tokens of one prompt, on its pages, are one of 48."""
    sizes = {"batch": 1, "nodes": 48, "kv_heads": 2, "group": 3, "d": 32, "page_size": 32, "dtype": "float32"}
    queries, *new, keys, values, lengths, _, table = operands(
        np.random.default_rng(0), **sizes, lengths=[40], extra=None
    )
    expected, *written = run(queries, *new, keys, values, lengths, None, table=table)
    rows = [x.reshape(2, 3, 16, 32).swapaxes(0, 1) for x in new]
    starts, tables = lengths + 16 * jnp.arange(3, dtype=jnp.int32), jnp.repeat(table, 3, axis=0)
    got, *caches = run(queries.reshape(3, 16, 6, 32), *rows, keys, values, starts, None, table=tables)
    np.testing.assert_array_equal(got.reshape(expected.shape), expected)
    for mine, other in zip(caches, written, strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_key_that_is_no_number_is_seen(poison):
    """A request with such entries fails by its logits; they must not be hidden."""
    sizes = {"batch": 1, "nodes": 2, "kv_heads": 1, "group": 1, "d": 16, "page_size": 16, "dtype": "float32"}
    queries, new_keys, *rest, table = operands(np.random.default_rng(0), **sizes, lengths=[40], extra=None)
    for bad in (run(queries, new_keys * poison, *rest, table=table), in_xla(queries, new_keys * poison, *rest, table)):
        assert np.isnan(bad[0]).all()


@pytest.mark.parametrize("page", [-1, 10**6])
def test_a_page_out_of_range_reads_no_foreign_memory(page):
    """Page numbers are clipped, as in JAX; so is a length beyond the table's columns."""
    sizes = {"batch": 1, "nodes": 2, "kv_heads": 1, "group": 1, "d": 16, "page_size": 16, "dtype": "float32"}
    *tensors, lengths, mask, table = operands(np.random.default_rng(0), **sizes, lengths=[40], extra=None)
    assert run(*tensors, lengths, mask, table=jnp.full_like(table, page))[0].shape == (1, 2, 1, 16)
    assert run(*tensors, lengths + 10_000, mask, table=table)[0].shape == (1, 2, 1, 16)


@pytest.mark.slow
@pytest.mark.parametrize("features", ["-avx512f", "-avx512f,-avx2,-fma"])
def test_machines_with_narrower_vectors(features):
    sizes = {"batch": 2, "nodes": 5, "kv_heads": 2, "group": 2, "d": 64, "page_size": 16, "dtype": "float32"}
    *tensors, mask, table = operands(np.random.default_rng(0), **sizes, lengths=[70, 9], extra=2)
    name = f"test_attention_{features}"
    module = ir.Module(name)
    write_attention(module, name, "float32", 64, 128)
    compiler.register(module, name, features)
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (tensors[0], tensors[3], tensors[4])]
    got = jax.ffi.ffi_call(name, results, input_output_aliases={3: 1, 4: 2})(*tensors, mask, table)[0]
    expected, *_ = in_xla(*tensors, mask, table)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6)


def test_it_compiles_for_arm():
    """The kernel compiles to vector instructions."""
    module = ir.Module("arm")
    write_attention(module, "arm", "float32", 64, 128)
    assert ".4s" in arm.assembly(module)
