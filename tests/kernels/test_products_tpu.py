"""What libtpu makes of products and choices: facts of docs/exact-on-tpus.md that no TPU is needed for."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle3_jax.kernels.linear.api import linear
from eagle3_jax.kernels.linear.layouts import Padded

pytest.importorskip("libtpu")
pytestmark = pytest.mark.slow


def compiled(run: Any, *operands: tuple[tuple[int, ...], Any, tuple[str | None, ...]]) -> str:
    """HLO of a program for two chips of a v6e, given (shape, dtype, partition) of its operands."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices[:2]
    mesh = Mesh(np.array(devices), ("model",))

    def placed(*spec: str | None) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*spec))

    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=placed(*spec)) for shape, dtype, spec in operands]
    return jax.jit(run, out_shardings=placed()).lower(*arguments).compile().as_text() or ""


@pytest.mark.parametrize(("rows", "padding", "unit"), [(1, (), "reduce"), (2, (), "MXU"), (1, (8,), "MXU")])
def test_one_row_leaves_the_matrix_unit(rows, padding, unit):
    """Unless it is padded: the compiler keeps the padding."""
    text = compiled(
        lambda x, y: linear(x, Padded(y, padding) if padding else y),
        ((rows, 1024), jnp.float32, ()),
        ((1024, 4096), jnp.float32, ()),
    )
    if unit == "MXU":
        assert " reduce(" not in text and re.search(r" convolution\(.*operand_precision=\{highest,highest\}", text)
    else:
        assert " reduce(" in text and " convolution(" not in text


@pytest.mark.parametrize(("dtype", "sums"), [(jnp.bfloat16, "bf16"), (jnp.float32, "f32")])
def test_chips_add_their_sums_in_the_activations_dtype(dtype, sums):
    text = compiled(linear, ((4, 4096), dtype, (None, "model")), ((4096, 4096), dtype, ("model",)))
    assert re.findall(r"= (\w+)\[4,4096\]\S* all-reduce\(", text) == [sums]


def test_of_equal_scores_the_first_is_chosen():
    """`top_k` is a sort whose comparison falls back on the index."""
    text = compiled(lambda x: jax.lax.top_k(x, 4), ((8, 256), jnp.float32, ()))
    ((index, rule),) = re.findall(r" sort\(\S+, (\S+)\), dimensions=\{1\}, to_apply=(%\S+?),", text)
    assert re.search(rf"{re.escape(index)} = s32\S* iota\(\), iota_dimension=1", text)
    (body,) = re.findall(rf"^{re.escape(rule)} .*?^\}}", text, re.DOTALL | re.MULTILINE)
    ((equal, by_index),) = re.findall(r"ROOT .* select\((\S+), (\S+), \S+\)", body)
    assert re.search(rf"{re.escape(equal)} = .*direction=EQ", body)
    ((left, right),) = re.findall(rf"{re.escape(by_index)} = pred\S* compare\((\S+), (\S+)\), direction=LT", body)
    for name, number in ((left, 2), (right, 3)):
        assert re.search(rf"{re.escape(name)} = s32\S* parameter\({number}\)", body)
