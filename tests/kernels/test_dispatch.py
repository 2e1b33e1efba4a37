"""The choice of an implementation for a device."""

import logging

import jax
import pytest

from eagle3_jax.kernels.cpu import handler
from eagle3_jax.kernels.dispatch import choose, cores, default_implementation


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


def test_a_gpu_gets_xla():
    device = jax.sharding.AbstractDevice("NVIDIA H100", 1, "gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("model",), abstract_device=device)):
        assert default_implementation() == "xla"


def test_a_cpu_gets_its_kernels_unless_they_are_off(monkeypatch):
    monkeypatch.delenv("EAGLE3_CPU_KERNELS", raising=False)
    assert default_implementation(jax.devices("cpu")[0]) == "cpu"
    monkeypatch.setenv("EAGLE3_CPU_KERNELS", "0")
    assert default_implementation(jax.devices("cpu")[0]) == "xla"


@pytest.mark.parametrize("version", [(0, 99), (1, 0), None])
def test_an_interface_of_an_unknown_version_gets_xla(version, monkeypatch, caplog):
    """With one line in the log, however often it is asked."""
    monkeypatch.delenv("EAGLE3_CPU_KERNELS", raising=False)
    monkeypatch.setattr(handler, "api_version", lambda: version)
    handler._known.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert default_implementation(jax.devices("cpu")[0]) == "xla"
    (line,) = caplog.messages
    shown = "none" if version is None else "{}.{}".format(*version)
    assert f"got version {shown}, expected one of 0.3, 0.4, 0.5" in line


def test_the_default_runs_where_the_operation_has_it(monkeypatch):
    monkeypatch.delenv("EAGLE3_CPU_KERNELS", raising=False)
    assert choose(None, pallas=True, cpu=True) == "cpu"
    assert choose(None, pallas=True) == choose("xla", cpu=True) == "xla"
    with pytest.raises(ValueError, match=r"implementation: got 'cpu', expected 'xla' or 'pallas'"):
        choose("cpu", pallas=True)
