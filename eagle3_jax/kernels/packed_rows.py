"""Rows of a tile in TPU registers, moved one by one: what memory only takes as whole tiles.

Types of less than 32 bits lie packed, several rows to a word: bfloat16 two, int8 and float8 four. Rows move as bits of
such words, so that every type does, exactly, NaNs included.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int, Num, UInt

from eagle3_jax.kernels.registers import SUBLANES


def tile_rows(dtype: Any) -> int:
    """Rows of a tile: 8 of 32 bits, 16 of 16, 32 of 8. Copies between HBM and VMEM begin and end at tiles."""
    return SUBLANES * _rows_per_word(dtype)


def roll_rows(tile: Num[Array, "r d"], by: Int[Array, ""]) -> Num[Array, "r d"]:
    """Row i of the result is row (i + by) mod r of one tile; 0 <= by < r."""
    words = pltpu.bitcast(tile, jnp.uint32)
    packed = _rows_per_word(tile.dtype)
    shift = by // packed
    rolled = pltpu.roll(words, (SUBLANES - shift) % SUBLANES, 0)
    if packed > 1:
        following = pltpu.roll(words, (SUBLANES - 1 - shift) % SUBLANES, 0)
        bits = (by % packed * (32 // packed)).astype(jnp.uint32)
        rolled = (rolled >> bits) | (following << (31 - bits) << 1)  # a shift by 32 has no meaning
    return pltpu.bitcast(rolled, tile.dtype)


def rows_between(low: Int[Array, ""], high: Int[Array, ""] | int, dtype: Any, width: int) -> UInt[Array, "w d"]:
    """Bits of rows low, low + 1, ..., high - 1 of a tile of `dtype`, `width` wide, as `merge_rows` takes them."""
    packed = _rows_per_word(dtype)
    first = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, width), 0) * packed
    mask = jnp.zeros((SUBLANES, width), jnp.uint32)
    for i in range(packed):
        bits = jnp.uint32((1 << 32 // packed) - 1 << 32 // packed * i)
        mask |= jnp.where((first + i >= low) & (first + i < high), bits, jnp.uint32(0))
    return mask


def merge_rows(old: Num[Array, "r d"], new: Num[Array, "r d"], mask: UInt[Array, "w d"]) -> Num[Array, "r d"]:
    """`new` in the rows of the mask, `old` elsewhere."""
    before, after = pltpu.bitcast(old, jnp.uint32), pltpu.bitcast(new, jnp.uint32)
    return pltpu.bitcast((before & ~mask) | (after & mask), old.dtype)


def _rows_per_word(dtype: Any) -> int:
    return 4 // jnp.dtype(dtype).itemsize
