"""What the program that is traced now is for: which implementation, which device, which mesh."""

from __future__ import annotations

from typing import Any, Literal

import jax

Implementation = Literal["xla", "pallas"]


def device() -> Any:
    """The device of the mesh that is set (`jax.set_mesh`), else this process's first."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def default_implementation() -> Implementation:
    """Pallas on a TPU, XLA elsewhere."""
    return "pallas" if device().platform == "tpu" else "xla"


def split_axis(name: str, *sizes: int) -> str | None:
    """The axis of the mesh that is set, where it has several ways and divides all sizes; else None."""
    ways = jax.sharding.get_abstract_mesh().shape.get(name, 1)
    return name if ways > 1 and all(size % ways == 0 for size in sizes) else None
