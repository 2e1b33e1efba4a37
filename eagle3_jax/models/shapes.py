"""Models without arrays: their structure, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx

_Model = TypeVar("_Model", bound=nnx.Module)


class _OneKey(nnx.Rngs):
    """Deals one key again and again: no shape depends on it, and another one for each parameter takes a millisecond."""

    def __init__(self) -> None:
        self.key = jax.random.key(0)

    def params(self) -> Any:
        return self.key


def shapes_of(make: Callable[[nnx.Rngs], _Model]) -> _Model:
    """Returns what `make` would, with a `ShapeDtypeStruct` for each array; draws no numbers."""
    return nnx.eval_shape(lambda: make(_OneKey()))
