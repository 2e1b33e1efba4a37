"""Meshes, their replicas, and placement rules."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, PartitionSpec

from eagle3_jax import mesh as mesh_lib
from eagle3_jax.config import MeshConfig


def test_zero_takes_all_devices_that_model_leaves_over():
    mesh = mesh_lib.make_mesh(MeshConfig(data=0, model=2))
    assert dict(mesh.shape) == {"data": 4, "model": 2}
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)


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


@pytest.mark.parametrize("model", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("topology", ["v5e:8x8", "v6e:8x8", "v5p:2x4x4", "v5p:4x4x4"])
def test_all_chips_of_a_slice_decode(topology, model):
    pytest.importorskip("libtpu")
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = mesh_lib.make_mesh(MeshConfig(data=0, model=model), devices)
    parts = mesh_lib.replicas(mesh)
    decoding = [device for part in parts for row in part.rows for device in row.devices.flat]
    assert len(decoding) == len(set(decoding)) == len(devices)
    # No host works for two replicas, and all hosts work.
    assert sorted(process for part in parts for process in part.processes) == sorted(
        {device.process_index for device in devices}
    )
    for row in mesh.devices:
        hosts = {device.process_index for device in row}
        assert len(hosts) == max(1, model // 4)
        sides = [max(axis) - min(axis) + 1 for axis in zip(*(device.coords for device in row), strict=True)]
        assert np.prod(sides) == model  # a box without gaps
        assert max(sides) <= 4
        steps = [np.abs(np.subtract(a.coords, b.coords)).sum() for a, b in itertools.pairwise(row)]
        assert max(steps, default=1) <= 2
        assert len(list(itertools.groupby(device.process_index for device in row))) == len(hosts)


def hosts_of(*counts: int) -> list[Any]:
    return [Chip(number, host) for host, count in enumerate(counts) for number in range(count)]


def test_a_row_never_shares_a_host_with_another():
    mesh = mesh_lib.make_mesh(MeshConfig(data=0, model=4), hosts_of(2, 2, 2, 2))
    assert [[chip.process_index for chip in row] for row in mesh.devices] == [[0, 0, 1, 1], [2, 2, 3, 3]]
    with pytest.raises(ValueError, match=r"mesh: got hosts of \[2, 4\] devices, expected as many on each host"):
        mesh_lib.make_mesh(MeshConfig(data=0, model=2), hosts_of(4, 2))
    message = "mesh.model: got 6, expected a divisor or a multiple of the 4 devices of a host"
    with pytest.raises(ValueError, match=message):
        mesh_lib.make_mesh(MeshConfig(data=0, model=6), hosts_of(4, 4, 4))


def test_a_row_takes_its_part_of_what_lies_on_all_rows():
    mesh = mesh_lib.make_mesh(MeshConfig(data=4, model=2))
    (replica,) = mesh_lib.replicas(mesh)
    weights = jax.device_put(np.arange(8.0).reshape(2, 4), jax.sharding.NamedSharding(mesh, PartitionSpec("model")))
    for row in replica.rows:
        placed = mesh_lib.on_row({"w": weights}, row)["w"]
        np.testing.assert_array_equal(placed, weights)
        assert placed.sharding.device_set == set(row.devices.flat)
        assert placed.addressable_shards[0].data.shape == (1, 4)


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


@dataclasses.dataclass(frozen=True)
class Chip:
    """A device of a process, for meshes that no program runs on."""

    id: int
    process_index: int


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[0, 0], [0, 0]], [([0, 1], (0,))]),  # one process
        ([[0, 0], [1, 1]], [([0], (0,)), ([1], (1,))]),  # a row a process
        ([[0, 1], [2, 3]], [([0], (0, 1)), ([1], (2, 3))]),  # rows that span processes
        ([[3, 3], [0, 0], [3, 3]], [([0, 2], (3,)), ([1], (0,))]),
    ],
)
def test_replicas_share_no_process(rows, expected):
    grid = np.empty(np.shape(rows), object)
    for place in np.ndindex(grid.shape):
        grid[place] = Chip(hash(place), rows[place[0]][place[1]])
    mesh = Mesh(grid, mesh_lib.AXES)
    parts = mesh_lib.replicas(mesh)
    found = [(part.mesh.devices.tolist(), part.processes) for part in parts]
    assert found == [(grid[own].tolist(), processes) for own, processes in expected]
    assert [(part.index, part.count) for part in parts] == [(i, len(expected)) for i in range(len(expected))]
    for part in parts:
        assert [row.devices.tolist() for row in part.rows] == [[row] for row in part.mesh.devices.tolist()]
        assert part.rows[0].devices.tolist() == part.mesh.devices[:1].tolist()


def test_programs_pin_their_results_where_the_rules_say():
    mesh = mesh_lib.make_mesh(MeshConfig(data=1, model=2))
    x = jax.device_put(np.ones((4, 4)), jax.sharding.NamedSharding(mesh, PartitionSpec(None, "model")))
    rules = (("cache", PartitionSpec("model")),)
    program = jax.jit(lambda x: mesh_lib.constrain({"cache": x + 1, "rest": x + 2}, rules))
    with jax.set_mesh(mesh):
        placed = program(x)
    assert placed["cache"].addressable_shards[0].data.shape == (2, 4)
    assert placed["rest"].is_fully_replicated
    program(np.ones((4, 4)))  # and without a mesh as before
