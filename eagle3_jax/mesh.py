"""Devices as a data x model mesh, which processes share its rows, and where arrays lie on it.

Both axes are Auto: programs are written for one device, inputs and parameters say where they lie, and the compiler
propagates the rest (GSPMD).
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from eagle3_jax.config import MeshConfig

AXES = ("data", "model")


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the axes ("data", "model").

    Args:
        devices: all devices of all hosts by default. A smaller mesh takes the first ones, on a single host only.

    Raises:
        ValueError: the devices are too few, or do not divide into the axes.
    """
    devices = jax.devices() if devices is None else list(devices)
    count = len(devices)
    if config.data == 0 and count % config.model:
        raise ValueError(f"mesh.model: got {config.model}, expected a divisor of the number of devices, {count}")
    data = config.data or count // config.model
    used = data * config.model
    if used > count:
        raise ValueError(
            f"mesh.data x mesh.model: got {data} x {config.model} = {used}, expected at most {count} devices"
        )
    if used < count and jax.process_count() > 1:
        raise ValueError(
            f"mesh.data x mesh.model: got {data} x {config.model} = {used}, expected all {count} devices of all hosts"
        )
    # jax.make_mesh has no 2 x 8 for the 4 x 4 chips of a v6e slice: it splits a physical axis on a v5e only.
    grid = mesh_utils.create_device_mesh((data, config.model), devices[:used], allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 2)


def decoding_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The devices that an engine on its own decodes on: the first ones, as many as the model axis has."""
    devices = jax.devices() if devices is None else devices
    return make_mesh(MeshConfig(data=1, model=config.model), devices[: config.model])


@dataclasses.dataclass(frozen=True)
class Replica:
    """Rows of a mesh that share processes with each other and with no other row, so that they work on their own.

    Where the model axis lies within a process that is one process's rows; where it spans processes, theirs.

    Attributes:
        mesh: those rows, (some of data) x model.
        index: its number among the `count` replicas; the processes of one replica all have the same.
        leader: the process among `processes` that writes what the replica computes.
    """

    mesh: Mesh
    index: int
    count: int
    processes: tuple[int, ...]

    @property
    def leader(self) -> int:
        return self.processes[0]

    @property
    def decoding_mesh(self) -> Mesh:
        """The devices that its engine decodes on: one row. A batch is not split, so more would repeat the work."""
        return Mesh(self.mesh.devices[:1], AXES, axis_types=self.mesh.axis_types)


def replicas(mesh: Mesh) -> list[Replica]:
    """The mesh as independent parts, in the order of their first rows."""
    parts: list[tuple[set[int], list[int]]] = []  # processes, rows
    for number, row in enumerate(mesh.devices):
        processes, rows = {device.process_index for device in row}, [number]
        for other in [part for part in parts if part[0] & processes]:
            parts.remove(other)
            processes, rows = processes | other[0], other[1] + rows
        parts.append((processes, rows))
    parts.sort(key=lambda part: part[1])
    return [
        Replica(Mesh(mesh.devices[sorted(rows)], AXES, axis_types=mesh.axis_types), i, len(parts), tuple(sorted(those)))
        for i, (those, rows) in enumerate(parts)
    ]


def own_replica(mesh: Mesh) -> Replica:
    """The replica that this process works for."""
    return next(part for part in replicas(mesh) if jax.process_index() in part.processes)


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The leading dimension split over the data axis."""
    return NamedSharding(mesh, PartitionSpec("data"))


def own_rows(sharding: NamedSharding, rows: int) -> list[int]:
    """Which rows of an array with so many of them lie on this process's devices; ascending."""
    parts: Any = sharding.addressable_devices_indices_map((rows,)).values()
    return sorted({row for (part,) in parts for row in range(rows)[part]})


def put_rows(part: np.ndarray, rows: int, sharding: NamedSharding) -> jax.Array:
    """An array of so many rows, of which each process has its own (see `own_rows`), on the devices.

    Args:
        part: [own rows, ...], ascending.
    """
    own = own_rows(sharding, rows)

    def rows_at(index: Any) -> np.ndarray:
        first, end, _ = index[0].indices(rows)
        return part[own.index(first) :][: end - first]

    return jax.make_array_from_callback((rows, *part.shape[1:]), sharding, rows_at)


def put(value: np.ndarray, sharding: Sharding) -> jax.Array:
    """A host array, the same on all processes that share `sharding`, on its devices.

    Unlike `jax.device_put`, which sends the whole array to all processes to see whether it is the same there.
    """
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def mesh_set(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """The context in which the mesh is set, over which caches and kernels are split; None is one device."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def mesh_of(array: jax.Array) -> Mesh | None:
    """The mesh that an array lies on; None for one that a mesh did not place."""
    sharding = array.sharding
    return sharding.mesh if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) else None


def fetch(tree: Any) -> Any:
    """Arrays as whole numpy arrays, on each of the processes that share them."""

    def readable(x: jax.Array) -> jax.Array:
        if x.is_fully_addressable or x.is_fully_replicated or not isinstance(x.sharding, NamedSharding):
            return x
        return jax.jit(lambda x: x, out_shardings=replicated(x.sharding.mesh))(x)

    return jax.device_get(jax.tree.map(readable, tree))


def constrain(tree: Any, rules: Sequence[tuple[str, PartitionSpec]]) -> Any:
    """Inside a program: has the leaves lie where the rules say (see `shardings`) on the mesh that is set, if one is."""
    mesh = jax.sharding.get_abstract_mesh()
    if not set(AXES) <= set(mesh.axis_names):
        return tree
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.lax.with_sharding_constraint(leaf, _sharding(path, leaf, mesh, rules)), tree
    )


def shardings(tree: Any, mesh: Mesh | AbstractMesh, rules: Sequence[tuple[str, PartitionSpec]]) -> Any:
    """Where each leaf of a pytree of parameters lies.

    Args:
        tree: arrays or ShapeDtypeStructs in any pytree, NNX modules and states included.
        rules: (regex, spec) pairs. The regex is searched for in the leaf's path, such as "layers/0/attention/kernel";
            the first match wins, no match means replicated. A dimension that its mesh axes do not divide is replicated.

    Returns:
        The same pytree with a NamedSharding for each leaf.

    Raises:
        ValueError: a spec has more entries than the leaf has dimensions.
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _sharding(path, leaf, mesh, rules), tree)


def _sharding(
    path: tuple[Any, ...], leaf: Any, mesh: Mesh | AbstractMesh, rules: Sequence[tuple[str, PartitionSpec]]
) -> NamedSharding:
    # An NNX variable is itself a node with the single child "value".
    name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
    spec = next((spec for pattern, spec in rules if re.search(pattern, name)), PartitionSpec())
    if len(spec) > len(leaf.shape):
        raise ValueError(f"{name}: got {spec} for shape {tuple(leaf.shape)}, expected at most one entry a dimension")
    entries = zip(spec, leaf.shape, strict=False)
    return NamedSharding(
        mesh, PartitionSpec(*(axes if size % _ways(mesh, axes) == 0 else None for axes, size in entries))
    )


def _ways(mesh: Mesh | AbstractMesh, axes: Any) -> int:
    """In how many parts the named axes (None, a name or a tuple of names) split a dimension."""
    names = (axes,) if isinstance(axes, str) else axes or ()
    ways = 1
    for name in names:
        ways *= mesh.shape[name]
    return ways
