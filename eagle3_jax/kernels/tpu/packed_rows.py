"""Rows of a tile in TPU registers, moved one by one: what memory only takes as whole tiles.

Types of less than 32 bits lie packed, several rows to a word: bfloat16 two, int8 and float8 four. Rows move as bits of
such words, so that every type does, exactly, NaNs included.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int, Num, UInt

from eagle3_jax.kernels.tpu.registers import SUBLANES


def tile_rows(dtype: Any) -> int:
    """Rows of a tile: 8 of 32 bits, 16 of 16, 32 of 8. Copies between HBM and VMEM begin and end at tiles."""
    return SUBLANES * _rows_per_word(dtype)


def roll_rows(tile: Num[Array, "r d"], by: Int[Array, ""]) -> Num[Array, "r d"]:
    """Row i of the result is row (i + by) mod r of one tile; 0 <= by < r."""
    words, shift = pltpu.bitcast(tile, jnp.uint32), by // _rows_per_word(tile.dtype)
    rolled, following = (pltpu.roll(words, (SUBLANES - i - shift) % SUBLANES, 0) for i in range(2))
    return _from_row(rolled, following, by, tile.dtype)


def rows_at(words: Any, first: Int[Array, ""], dtype: Any) -> Num[Array, "r d"]:
    """Rows first, first + 1, ... of `dtype`, a tile of them, of a reference to words [w, d]; one must follow them."""
    at = first // _rows_per_word(dtype)
    return _from_row(words[pl.ds(at, SUBLANES)], words[pl.ds(at + 1, SUBLANES)], first, dtype)


def _from_row(words: UInt[Array, "w d"], following: UInt[Array, "w d"], row: Array, dtype: Any) -> Num[Array, "r d"]:
    """A tile that begins with row `row` (modulo those of a word) of the words, each with the one that follows it."""
    packed = _rows_per_word(dtype)
    if packed > 1:
        bits = (row % packed * (32 // packed)).astype(jnp.uint32)
        words = (words >> bits) | (following << (31 - bits) << 1)  # a shift by 32 has no meaning
    return pltpu.bitcast(words, dtype)


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
