"""Checks a checkpoint's tensors against its config: for targets, heads, and weights in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

Shapes = Mapping[str, tuple[int, ...]]


class Described(NamedTuple):
    """A tensor that is not read yet; its dtype is one of safetensors' names."""

    dtype: str
    shape: tuple[int, ...]


def not_floats(name: str, dtype: Any) -> str | None:
    """Returns the dtype that was expected of a tensor; None if it is of floats, as it should be."""
    return None if jnp.issubdtype(dtype, np.floating) else "floating point"


def tensor_problems(
    found: Mapping[str, Any],
    expected: Shapes,
    optional: Shapes | None = None,
    other_dtype: Callable[[str, Any], str | None] = not_floats,
) -> list[str]:
    """Lists every tensor that is missing, surplus, of a wrong shape or dtype, or not finite, by name.

    Args:
        found: arrays, or `Described` tensors; numpy's arrays alone are searched for NaN and infinity.
        expected: shapes of the tensors that must be there. optional: of those that may.
        other_dtype: see `not_floats`.
    """
    known = {**expected, **(optional or {})}
    problems = [f"missing tensor {name} {list(shape)}" for name, shape in expected.items() if name not in found]
    problems += [f"surplus tensor {name}" for name in sorted(found.keys() - known.keys())]
    for name, shape in known.items():
        if (tensor := found.get(name)) is None:
            continue
        if tuple(tensor.shape) != shape:
            problems.append(f"{name}: got shape {list(tensor.shape)}, expected {list(shape)}")
        elif wanted := other_dtype(name, tensor.dtype):
            problems.append(f"{name}: got dtype {tensor.dtype}, expected {wanted}")
        elif isinstance(tensor, np.ndarray) and tensor.dtype.kind not in "iub" and not np.isfinite(tensor).all():
            problems.append(f"{name}: got NaN or infinity, expected finite numbers")
    return problems
