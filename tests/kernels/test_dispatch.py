"""Which implementation a chip gets."""

import jax
import pytest

from eagle3_jax.kernels.dispatch import cores, default_implementation


@pytest.mark.parametrize(
    ("kind", "count", "expected"),
    [
        ("TPU v2", 1, "xla"),
        ("TPU v3", 1, "xla"),
        ("TPU v4", 2, "xla"),  # 16 MiB of VMEM
        ("TPU v5 lite", 1, "pallas"),
        ("TPU v5", 2, "pallas"),
        ("TPU v6 lite", 1, "pallas"),
        ("TPU7x", 1, "pallas"),
    ],
)
def test_kernels_run_where_their_memory_is(kind, count, expected):
    device = jax.sharding.AbstractDevice(kind, count, "tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("model",), abstract_device=device)):
        assert default_implementation() == expected
        assert cores() == count


def test_elsewhere_xla():
    assert default_implementation() == "xla"
