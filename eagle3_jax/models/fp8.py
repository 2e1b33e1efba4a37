"""Hidden states in 8 bits: float8 (e4m3, largest value 448) with a float32 scale for each state of each token."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
from jaxtyping import Array, Float, Float32

DTYPE = jnp.float8_e4m3fn
_LARGEST = float(ml_dtypes.finfo(DTYPE).max)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8:
    """States side by side: float8_e4m3fn [..., states * H] times scale, float32 [..., states]."""

    values: Any
    scale: Any

    @classmethod
    def of(cls, x: Float[Array, "... width"], states: int) -> Fp8:
        """Scales each of so many states: its largest absolute value is the largest float8; zeros have scale 1."""
        parts = x.astype(jnp.float32).reshape(*x.shape[:-1], states, -1)
        largest = jnp.abs(parts).max(-1)
        scale = jnp.where(largest > 0, jnp.maximum(largest / _LARGEST, jnp.finfo(jnp.float32).tiny), 1.0)
        values = jnp.clip(parts / scale[..., None], -_LARGEST, _LARGEST)
        return cls(values.astype(DTYPE).reshape(x.shape), scale)

    def decode(self) -> Float[Array, "... width"]:
        """Decodes to bfloat16, of the values' shape."""
        scale: Float32[Array, "... states"] = self.scale
        parts = self.values.reshape(*scale.shape, -1).astype(jnp.float32) * scale[..., None]
        return parts.astype(jnp.bfloat16).reshape(self.values.shape)


def paired(arrays: dict[str, Any]) -> dict[str, Any]:
    """Joins the fields of a batch: values `x` and their `x_scale` become one `Fp8`."""
    scales = {name.removesuffix("_scale"): x for name, x in arrays.items() if name.endswith("_scale")}
    plain = {name: x for name, x in arrays.items() if not name.endswith("_scale")}
    return plain | {name: Fp8(plain[name], scale) for name, scale in scales.items()}


def decoded(tree: Any) -> Any:
    """Decodes each `Fp8` of a pytree to a bfloat16 array."""
    return jax.tree.map(
        lambda leaf: leaf.decode() if isinstance(leaf, Fp8) else leaf, tree, is_leaf=lambda leaf: isinstance(leaf, Fp8)
    )
