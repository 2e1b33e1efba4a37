"""What the kernels for TPU share: the shape of a register, the memory that they may use, products of matrices in it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

LANES, SUBLANES = 128, 8  # of a register of 32-bit numbers
VMEM_LIMIT = 56 << 20  # bytes that a kernel may use, of at least 64 MiB that TPUs since v5e have
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
