"""Matrix products for training: the product and its gradients are summed in float32."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from eagle3_jax.kernels.dispatch import device

# The name under which `jax.checkpoint` keeps what the backward pass needs from a forward pass of attention.
KEPT = "attention"


def contract(spec: str, x: Float[Array, "..."], y: Num[Array, "..."], dtype: Any = jnp.float32) -> Float[Array, "..."]:
    """Computes the einsum of two operands, summed in float32. y is cast to x's dtype; y's gradient has y's own dtype.

    A CPU with AVX512_BF16 multiplies bfloat16 fast only for a float32 result. JAX's own gradient of such a product
    multiplies float32 by bfloat16, slowly on every machine. Here all operands have x's dtype.

    Args:
        dtype: dtype of the result. Other devices than CPUs round each sum to it at once: a cast behind the product
            would leave float32 numbers for a model axis to add up, and for `jax.checkpoint` to keep.
    """
    product: Any = _contract(spec, jnp.dtype(dtype), x, y)
    return product


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _contract(spec: str, dtype: Any, x: Array, y: Array) -> Array:
    return _einsum(spec, x, y.astype(x.dtype), dtype)


def _forward(spec: str, dtype: Any, x: Array, y: Array) -> tuple[Array, tuple[Array, Array]]:
    return _einsum(spec, x, y.astype(x.dtype), dtype), (x, y)


def _backward(spec: str, dtype: Any, operands: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, y = operands
    cotangent = cotangent.astype(x.dtype)
    of_x, of_y, of_result = spec.replace("->", ",").split(",")
    by_x = _einsum(f"{of_result},{of_y}->{of_x}", cotangent, y.astype(x.dtype), x.dtype)
    if spec in ("mk,kn->mn", "mk,nk->mn") and x.dtype == jnp.bfloat16:
        rows = (x, cotangent) if spec == "mk,kn->mn" else (cotangent, x)
        by_y = jax.lax.platform_dependent(
            *rows, cpu=_by_rows_of_transpose, default=functools.partial(_einsum, "mk,mn->kn")
        )
    else:
        by_y = _einsum(f"{of_x},{of_result}->{of_y}", x, cotangent)
    return by_x, by_y.astype(y.dtype)


_contract.defvjp(_forward, _backward)


def _by_rows_of_transpose(x: Array, y: Array) -> Array:
    """Computes x.T @ y from a transpose in memory.

    XLA's fast product of bfloat16 on a CPU does not sum over the rows of its first operand, and XLA folds a plain
    transpose back into the product. It does not see through a reshape. With AMX 2,000 rows take a quarter of the time.
    """
    m, k = x.shape
    piece = math.gcd(m, 8)
    transposed = x.reshape(m // piece, piece, k).transpose(2, 0, 1).reshape(k, m)
    return _einsum("km,mn->kn", transposed, y)


def _einsum(spec: str, x: Array, y: Array, dtype: Any = jnp.float32) -> Array:
    return summed(functools.partial(jnp.einsum, spec, x, y), dtype)


def summed(product: Callable[..., Array], dtype: Any) -> Array:
    """Calls a product that sums in float32 and rounds to `dtype`: at once but on CPUs, which are slow at it."""
    own = jnp.float32 if device().platform == "cpu" else dtype
    return product(precision=jax.lax.Precision.HIGHEST, preferred_element_type=own).astype(dtype)
