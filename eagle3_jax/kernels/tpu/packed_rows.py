"""Moves single rows of a tile in TPU registers; copies to and from HBM take whole tiles only.

Types of less than 32 bits are packed, several rows to a word: two of bfloat16, four of int8 and float8. Rows move as
bits of these words, so every type moves exactly, NaNs included.
"""

from __future__ import annotations

from collections.abc import Callable
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


def row_mover(row: Int[Array, ""], to: Int[Array, ""], dtype: Any, width: int) -> Callable[[Array, Array], Array]:
    """Returns (old, new) -> `old` with its row `to` from row `row` of `new`; both are [n, r, d] tiles, `width` wide.

    What depends on the rows alone is computed once: in a loop over tiles it would cost as much as the move.
    """
    packed, mask = _rows_per_word(dtype), rows_between(to, to + 1, dtype, width)[None]
    by = (to // packed - row // packed) % SUBLANES
    here, there = ((x % packed * (32 // packed)).astype(jnp.uint32) for x in (row, to))

    def move(old: Num[Array, "n r d"], new: Num[Array, "n r d"]) -> Num[Array, "n r d"]:
        words = pltpu.roll(pltpu.bitcast(new, jnp.uint32), by, 1)
        return merge_rows(old, pltpu.bitcast(words >> here << there, dtype), mask)

    return move


def rows_at(words: Any, first: Int[Array, ""], dtype: Any) -> Num[Array, "r d"]:
    """Reads the tile of `dtype` from row `first` of a reference to words [w, d]; one more word must follow."""
    packed = _rows_per_word(dtype)
    at = first // packed
    tile = words[pl.ds(at, SUBLANES)]
    if packed > 1:
        bits = (first % packed * (32 // packed)).astype(jnp.uint32)
        tile = (tile >> bits) | (words[pl.ds(at + 1, SUBLANES)] << (31 - bits) << 1)  # a shift by 32 is undefined
    return pltpu.bitcast(tile, dtype)


def rows_between(low: Int[Array, ""], high: Int[Array, ""] | int, dtype: Any, width: int) -> UInt[Array, "w d"]:
    """Returns the mask of `merge_rows` for rows [low, high) of a tile of `dtype`, `width` wide."""
    packed = _rows_per_word(dtype)
    first = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, width), 0) * packed
    mask = jnp.zeros((SUBLANES, width), jnp.uint32)
    for i in range(packed):
        bits = jnp.uint32((1 << 32 // packed) - 1 << 32 // packed * i)
        mask |= jnp.where((first + i >= low) & (first + i < high), bits, jnp.uint32(0))
    return mask


def merge_rows(
    old: Num[Array, "*n r d"], new: Num[Array, "*n r d"], mask: UInt[Array, "*m w d"]
) -> Num[Array, "*n r d"]:
    """Takes `new` in the rows of the mask, `old` elsewhere."""
    before, after = pltpu.bitcast(old, jnp.uint32), pltpu.bitcast(new, jnp.uint32)
    return pltpu.bitcast((before & ~mask) | (after & mask), old.dtype)


def _rows_per_word(dtype: Any) -> int:
    return 4 // jnp.dtype(dtype).itemsize
