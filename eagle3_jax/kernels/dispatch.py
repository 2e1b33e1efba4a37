"""Chooses the implementation of a kernel, and splits a kernel's work over a mesh.

An operation's `api` calls `choose` with the implementations that it has. "xla" is XLA's own operations, "pallas" a
Pallas kernel for TPU, "cpu" LLVM IR for the processor at hand (`kernels/cpu/`). Pallas is imported where a kernel of it
is chosen: elsewhere its import would be a third of a start's imports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax import P

from eagle3_jax.kernels.cpu import handler
from eagle3_jax.kernels.tpu.registers import VMEM_LIMIT

Implementation = Literal["xla", "pallas", "cpu"]


def device() -> Any:
    """Returns the device that the traced program runs on: the current mesh's, else the process's first."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def cores() -> int:
    """Returns the number of cores that share a device's work: two on TPU v4 and v5p, one elsewhere."""
    return getattr(device(), "num_cores", None) or 1


def default_implementation(of: Any = None) -> Implementation:
    """Returns "pallas" for a TPU with enough VMEM, "cpu" for a CPU whose kernels are enabled, else "xla".

    TPUs since v5e have enough; v4 has 16 MiB. `of` is the device; None is `device()`.
    """
    of = of or device()
    if of.platform == "cpu" and handler.enabled():
        return "cpu"
    if of.platform == "tpu":
        from jax.experimental.pallas import tpu as pltpu

        return "pallas" if pltpu.get_tpu_info().vmem_capacity_bytes > VMEM_LIMIT else "xla"
    return "xla"


def choose(given: Implementation | None, *, pallas: bool = False, cpu: bool = False) -> Implementation:
    """Chooses the implementation: `given`, else the device's default if the operation offers it, else "xla".

    `pallas`, `cpu`: whether the operation has such a kernel for its arguments. Raises ValueError: `given` has none.
    """
    offered = {"xla": True, "pallas": pallas, "cpu": cpu}
    if given is None:
        default = default_implementation()
        return default if offered[default] else "xla"
    if not offered[given]:
        expected = " or ".join(repr(name) for name, has in offered.items() if has)
        raise ValueError(f"implementation: got {given!r}, expected {expected} for these arguments")
    return given


def split_axes(sizes: dict[str, int]) -> set[str]:
    """Returns the axes of the current mesh that split dimensions of these sizes (by axis), and divide them.

    Axes that are split already are left out.
    """
    mesh = jax.sharding.get_abstract_mesh()
    shape = {name: size for name, size in mesh.shape.items() if name not in mesh.manual_axes}
    return {name for name, size in sizes.items() if shape.get(name, 1) > 1 and size % shape[name] == 0}


def is_whole() -> bool:
    """Tells whether operands lie whole on a device: the mesh has one, or the code runs inside a `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    return all(size == 1 for name, size in mesh.shape.items() if name not in mesh.manual_axes)


def over_mesh(
    function: Callable[..., Any], operands: Sequence[Any], specs: Sequence[P], results: Any, sizes: dict[str, int]
) -> Any:
    """Calls `function` on each device's share of the operands: XLA's partitioner does not see into a Pallas call.

    Args:
        operands: arrays, or pytrees of them that a spec splits alike; None is passed on.
        specs: partition of each operand, for a mesh whose axes all split. A dimension of size 1 is not split.
        results: partition of the results.
        sizes: see `split_axes`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function(*operands)
    axes = split_axes(sizes)

    def kept(spec: P, *, shape: Sequence[int] = ()) -> P:
        whole = {i for i, size in enumerate(shape) if size == 1}
        return P(*(axis if axis in axes and i not in whole else None for i, axis in enumerate(spec)))

    def of(spec: P, operand: Any) -> Any:
        return jax.tree.map(lambda leaf: kept(spec, shape=leaf.shape), operand)

    def local(*shares: Any) -> Any:
        rest = iter(shares)
        return function(*(None if operand is None else next(rest) for operand in operands))

    split = jax.shard_map(
        local,
        mesh=mesh,
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        in_specs=tuple(of(spec, operand) for spec, operand in zip(specs, operands, strict=True) if operand is not None),
        out_specs=jax.tree.map(kept, results, is_leaf=lambda x: isinstance(x, P)),
        check_vma=False,
    )
    return split(*(operand for operand in operands if operand is not None))
