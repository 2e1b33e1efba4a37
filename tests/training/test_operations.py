"""Operations of programs are counted by hand, and compared with a chip's published rate."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.training.metrics import products, utilisation

A, B = jax.ShapeDtypeStruct((2, 3), jnp.float32), jax.ShapeDtypeStruct((3, 5), jnp.float32)
ONCE = 2 * 2 * 3 * 5


def repeat(times):
    return lambda a, b: jax.lax.scan(lambda total, _: (total + a @ b, None), jnp.zeros((2, 5)), length=times)[0]


def spread(a, b):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "x")
    rows, whole = jax.P("x"), jax.P()
    return jax.shard_map(lambda a, b: a @ b, mesh=mesh, in_specs=(rows, whole), out_specs=rows)(a, b)


def spread_over_one_axis(a, b):
    """The other axis is the partitioner's: each device computes its part of a row's product."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows, whole = jax.P("x"), jax.P()
    over = {"mesh": mesh, "axis_names": {"x"}, "in_specs": (rows, whole), "out_specs": rows}
    return jax.shard_map(lambda a, b: a @ b, **over)(a, b)


@pytest.mark.parametrize(
    ("function", "times"),
    [
        (lambda a, b: a @ b + 1, 1),
        (jax.jit(lambda a, b: jnp.tanh(a @ b) @ b.T), 2),
        (repeat(7), 7),
        (lambda a, b: jax.lax.cond(a.sum() > 0, lambda: a @ b, lambda: jnp.zeros((2, 5))), 1),
        (jax.grad(lambda a, b: jnp.sum((a @ b) ** 2)), 2),  # forward, and backward to one operand
        (jax.grad(jax.checkpoint(lambda a, b: jnp.sum(jnp.sin(a @ b) ** 2))), 3),  # and forward again
        (spread, 1),
        (spread_over_one_axis, 1),
    ],
    ids=["product", "jit", "loop", "branch", "gradient", "remat", "shards", "an axis"],
)
def test_products_are_counted(function, times):
    assert products(jax.make_jaxpr(function)(A, B).jaxpr) == times * ONCE


def test_a_loop_of_unknown_length_is_left_out():
    jaxpr = jax.make_jaxpr(
        lambda a, b: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x + a @ b, jnp.zeros((2, 5)))
    )
    assert products(jaxpr(A, B).jaxpr) == 0


def test_utilisation_is_the_share_of_the_published_rate():
    chips = [types.SimpleNamespace(device_kind="TPU v6 lite")] * 4
    found = utilisation(operations=4 * 918 * 10**12, seconds=2.0, devices=chips)
    assert (found["teraflops"], found["mfu"]) == (459, 0.5)
    assert "mfu" not in utilisation(1, 1.0, [types.SimpleNamespace(device_kind="cpu")])
