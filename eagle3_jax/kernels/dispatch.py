"""The one chooser of a kernel's implementation, and how a mesh splits a kernel's work.

An operation's `api` calls `choose` with the implementations that it has. "xla" is XLA's own operations, "pallas" a
Pallas kernel for TPU, "cpu" LLVM IR for the processor at hand (`kernels/cpu/`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax import P
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from eagle3_jax.kernels.cpu import handler
from eagle3_jax.kernels.tpu.registers import VMEM_LIMIT

Implementation = Literal["xla", "pallas", "cpu"]


def device() -> Any:
    """The device that the traced program is for: that of the mesh that is set, else the process's first."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def cores() -> int:
    """Cores that share the work of one device: two on TPU v4 and v5p, one elsewhere."""
    return getattr(device(), "num_cores", None) or 1


def default_implementation(of: Any = None) -> Implementation:
    """The implementation that suits a device, where the operation has it.

    "pallas" on a TPU with the VMEM that the kernels need (v5e and later; v4 has 16 MiB), "cpu" on a CPU where its
    kernels are on (`handler.enabled`), "xla" elsewhere.

    Args:
        of: the device; None is `device()`.
    """
    of = of or device()
    if of.platform == "cpu" and handler.enabled():
        return "cpu"
    if of.platform == "tpu" and pltpu.get_tpu_info().vmem_capacity_bytes > VMEM_LIMIT:
        return "pallas"
    return "xla"


def choose(given: Implementation | None, *, pallas: bool = False, cpu: bool = False) -> Implementation:
    """The implementation that runs: `given`; else the device's default if the operation offers it; else "xla".

    Args:
        pallas, cpu: whether the operation has this implementation for its arguments.

    Raises:
        ValueError: `given` is not offered.
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
    """Axes of the mesh that is set over which something of these sizes is split.

    Args:
        sizes: by axis; an axis that does not divide its size splits nothing.
    """
    shape = jax.sharding.get_abstract_mesh().shape
    return {name for name, size in sizes.items() if shape.get(name, 1) > 1 and size % shape[name] == 0}


def over_mesh(
    function: Callable[..., Any],
    operands: Sequence[Array | None],
    specs: Sequence[P],
    results: Any,
    sizes: dict[str, int],
) -> Any:
    """Calls `function` on each device's share of the operands.

    A Pallas call is opaque to the partitioner, so the mesh that is set (`jax.set_mesh`) says how to split it.

    Args:
        specs: of the operands, for a mesh whose axes all split. results: specs of the results.
        sizes: see `split_axes`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function(*operands)
    axes = split_axes(sizes)

    def kept(spec: P) -> P:
        return P(*(axis if axis in axes else None for axis in spec))

    def local(*shares: Array) -> Any:
        rest = iter(shares)
        return function(*(None if operand is None else next(rest) for operand in operands))

    split = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(kept(spec) for spec, operand in zip(specs, operands, strict=True) if operand is not None),
        out_specs=jax.tree.map(kept, results, is_leaf=lambda x: isinstance(x, P)),
        check_vma=False,
    )
    return split(*(operand for operand in operands if operand is not None))
