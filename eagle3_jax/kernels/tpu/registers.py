"""What the kernels for TPU share: the shape of a register, the memory that they may use, products of matrices in it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

LANES, SUBLANES = 128, 8  # of a register of 32-bit numbers
# Bytes that a kernel may use, of at least 64 MiB of VMEM and of 1 MiB of SMEM that TPUs since v5e have.
VMEM_LIMIT, SMEM_LIMIT = 56 << 20, 960 << 10
NEVER = -1e30  # a score that no sum notices; finite, so that differences of two are numbers


def dot(
    x: Num[Array, "m n"], y: Num[Array, "o p"], x_contracted: int, y_contracted: int
) -> Float[Array, "rows columns"]:
    """float32 product of two matrices, contracted over the named dimensions; exact products for float32."""
    return jax.lax.dot_general(
        x,
        y,
        (((x_contracted,), (y_contracted,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def to_lanes(x: Float[Array, "rows lanes"], size: int) -> Float[Array, "rows size"]:
    """The same value in every lane, `size` of them."""
    return x[:, :size] if size <= LANES else jnp.concatenate([x] * -(-size // LANES), axis=1)[:, :size]


def rescaled(
    before: Float[Array, "rows lanes"], columns: Sequence[Float[Array, "rows lanes"]]
) -> tuple[Float[Array, "rows lanes"], Float[Array, "rows lanes"]]:
    """The online softmax's new maximum over some scores (base 2, a register wide each), and what scales older sums."""
    top = jnp.maximum(before, jnp.max(functools.reduce(jnp.maximum, columns), axis=1, keepdims=True))
    return top, jnp.exp2(before - top)


def check_fits(memory: str, needed: int, limit: int, what: Any) -> None:
    """Raises ValueError, with the numbers, where a kernel would take more bytes than the limit."""
    if needed > limit:
        raise ValueError(f"{memory}: got {needed / 2**20:.1f} MiB for {what}, expected at most {limit / 2**20:g} MiB")
