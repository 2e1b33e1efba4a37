"""KV heads side by side in one row of the cache, where kernels for TPU read it.

A TPU holds rows in registers of 128 lanes. Heads of 64 numbers in rows of their own would take twice the memory and
the bandwidth; XLA, to save that, gives such an array a layout with its slots in the lanes, which the kernels cannot
read: each program would copy all of the cache before its first round and after its last.

A query has zeros where its row holds the other heads, so that the product with the whole row is the one with its own
head; of what it attends it takes its own head's part.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from eagle3_jax.kernels.dispatch import default_implementation
from eagle3_jax.kernels.tpu.registers import LANES

SLOTS = LANES  # slots of a contiguous cache: a multiple of this, for the TPU kernel's registers of scores


def cache_rows(kv_heads: int, head_dim: int) -> tuple[int, int]:
    """In how many rows a layer's cache holds the KV heads of a slot, and how many numbers a row has.

    As many heads share a row as fit into 128 lanes, as long as the model axis of the mesh that is set splits the rows
    where it splits the heads. A row is whole registers: zeros stand behind what does not fill one. Where no kernel for
    TPU runs each head has a row of its own, without zeros.
    """
    if default_implementation() != "pallas":
        return kv_heads, head_dim
    ways = jax.sharding.get_abstract_mesh().shape.get("model", 1)
    ways = ways if kv_heads % ways == 0 else 1
    most = max(1, LANES // head_dim)
    beside = next(count for count in range(most, 0, -1) if kv_heads % (count * ways) == 0)
    return kv_heads // beside, -(-beside * head_dim // LANES) * LANES


def pack_heads(x: Num[Array, "b k t d"], rows: int, width: int) -> Num[Array, "b rows t width"]:
    """New entries as rows of the cache."""
    b, kv_heads, t, d = x.shape
    beside = kv_heads // rows
    packed = x.reshape(b, rows, beside, t, d).swapaxes(2, 3).reshape(b, rows, t, beside * d)
    return jnp.pad(packed, ((0, 0), (0, 0), (0, 0), (0, width - beside * d)))


def spread_queries(queries: Float[Array, "b t n d"], beside: int, rows: int, width: int) -> Float[Array, "b t n width"]:
    """Each query at the lanes of its own KV head, of `beside` in a row; zeros elsewhere."""
    b, t, n, d = queries.shape
    own = jnp.eye(beside, dtype=bool)[None, None, None, :, None, :, None]
    grouped = queries.reshape(b, t, rows, beside, -1, 1, d)
    spread = jnp.where(own, grouped, jnp.zeros((), queries.dtype)).reshape(b, t, n, beside * d)
    return jnp.pad(spread, ((0, 0), (0, 0), (0, 0), (0, width - beside * d)))


def own_parts(attended: Float[Array, "b t n width"], beside: int, rows: int, d: int) -> Float[Array, "b t n d"]:
    """Of each query's row the part of its own KV head: the inverse of `spread_queries`."""
    b, t, n, _ = attended.shape
    parts = attended[..., : beside * d].reshape(b, t, rows, beside, -1, beside, d)
    return jnp.stack([parts[:, :, :, i, :, i] for i in range(beside)], axis=3).reshape(b, t, n, d)
