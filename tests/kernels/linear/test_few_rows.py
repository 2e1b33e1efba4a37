"""Products of few rows, padded to the number of rows that costs least."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

from eagle3_jax.kernels.linear import few_rows
from eagle3_jax.kernels.linear.api import linear
from eagle3_jax.kernels.linear.layouts import Padded
from eagle3_jax.kernels.vocabulary.api import vocabulary_logits, vocabulary_top_k


@pytest.mark.parametrize(("platform", "measured"), [("cpu", ()), ("tpu", few_rows.COUNTS), ("gpu", few_rows.COUNTS)])
def test_every_device_but_a_cpu_measures(monkeypatch, platform, measured):
    monkeypatch.setattr(few_rows, "device", lambda: types.SimpleNamespace(platform=platform))
    assert few_rows.counts() == measured


@pytest.mark.slow
@pytest.mark.parametrize("product", [linear, vocabulary_logits])
def test_a_timed_product_reads_its_whole_matrix_on_a_tpu(product):
    """Else XLA would compute only the column that the next product depends on, in 8 rows but not in one."""
    pytest.importorskip("libtpu")
    place = jax.sharding.SingleDeviceSharding(topologies.get_topology_desc("v6e:1x1", "tpu").devices[0])
    matrix, x = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for shape in ((2048, 2048), (2048,)))
    for rows in (1, 8):
        times: Any = few_rows.multiply
        cost = times.lower([matrix] * 2, x, rows=rows, product=product).compile().cost_analysis()
        assert cost["bytes accessed"] > 2 * 2 * 2048**2


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({1: 9.6, 2: 9.0, 4: 6.2, 8: 6.3, 16: 6.25}, (4, 8, 16)),
        ({1: 9.6, 2: 9.0, 4: 7.0, 8: 6.5, 16: 7.5}, (8, 16)),
        ({1: 5.0, 2: 6.0, 4: 5.5, 8: 5.3, 16: 6.0}, (1, 8, 16)),
        ({1: 5.0, 2: 5.05, 4: 4.95, 8: 5.0, 16: 5.05}, ()),
    ],
    ids=["all from four rows on", "eight alone", "one is cheap", "noise"],
)
def test_rows_that_no_larger_number_costs_less_than(seconds, expected):
    assert few_rows.cheapest(seconds) == expected


@pytest.mark.parametrize(("given", "taken"), [(1, 4), (4, 4), (5, 8), (9, 9)])
def test_a_product_has_the_next_rows_and_returns_those_that_were_given(given, taken):
    matrix, x, seen = jnp.zeros((16, 24)), np.random.default_rng(0).normal(size=(given, 16)), []

    def product(rows, of):
        assert of is matrix
        seen.append(np.asarray(rows))
        return rows

    returned = Padded(matrix, (4, 8)).apply(product, jnp.asarray(x, jnp.float32))
    assert [rows.shape for rows in seen] == [(taken, 16)] and not seen[0][given:].any()
    np.testing.assert_array_equal(returned, x.astype(np.float32))


@pytest.mark.slow
def test_its_results_are_the_matrix_s_own():
    rng = np.random.default_rng(0)
    x, matrix = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 1, 16), (16, 24)))
    near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    near(linear(x, Padded(matrix, (4, 8))), linear(x, matrix))
    rows = Padded(matrix.T, (4, 8))
    near(vocabulary_logits(x, rows), vocabulary_logits(x, matrix.T))
    near(vocabulary_top_k(x, rows, 2)[0], vocabulary_top_k(x, matrix.T, 2)[0])


def test_the_tpu_s_top_k_takes_the_matrix_itself(monkeypatch):
    """The kernel pads its queries to the registers' rows; XLA's operations would write all logits."""
    from eagle3_jax.kernels.vocabulary import tpu

    taken, rows = [], jnp.zeros((24, 16))
    found = jnp.zeros((3, 2)), jnp.zeros((3, 2), jnp.int32)
    monkeypatch.setattr(tpu, "top_k", lambda x, rows, k, **_: taken.append(rows) or found)
    vocabulary_top_k(jnp.zeros((3, 16)), Padded(rows, (4, 8)), 2, implementation="pallas")
    assert taken[0] is rows
