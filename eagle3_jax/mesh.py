"""The data x model mesh of devices, the processes that share its rows, and the shardings of arrays on it.

Both axes are Auto: programs are written for one device, inputs and parameters carry shardings, and the compiler
propagates the rest (GSPMD).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from eagle3_jax.config import MeshConfig

AXES = ("data", "model")
Rules = Sequence[tuple[str, PartitionSpec]]  # see `shardings`
_INSIDE = re.compile(r"(/value)?(/(values|scale|offset))?$")


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Makes a mesh with the axes ("data", "model"), each row within one host or over whole hosts.

    On TPUs a row is a compact block of the topology (2x2 or 2x4 chips), whose neighbours in the row are neighbours
    there. Raises ValueError: the devices are too few, do not divide into the axes, or two rows would share a host.
    """
    devices = jax.devices() if devices is None else list(devices)
    count = len(devices)
    if config.data == 0 and count % config.model:
        raise ValueError(f"mesh.model: got {config.model}, expected a divisor of the number of devices, {count}")
    data = config.data or count // config.model
    used = data * config.model
    got = f"mesh.data x mesh.model: got {data} x {config.model} = {used}"
    if used > count:
        raise ValueError(f"{got}, expected at most {count} devices")
    if used < count and jax.process_count() > 1:
        raise ValueError(f"{got}, expected all {count} devices of all hosts")
    rows = _block_rows(devices[:used], config.model) or _host_rows(devices[:used], config.model)
    grid = np.empty((data, config.model), object)
    for place, device in zip(np.ndindex(grid.shape), itertools.chain(*rows), strict=True):
        grid[place] = device
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 2)


def _host_rows(devices: Sequence[Any], size: int) -> list[list[Any]]:
    """Cuts the devices into rows of `size`, host by host."""
    hosts = _hosts(devices)
    counts = {len(host) for host in hosts}
    if len(counts) > 1:
        raise ValueError(f"mesh: got hosts of {sorted(counts)} devices, expected as many on each host")
    (count,) = counts
    if len(hosts) > 1 and size % count and count % size:
        raise ValueError(f"mesh.model: got {size}, expected a divisor or a multiple of the {count} devices of a host")
    ordered = list(itertools.chain(*hosts))
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def _hosts(devices: Sequence[Any]) -> list[list[Any]]:
    hosts: dict[int, list[Any]] = {}
    for device in devices:
        hosts.setdefault(device.process_index, []).append(device)
    return [hosts[process] for process in sorted(hosts)]


