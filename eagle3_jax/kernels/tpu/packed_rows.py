"""Moves single rows of a tile in TPU registers; copies to and from HBM take whole tiles only.

Types of less than 32 bits are packed, several rows to a word: two of bfloat16, four of int8 and float8. Rows move as
bits of these words, so every type moves exactly, NaNs included.
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
    """Returns the rows of a tile, the unit of copies between HBM and VMEM: 8 of 32 bits, 16 of 16, 32 of 8."""
    return SUBLANES * _rows_per_word(dtype)


def roll_rows(tile: Num[Array, "r d"], by: Int[Array, ""]) -> Num[Array, "r d"]:
    """Rolls one tile: row i of the result is row (i + by) mod r; 0 <= by < r."""
    words, shift = pltpu.bitcast(tile, jnp.uint32), by // _rows_per_word(tile.dtype)
    rolled, following = (pltpu.roll(words, (SUBLANES - i - shift) % SUBLANES, 0) for i in range(2))
    return _from_row(rolled, following, by, tile.dtype)


def rows_at(words: Any, first: Int[Array, ""], dtype: Any) -> Num[Array, "r d"]:
    """Reads the tile of `dtype` from row `first` of a reference to words [w, d]; one more word must follow."""
    at = first // _rows_per_word(dtype)
    return _from_row(words[pl.ds(at, SUBLANES)], words[pl.ds(at + 1, SUBLANES)], first, dtype)


def _from_row(words: UInt[Array, "w d"], following: UInt[Array, "w d"], row: Array, dtype: Any) -> Num[Array, "r d"]:
    """Returns the tile that begins at row `row` (modulo the rows of a word); `following` has the word after each."""
    packed = _rows_per_word(dtype)
    if packed > 1:
        bits = (row % packed * (32 // packed)).astype(jnp.uint32)
        words = (words >> bits) | (following << (31 - bits) << 1)  # a shift by 32 is undefined
    return pltpu.bitcast(words, dtype)


def rows_between(low: Int[Array, ""], high: Int[Array, ""] | int, dtype: Any, width: int) -> UInt[Array, "w d"]:
    """Returns the mask of `merge_rows` for rows [low, high) of a tile of `dtype`, `width` wide."""
    packed = _rows_per_word(dtype)
    first = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, width), 0) * packed
    mask = jnp.zeros((SUBLANES, width), jnp.uint32)
    for i in range(packed):
        bits = jnp.uint32((1 << 32 // packed) - 1 << 32 // packed * i)
        mask |= jnp.where((first + i >= low) & (first + i < high), bits, jnp.uint32(0))
    return mask


def merge_rows(old: Num[Array, "r d"], new: Num[Array, "r d"], mask: UInt[Array, "w d"]) -> Num[Array, "r d"]:
    """Takes `new` in the rows of the mask, `old` elsewhere."""
    before, after = pltpu.bitcast(old, jnp.uint32), pltpu.bitcast(new, jnp.uint32)
    return pltpu.bitcast((before & ~mask) | (after & mask), old.dtype)


def _rows_per_word(dtype: Any) -> int:
    return 4 // jnp.dtype(dtype).itemsize
