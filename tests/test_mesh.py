"""Meshes, placement rules and the detection of several hosts."""

import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AxisType, PartitionSpec

from eagle3_jax import mesh as mesh_lib
from eagle3_jax.config import MeshConfig


def test_zero_takes_all_devices_that_model_leaves_over():
    mesh = mesh_lib.make_mesh(MeshConfig(data=0, model=2))
    assert dict(mesh.shape) == {"data": 4, "model": 2}
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)


def test_a_smaller_mesh_takes_the_first_devices():
    mesh = mesh_lib.make_mesh(MeshConfig(data=2, model=1))
    assert list(mesh.devices.flat) == jax.devices()[:2]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MeshConfig(data=0, model=3), r"mesh.model: got 3, expected a divisor of the number of devices, 8"),
        (MeshConfig(data=3, model=4), r"got 3 x 4 = 12, expected at most 8 devices"),
    ],
)
def test_devices_that_do_not_fit_are_refused_by_name(config, message):
    with pytest.raises(ValueError, match=message):
        mesh_lib.make_mesh(config)


def test_several_hosts_must_use_every_device(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="expected all 8 devices of all hosts"):
        mesh_lib.make_mesh(MeshConfig(data=2, model=2))


@pytest.mark.parametrize("topology", ["v5e:4x4", "v6e:4x4", "v5p:2x2x4", "tpu7x:2x2x2"])
def test_eight_ways_of_sixteen_chips(topology):
    """Also where no axis of the chips is two or eight long."""
    pytest.importorskip("libtpu")
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = mesh_lib.make_mesh(MeshConfig(data=0, model=8), devices)
    assert dict(mesh.shape) == {"data": 2, "model": 8}
    assert set(mesh.devices.flat) == set(devices)


def test_batches_split_and_replicas_do_not():
    mesh = mesh_lib.make_mesh(MeshConfig(model=2))
    x = np.zeros((8, 3), np.float32)
    assert jax.device_put(x, mesh_lib.batch_sharding(mesh)).addressable_shards[0].data.shape == (2, 3)
    assert jax.device_put(x, mesh_lib.replicated(mesh)).addressable_shards[0].data.shape == (8, 3)


RULES = [
    ("special/kernel", PartitionSpec()),
    ("kernel$", PartitionSpec(None, "model")),
    ("both", PartitionSpec(("data", "model"))),
]


def test_the_first_matching_rule_places_a_leaf():
    mesh = mesh_lib.make_mesh(MeshConfig(model=2))
    shape = jax.ShapeDtypeStruct
    tree = {
        "a": {"kernel": shape((3, 4), jnp.float32), "bias": shape((4,), jnp.float32)},
        "special": {"kernel": shape((3, 4), jnp.float32)},
        "odd": {"kernel": shape((4, 3), jnp.float32)},
        "both": [shape((8,), jnp.float32), shape((4,), jnp.float32)],
    }
    specs = jax.tree.map(lambda s: s.spec, mesh_lib.shardings(tree, mesh, RULES))
    assert specs["a"] == {"kernel": PartitionSpec(None, "model"), "bias": PartitionSpec()}
    assert specs["special"]["kernel"] == PartitionSpec()
    assert specs["odd"]["kernel"] == PartitionSpec(None, None)  # 3 does not divide by 2
    assert specs["both"] == [PartitionSpec(("data", "model")), PartitionSpec(None)]


def test_nnx_modules_are_placed_by_their_attribute_names():
    mesh = mesh_lib.make_mesh(MeshConfig(model=2))
    module = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
    placed = jax.device_put(module, mesh_lib.shardings(module, mesh, [("^kernel$", PartitionSpec(None, "model"))]))
    assert placed.kernel[...].sharding.spec == PartitionSpec(None, "model")
    x = jnp.ones((2, 4))
    np.testing.assert_allclose(jax.jit(lambda m, x: m(x))(placed, x), module(x), rtol=1e-6)


def test_a_spec_longer_than_the_shape_is_refused_by_path():
    mesh = mesh_lib.make_mesh(MeshConfig())
    with pytest.raises(ValueError, match=r"^a/kernel: got .* for shape \(3,\)"):
        mesh_lib.shardings({"a": {"kernel": np.zeros(3)}}, mesh, RULES)


@pytest.mark.parametrize(
    ("environment", "tpu", "endpoints", "several"),
    [
        ({}, False, "", False),
        ({"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234"}, False, "", True),
        ({"MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.1"}, False, "", True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, True, "a,b", False),
        ({"TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2"}, True, "", True),
        ({}, True, "a:b:10.0.0.1,a:b:10.0.0.2", True),
        ({}, True, "a:b:10.0.0.1", False),
        ({"TPU_SKIP_MDS_QUERY": "1"}, True, "a,b", False),
    ],
)
def test_several_hosts_are_recognised(monkeypatch, environment, tpu, endpoints, several):
    monkeypatch.setattr(mesh_lib, "_has_tpu", lambda: tpu)
    monkeypatch.setattr(mesh_lib, "_worker_endpoints", lambda: endpoints)
    assert mesh_lib._is_multi_host(environment) is several


def test_a_single_host_starts_alone(monkeypatch):
    monkeypatch.setattr(mesh_lib, "_is_multi_host", lambda environment: False)
    assert mesh_lib.start_distributed() is False
    assert not jax.distributed.is_initialized()


_PROGRAM = """
import jax
import numpy as np
from eagle3_jax.config import MeshConfig
from eagle3_jax.mesh import batch_sharding, make_mesh, start_distributed
assert start_distributed()
mesh = make_mesh(MeshConfig())
x = jax.make_array_from_callback((2,), batch_sharding(mesh), lambda index: np.arange(1.0, 3.0)[index])
print("sum", float(jax.jit(lambda x: x.sum())(x)))
"""


@pytest.mark.slow
def test_two_processes_join_into_one_mesh():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            env=common | {"JAX_PROCESS_ID": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert ["sum 3.0" in output for output in outputs] == [True, True], outputs


@pytest.mark.parametrize(
    ("change", "platforms"),
    [
        ("", "cpu"),
        ("mesh._has_tpu = lambda: True", "None"),
        ("jax.config.update('jax_platforms', 'cuda')", "cuda"),
        ("mesh.importlib.metadata.entry_points = lambda group: ['xla_cuda13']", "None"),
    ],
)
def test_libtpu_starts_only_where_a_tpu_could_be(change, platforms):
    code = (
        "import jax; from eagle3_jax import mesh\n"
        "jax.config.update('jax_platforms', None)\n"
        f"{change}\nmesh._leave_tpus_alone(); print(jax.config.jax_platforms)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert answer.stdout.strip() == platforms, answer.stderr


def test_a_cpu_machine_prints_no_warnings_of_tpus():
    # tests/conftest.py tells libtpu about a TPU; a user's environment does not.
    code = "from eagle3_jax import mesh; import jax; print(jax.devices()[0].platform)"
    environment = {n: v for n, v in os.environ.items() if not n.startswith("TPU_") and n != "JAX_PLATFORMS"}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert (answer.stdout.strip(), answer.stderr) == ("cpu", "")