def _block_rows(devices: Sequence[Any], size: int) -> list[list[Any]] | None:
    """Cuts the topology into equal blocks of `size` devices; None where the devices fill no box of equal hosts.

    A block divides a host or is a box of whole hosts, whose chips follow each other; the most compact one is taken.
    """
    places = {_place(device): device for device in devices if getattr(device, "coords", None) is not None}
    if len(places) < len(devices):
        return None
    bounds = _box(list(places))
    host_boxes = {_box([_place(device) for device in host]) for host in _hosts(devices)}
    if math.prod(bounds) != len(devices) or len(host_boxes) != 1:
        return None
    (host,) = host_boxes
    if math.prod(host) * len(_hosts(devices)) != len(devices):
        return None

    def fits(block: tuple[int, ...]) -> bool:
        inner, outer = (block, host) if size <= math.prod(host) else (host, block)
        within = all(large % small == 0 for small, large in zip(inner, outer, strict=True))
        return within and all(whole % part == 0 for part, whole in zip(block, bounds, strict=True))

    sides = (range(1, bound + 1) for bound in bounds)
    blocks = [block for block in itertools.product(*sides) if math.prod(block) == size and fits(block)]
    if not blocks:
        return None
    block = min(blocks, key=lambda block: (sum(block), [-side for side in reversed(block)]))
    origin = tuple(map(min, zip(*places, strict=True)))

    def steps(device: Any, other: Any) -> int:
        return sum(abs(a - b) for a, b in zip(_place(device), _place(other), strict=True))

    inner = min(block, host, key=math.prod)  # the part within a host, whose chips follow each other
    rows = []
    for corner in _winding(tuple(whole // part for whole, part in zip(bounds, block, strict=True))):
        row: list[Any] = []
        for host_corner in _winding(tuple(part // chips for part, chips in zip(block, inner, strict=True))):
            starts = zip(origin, corner, block, host_corner, inner, strict=True)
            start = [o + c * side + h * chips for o, c, side, h, chips in starts]
            path = [places[tuple(map(sum, zip(start, step, strict=True)))] for step in _winding(inner)]
            if row and steps(row[-1], path[-1]) < steps(row[-1], path[0]):
                path.reverse()
            row += path
        rows.append(row)
    return rows


def _place(device: Any) -> tuple[int, ...]:
    return (*device.coords, getattr(device, "core_on_chip", 0))


def _box(places: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(max(axis) - min(axis) + 1 for axis in zip(*places, strict=True))


def _winding(sides: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Lists all places of a box, each beside the one before, longest side first; a box of 2 x N closes to a ring."""
    order = sorted(range(len(sides)), key=lambda axis: sides[axis])  # the last axis moves fastest
    path: list[tuple[int, ...]] = [()]
    for axis in reversed(order):
        path = [(step, *rest) for step in range(sides[axis]) for rest in (path if step % 2 == 0 else reversed(path))]
    return [tuple(place[order.index(axis)] for axis in range(len(sides))) for place in path]


def decoding_mesh(config: MeshConfig) -> Mesh:
    """Makes the mesh of a single engine: the first devices, as many as the model axis has."""
    return make_mesh(MeshConfig(data=1, model=config.model), jax.devices()[: config.model])


@dataclasses.dataclass(frozen=True)
class Replica:
    """Rows of a mesh that the same processes hold: all rows of a process, or one row of several processes."""

    mesh: Mesh  # the rows, (some of data) x model
    index: int  # among the `count` replicas, the same on all its processes
    count: int
    processes: tuple[int, ...]  # the first one leads: it writes the results that all hold

    @property
    def rows(self) -> list[Mesh]:
        """The devices of each engine: a row each, since an engine's batch is not split."""
        return [Mesh(row[None], AXES, axis_types=self.mesh.axis_types) for row in self.mesh.devices]


def replicas(mesh: Mesh) -> list[Replica]:
    """Splits the mesh into replicas, in the order of their first rows."""
    parts: dict[tuple[int, ...], list[int]] = {}
    for number, members in enumerate(row_processes(mesh)):
        parts.setdefault(members, []).append(number)
    return [
        Replica(Mesh(mesh.devices[rows], AXES, axis_types=mesh.axis_types), index, len(parts), processes)
        for index, (processes, rows) in enumerate(parts.items())
    ]


def row_processes(mesh: Mesh) -> list[tuple[int, ...]]:
    """Returns the processes that hold each row, ascending."""
    return [tuple(sorted({device.process_index for device in row})) for row in mesh.devices]


def own_replica(mesh: Mesh) -> Replica:
    """Returns the replica of this process."""
    return next(part for part in replicas(mesh) if jax.process_index() in part.processes)


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Returns the sharding that puts the whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that splits the leading dimension over the data axis."""
    return NamedSharding(mesh, PartitionSpec("data"))


def put(value: np.ndarray, sharding: Sharding) -> jax.Array:
    """Puts a host array, equal on all processes, on devices; `jax.device_put` would send it to all, to compare it."""
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def mesh_set(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Sets the mesh over which caches and kernels are split, for a `with` block; None is one device."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def mesh_of(array: Any) -> Mesh | None:
    """Returns the mesh that an array, or anything with a `sharding`, lies on; None if no mesh placed it."""
    sharding = array.sharding
    return sharding.mesh if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) else None


def on_row(tree: Any, row: Mesh) -> Any:
    """Views arrays that are replicated over the rows of a mesh as arrays on one of `Replica.rows`; copies nothing."""

    def part(x: jax.Array) -> jax.Array:
        spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else PartitionSpec()
        own = [shard.data for shard in x.addressable_shards if shard.device in row.devices]
        return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(row, spec), own)

    return jax.tree.map(part, tree)


def fetch(tree: Any) -> Any:
    """Fetches whole arrays as numpy arrays, on each of the processes that share them."""

    def readable(x: jax.Array) -> jax.Array:
        if x.is_fully_addressable or x.is_fully_replicated or not isinstance(x.sharding, NamedSharding):
            return x
        return jax.jit(lambda x: x, out_shardings=replicated(x.sharding.mesh))(x)

    return jax.device_get(jax.tree.map(readable, tree))


def constrain(tree: Any, rules: Rules) -> Any:
    """Constrains the leaves, inside a program, to the rules' shardings (see `shardings`) on the mesh set, if any."""
    mesh = jax.sharding.get_abstract_mesh()
    if not set(AXES) <= set(mesh.axis_names):
        return tree
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.lax.with_sharding_constraint(leaf, sharding_of(path, leaf, mesh, rules)), tree
    )


def shardings(tree: Any, mesh: Mesh | AbstractMesh, rules: Rules) -> Any:
    """Chooses a NamedSharding for each leaf of a pytree of arrays or ShapeDtypeStructs; returns the same pytree.

    The regex of a rule is searched for in the leaf's path, such as "layers/0/attention/kernel"; the first match wins,
    no match means replicated. A dimension that its mesh axes do not divide is replicated. Raises ValueError: a spec has
    more entries than the leaf has dimensions.
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: sharding_of(path, leaf, mesh, rules), tree)


def parameter_path(path: tuple[Any, ...]) -> str:
    """Formats a pytree path in a module, "blocks/0/attention/qkv", without what lies inside a variable or matrix."""
    return _INSIDE.sub("", jax.tree_util.keystr(path, simple=True, separator="/"))


def sharding_of(path: tuple[Any, ...], leaf: Any, mesh: Mesh | AbstractMesh, rules: Rules) -> NamedSharding:
    """Chooses the sharding of one leaf, see `shardings`."""
    name = parameter_path(path)
    spec = next((spec for pattern, spec in rules if re.search(pattern, name)), PartitionSpec())
    if len(spec) > len(leaf.shape):
        raise ValueError(f"{name}: got {spec} for shape {tuple(leaf.shape)}, expected at most one entry a dimension")

    def divides(axes: Any, size: int) -> bool:
        """Axes are None, a name, a tuple of names, or open."""
        names = () if axes is PartitionSpec.UNCONSTRAINED or not axes else (axes,) if isinstance(axes, str) else axes
        return size % math.prod(mesh.shape[name] for name in names) == 0

    entries = zip(spec, leaf.shape, strict=False)
    return NamedSharding(mesh, PartitionSpec(*(axes if divides(axes, size) else None for axes, size in entries)))
