"""Shared by the kernels for TPU: register shape, memory limits, and operations on matrices in registers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

LANES, SUBLANES = 128, 8  # shape of a register of 32-bit numbers
# Bytes that a kernel may use; TPUs since v5e have at least 64 MiB of VMEM and 1 MiB of SMEM.
VMEM_LIMIT, SMEM_LIMIT = 56 << 20, 960 << 10
NEVER = -1e30  # score of a masked key: adds nothing to a sum; finite, so that no difference is NaN


def dot(
    x: Num[Array, "m n"], y: Num[Array, "o p"], x_contracted: int, y_contracted: int
) -> Float[Array, "rows columns"]:
    """Multiplies two matrices into float32, contracted over the given dimensions; float32 operands are not rounded."""
    return jax.lax.dot_general(
        x,
        y,
        (((x_contracted,), (y_contracted,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def to_lanes(x: Float[Array, "rows lanes"], size: int) -> Float[Array, "rows size"]:
    """Widens x, whose lanes are all equal, to `size` lanes."""
    return x[:, :size] if size <= LANES else jnp.concatenate([x] * -(-size // LANES), axis=1)[:, :size]


def rescaled(
    before: Float[Array, "rows lanes"], columns: Sequence[Float[Array, "rows lanes"]]
) -> tuple[Float[Array, "rows lanes"], Float[Array, "rows lanes"]]:
    """Returns the online softmax's new maximum after some scores (base 2), and the factor for the older sums."""
    top = jnp.maximum(before, jnp.max(functools.reduce(jnp.maximum, columns), axis=1, keepdims=True))
    return top, jnp.exp2(before - top)


def check_fits(memory: str, needed: int, limit: int, what: Any) -> None:
    """Raises ValueError, with the numbers, if a kernel needs more bytes than the limit."""
    if needed > limit:
        raise ValueError(f"{memory}: got {needed / 2**20:.1f} MiB for {what}, expected at most {limit / 2**20:g} MiB")
