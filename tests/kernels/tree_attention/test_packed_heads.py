"""Heads side by side in a row of the cache: the same attention and the same entries as in rows of their own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from eagle3_jax.kernels.tree_attention.api import tree_attention
from eagle3_jax.kernels.tree_attention.packed_heads import cache_rows

V6E = AbstractDevice("TPU v6 lite", 1, "tpu")


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "model", "expected"),
    [
        (8, 64, 1, (4, 128)),
        (8, 64, 4, (4, 128)),
        (8, 64, 8, (8, 128)),  # a row a device, so a head a row
        (8, 64, 16, (4, 128)),  # the axis splits neither
        (3, 64, 1, (3, 128)),
        (6, 32, 1, (2, 128)),  # three to a row
        (8, 16, 2, (2, 128)),
        (8, 128, 1, (8, 128)),
        (8, 80, 1, (8, 128)),
        (4, 256, 1, (4, 256)),
        (1, 576, 8, (1, 640)),
    ],
)
def test_rows_are_whole_registers_and_split_as_heads_are(kv_heads, head_dim, model, expected):
    with jax.sharding.use_abstract_mesh(AbstractMesh((1, model), ("data", "model"), abstract_device=V6E)):
        assert cache_rows(kv_heads, head_dim) == expected


def test_elsewhere_each_head_has_a_row():
    assert cache_rows(8, 64) == (8, 64)


def side_by_side(cache, beside, width):
    """[b, k, slots, d] -> [b, k / beside, slots, width], one slot and one head at a time."""
    b, k, slots, d = cache.shape
    rows = np.zeros((b, k // beside, slots, width), cache.dtype)
    for i, head, slot in np.ndindex(b, k, slots):
        at = head % beside * d
        rows[i, head // beside, slot, at : at + d] = cache[i, head, slot]
    return rows


def known(cache):
    """Zeros where there is NaN, of any dtype."""
    return np.where(np.isnan(cache.astype(np.float32)), np.zeros((), cache.dtype), cache)


def example(kv_heads, head_dim, dtype, seed=0) -> tuple[Any, Any, Any]:
    """Two sequences with a tree of 5 nodes: arguments of a call, with NaN behind the tails."""
    rng = np.random.default_rng(seed)
    b, t, slots, group = 2, 5, 256, 2
    compute = jnp.bfloat16 if dtype == "bfloat16" else jnp.float32
    q = rng.normal(size=(b, t, kv_heads * group, head_dim))
    new = rng.normal(size=(2, b, t, kv_heads, head_dim))
    old = rng.normal(size=(2, b, kv_heads, slots, head_dim))
    lengths = np.array([100, 3])
    for i, length in enumerate(lengths):
        old[:, i, :, length + t :] = np.nan
    mask = np.tril(rng.random((b, t, t)) < 0.6) | np.eye(t, dtype=bool)
    caches = [np.asarray(jnp.asarray(x, jnp.float32).astype(dtype)) for x in old]
    return [jnp.asarray(x, compute) for x in (q, *new)], caches, (jnp.asarray(lengths), jnp.asarray(mask))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "dtype", "beside", "width"),
    [
        pytest.param(4, 64, "float32", 2, 128, marks=pytest.mark.long),
        pytest.param(2, 64, "bfloat16", 2, 128, marks=pytest.mark.long),
        pytest.param(3, 64, "float32", 1, 128, marks=pytest.mark.long),
        (6, 32, "float8_e4m3fn", 3, 128),
        pytest.param(1, 160, "float32", 1, 256, marks=pytest.mark.long),
    ],
)
def test_attention_and_entries_are_those_of_rows_of_their_own(kv_heads, head_dim, dtype, beside, width):
    tokens, caches, rest = example(kv_heads, head_dim, dtype)
    options: Any = {"sinks": jnp.linspace(-1, 1, 2 * kv_heads, dtype=jnp.float32)}
    apart = [jnp.asarray(known(x)) for x in caches]  # XLA multiplies what nobody sees by 0
    arguments: list[Any] = [*tokens, *apart, *rest]
    expected, *written = tree_attention(*arguments, **options, implementation="xla")
    packed = [jnp.asarray(side_by_side(x, beside, width)) for x in caches]
    arguments = [*tokens, *packed, *rest]
    got, *kept = tree_attention(*arguments, **options, implementation="pallas", interpret=pltpu.InterpretParams())
    tolerance = 2e-2 if dtype == "bfloat16" else 2e-5
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(expected, np.float32), atol=tolerance, rtol=tolerance
    )
    for rows, cache in zip(kept, written, strict=True):
        np.testing.assert_array_equal(known(np.asarray(rows)), side_by_side(np.asarray(cache), beside, width))


@pytest.mark.long
def test_a_mesh_splits_rows():
    """Two rows of two heads, one a device of the model axis."""
    tokens, caches, rest = example(4, 64, "float32")
    caches = [known(x) for x in caches]
    arguments: list[Any] = [*tokens, *map(jnp.asarray, caches), *rest]
    expected, *_ = tree_attention(*arguments, implementation="xla")
    packed = [jnp.asarray(side_by_side(x, 2, 128)) for x in caches]
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        got, *_ = jax.jit(lambda *x: tree_attention(*x, implementation="pallas", interpret=True))(
            *tokens, *packed, *rest
        )
    np.testing.assert_allclose(got, expected, atol=2e-5, rtol=2e-5)
