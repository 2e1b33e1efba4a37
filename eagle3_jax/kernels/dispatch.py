"""Which implementation of a kernel runs, and how a mesh splits it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax import P
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from eagle3_jax.kernels.tpu.registers import VMEM_LIMIT

Implementation = Literal["xla", "pallas"]


def device() -> Any:
    """What the program that is traced now is for: the device of the mesh that is set, else this process's first."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def cores() -> int:
    """How many cores share the work of one device: two on TPU v4 and v5p, one elsewhere."""
    return getattr(device(), "num_cores", None) or 1


def default_implementation() -> Implementation:
    """Pallas on a TPU that has the VMEM which the kernels count on (v5e and later; v4 has 16 MiB), XLA elsewhere."""
    if device().platform != "tpu" or pltpu.get_tpu_info().vmem_capacity_bytes <= VMEM_LIMIT:
        return "xla"
    return "pallas"


def split_axes(sizes: dict[str, int]) -> set[str]:
    """The axes of the mesh that is set which split what they are to split.

    Args:
        sizes: by axis, of what it is to split; an axis that does not divide its size splits nothing.
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
    """`function` on each device's share of its operands.

    A Pallas call is opaque to the partitioner, so the mesh that is set (`jax.set_mesh`) says how to split it.

    Args:
        specs: of the operands, as if every axis of the mesh split what it may. results: of what is returned.
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
