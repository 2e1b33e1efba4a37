"""Devices as a data x model mesh, where arrays lie on it, and the start of a multi-host run.

Both axes are Auto: programs are written for one device, inputs and parameters say where they lie, and the compiler
propagates the rest (GSPMD).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from eagle3_jax.config import MeshConfig

AXES = ("data", "model")

# Where a Cloud TPU VM tells its workers about each other.
_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/worker-network-endpoints"


def _has_tpu() -> bool:
    """Whether this machine has TPU chips; asks the file system, since asking JAX would start the backend."""
    return any(
        True for folder, name in (("/dev", "accel*"), ("/dev/vfio", "[0-9]*")) for _ in pathlib.Path(folder).glob(name)
    )


def _leave_tpus_alone() -> None:
    """Keeps libtpu from starting where there is no TPU: it takes time and prints a page of warnings.

    Only where a CPU is all that JAX could find: nothing chosen yet, no TPU chip, no plugin of another accelerator.
    """
    chosen: Any = jax.config
    if chosen.jax_platforms or _has_tpu() or "PJRT_NAMES_AND_LIBRARY_PATHS" in os.environ:
        return
    if importlib.util.find_spec("jax_plugins") or importlib.metadata.entry_points(group="jax_plugins"):
        return
    jax.config.update("jax_platforms", "cpu")


_leave_tpus_alone()


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
    """The devices that one engine decodes on: the model axis. Its batch is not split, so more would repeat the work."""
    devices = jax.devices() if devices is None else devices
    return make_mesh(MeshConfig(data=1, model=config.model), devices[: config.model])


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The leading dimension split over the data axis."""
    return NamedSharding(mesh, PartitionSpec("data"))


def shardings(tree: Any, mesh: Mesh, rules: Sequence[tuple[str, PartitionSpec]]) -> Any:
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

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        # An NNX variable is itself a node with the single child "value".
        name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
        spec = next((spec for pattern, spec in rules if re.search(pattern, name)), PartitionSpec())
        if len(spec) > len(leaf.shape):
            raise ValueError(
                f"{name}: got {spec} for shape {tuple(leaf.shape)}, expected at most one entry a dimension"
            )
        entries = zip(spec, leaf.shape, strict=False)
        return NamedSharding(
            mesh, PartitionSpec(*(axes if size % _ways(mesh, axes) == 0 else None for axes, size in entries))
        )

    return jax.tree_util.tree_map_with_path(place, tree)


def _ways(mesh: Mesh, axes: Any) -> int:
    """In how many parts the named axes (None, a name or a tuple of names) split a dimension."""
    names = (axes,) if isinstance(axes, str) else axes or ()
    ways = 1
    for name in names:
        ways *= mesh.shape[name]
    return ways


def start_distributed() -> bool:
    """Joins the other hosts, where there are any; call it before anything touches a device.

    On TPU pods and slices JAX finds the hosts itself. Elsewhere set JAX_COORDINATOR_ADDRESS (host:port of process 0)
    with JAX_NUM_PROCESSES and JAX_PROCESS_ID, unless a scheduler that JAX knows (Slurm, MPI) supplies the latter two.

    Returns:
        True when this process is one of several.
    """
    if not _is_multi_host(os.environ):
        return False
    if not jax.distributed.is_initialized():
        jax.distributed.initialize(num_processes=_number("JAX_NUM_PROCESSES"), process_id=_number("JAX_PROCESS_ID"))
    return True


def _number(variable: str) -> int | None:
    value = os.environ.get(variable)
    if value is not None and not value.isdecimal():
        raise ValueError(f"{variable}: got {value!r}, expected a number")
    return None if value is None else int(value)


def _is_multi_host(environment: Mapping[str, str]) -> bool:
    if environment.get("JAX_COORDINATOR_ADDRESS") or environment.get("MEGASCALE_COORDINATOR_ADDRESS"):
        return True
    workers = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    if workers:
        return "," in workers
    if "TPU_SKIP_MDS_QUERY" in environment or not _has_tpu():
        return False
    return "," in _worker_endpoints()


def _worker_endpoints() -> str:
    """The comma-separated workers of this TPU VM's slice; empty where no Cloud metadata server answers."""
    request = urllib.request.Request(_METADATA, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=3) as answer:
            return answer.read().decode()
    except (urllib.error.URLError, TimeoutError):
        return ""
