"""KV heads packed side by side into cache rows, for the kernels for TPU.

A TPU holds rows in registers of 128 lanes. Heads of 64 numbers in rows of their own would take twice the memory and
bandwidth. To save that, XLA would place slots in the lanes, a layout that the kernels cannot read. Each program would
then copy the whole cache before its first round and after its last.

A query is zero in the lanes of the other heads in its row, so its product with the row is the product with its own
head. Of the attended row it takes its own head's part.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from eagle3_jax.kernels.dispatch import default_implementation
from eagle3_jax.kernels.tpu.registers import LANES

SLOTS = LANES  # a contiguous cache has a multiple of this many slots: whole registers of scores


def cache_rows(kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Returns the rows that hold a slot's KV heads in a layer's cache, and the numbers per row.

    As many heads share a row as fit into 128 lanes, if the model axis of the current mesh splits the rows wherever it
    splits the heads. Rows are padded with zeros to whole registers. Without a kernel for TPU each head has a row of its
    own, without padding.
    """
    if default_implementation() != "pallas":
        return kv_heads, head_dim
    ways = jax.sharding.get_abstract_mesh().shape.get("model", 1)
    ways = ways if kv_heads % ways == 0 else 1
    most = max(1, LANES // head_dim)
    beside = next(count for count in range(most, 0, -1) if kv_heads % (count * ways) == 0)
    return kv_heads // beside, -(-beside * head_dim // LANES) * LANES


def pack_heads(x: Num[Array, "b k t d"], rows: int, width: int) -> Num[Array, "b rows t width"]:
    """Packs new entries into rows of the cache."""
    b, kv_heads, t, d = x.shape
    beside = kv_heads // rows
    packed = x.reshape(b, rows, beside, t, d).swapaxes(2, 3).reshape(b, rows, t, beside * d)
    return jnp.pad(packed, ((0, 0), (0, 0), (0, 0), (0, width - beside * d)))


def spread_queries(queries: Float[Array, "b t n d"], beside: int, rows: int, width: int) -> Float[Array, "b t n width"]:
    """Places each query in the lanes of its own KV head, of `beside` heads in a row; zeros elsewhere."""
    b, t, n, d = queries.shape
    own = jnp.eye(beside, dtype=bool)[None, None, None, :, None, :, None]
    grouped = queries.reshape(b, t, rows, beside, -1, 1, d)
    spread = jnp.where(own, grouped, jnp.zeros((), queries.dtype)).reshape(b, t, n, beside * d)
    return jnp.pad(spread, ((0, 0), (0, 0), (0, 0), (0, width - beside * d)))


def own_parts(attended: Float[Array, "b t n width"], beside: int, rows: int, d: int) -> Float[Array, "b t n d"]:
    """Takes the part of each query's own KV head from its row: the inverse of `spread_queries`."""
    b, t, n, _ = attended.shape
    parts = attended[..., : beside * d].reshape(b, t, rows, beside, -1, beside, d)
    return jnp.stack([parts[:, :, :, i, :, i] for i in range(beside)], axis=3).reshape(b, t, n, d)
