"""Which implementation of a kernel runs, and how a mesh splits it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax import P
from jaxtyping import Array

Implementation = Literal["xla", "pallas"]


def device() -> Any:
    """What the program that is traced now is for: the device of the mesh that is set, else this process's first."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def cores() -> int:
    """How many cores share the work of one device: two on TPU v4 and v5p, one elsewhere."""
    return getattr(device(), "num_cores", None) or 1


def default_implementation() -> Implementation:
    """Pallas on a TPU, XLA elsewhere."""
    return "pallas" if device().platform == "tpu" else "xla"


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
        sizes: of what each axis of the mesh is to split; an axis that does not divide its size splits nothing.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function(*operands)
    axes = {name for name, size in sizes.items() if mesh.shape.get(name, 1) > 1 and size % mesh.shape[name] == 0}

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
