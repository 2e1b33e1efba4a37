"""Writes new keys and values to the cache, within the tree attention kernel: a read-modify-write of the touched rows.

HBM takes whole tiles of rows only (16 of bfloat16), and new tokens begin anywhere in a tile. The blocks of the tail are
in VMEM anyway, to be attended. The new rows are merged there, and the touched tiles are copied back to HBM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from eagle3_jax.kernels.tpu.packed_rows import merge_rows, rows_at, rows_between, tile_rows
from eagle3_jax.kernels.tpu.registers import LANES, SUBLANES
from eagle3_jax.kernels.tree_attention.plan import Shape
from eagle3_jax.kernels.tree_attention.tpu_pages import Pages


@dataclasses.dataclass(frozen=True)
class NewEntries:
    """The new keys and values of a sequence.

    Attributes:
        held: uint32 words for each cache, [parts * k, words, lanes]. An arbitrary tile stands before and behind
            them, so that `rows_at` may read a tile from any row on.
        sent: DMA semaphore.
    """

    pages: Pages
    held: tuple[Any, ...]
    sent: Any

    @staticmethod
    def scratch(s: Shape, dtype: Any) -> list[Any]:
        """Returns the shapes of the arrays of words and of the semaphore."""
        words = s.new_rows(dtype) // tile_rows(dtype) * SUBLANES
        held = (s.parts * s.kv_heads, words + 2 * SUBLANES, min(s.head_dim, LANES))
        return [*[pltpu.VMEM(held, jnp.uint32)] * s.caches, pltpu.SemaphoreType.DMA]

    def hold(self, new: Sequence[Any]) -> None:
        """Stores a sequence's new entries for each cache, [1, k, rows, d]."""
        for given, held in zip(new, self.held, strict=True):
            for part, head, lanes in self._registers():
                words = pltpu.bitcast(given[0, head, :, lanes], jnp.uint32)
                held[part * self.pages.shape.kv_heads + head, pl.ds(SUBLANES, len(words)), : lanes.size] = words

    def write(self, tile: Any, block: Any) -> None:
        """Merges the new entries into a block in VMEM, and starts copying the touched tiles to the cache."""
        pages, s = self.pages, self.pages.shape
        dtype, buffer = pages.buffers[0].dtype, pages.buffer(tile, block)
        height = tile_rows(dtype)

        def one(row: Any) -> None:
            first = block * s.block + row - (pages.end(tile) - s.written)  # new entry in the tile's first row
            written = rows_between(-first, s.written - first, dtype, min(s.head_dim, LANES))
            for rows, held in zip(pages.buffers, self.held, strict=True):
                for part, head, lanes in self._registers():
                    at = (buffer, head, pl.ds(row, height), lanes)
                    fresh = rows_at(held.at[part * s.kv_heads + head], height + first, dtype)[:, : lanes.size]
                    rows[at] = merge_rows(rows[at], fresh, written[:, : lanes.size])
            for copy in self._copies(tile, block, row):
                copy.start()

        self._each_tile_of_rows(tile, block, one)

    def wait(self, tile: Any, block: Any) -> None:
        """Waits until a block is copied, before other pages are prefetched into its buffer."""

        def one(row: Any) -> None:
            for copy in self._copies(tile, block, row):
                copy.wait()

        self._each_tile_of_rows(tile, block, one)

    def _registers(self) -> list[tuple[int, int, Any]]:
        """Lists (part, head, lanes) of every register of a cache row."""
        s = self.pages.shape
        parts = [(part, part * LANES, min(LANES, s.head_dim - part * LANES)) for part in range(s.parts)]
        return [(part, head, pl.ds(at, width)) for part, at, width in parts for head in range(s.kv_heads)]

    def _copies(self, tile: Any, block: Any, row: Any) -> list[Any]:
        """Returns the copies, for each cache, of the tile that begins at the block's row `row`."""
        pages, s = self.pages, self.pages.shape
        buffer, height = pages.buffer(tile, block), tile_rows(pages.buffers[0].dtype)
        there, slot = pages.at(tile, block * s.step + row // s.page_size)
        slot = pl.multiple_of(slot + row % s.page_size, height)
        return [
            pltpu.make_async_copy(
                rows.at[buffer, :, pl.ds(row, height)], cache.at[there, :, pl.ds(slot, height)], self.sent
            )
            for rows, cache in zip(pages.buffers, pages.caches, strict=True)
        ]

    def _each_tile_of_rows(self, tile: Any, block: Any, act: Callable[[Any], None]) -> None:
        """Calls act(row) for each tile of the block that new entries touch; `row` is the tile's first row."""
        pages, s = self.pages, self.pages.shape
        height, end = tile_rows(pages.buffers[0].dtype), pages.end(tile)
        first, last, inside = (end - s.written) // height, pl.cdiv(end, height), s.block // height

        def each(n: Any, _: None) -> None:
            act(pl.multiple_of(n * height - block * s.block, height))

        jax.lax.fori_loop(jnp.maximum(first, block * inside), jnp.minimum(last, (block + 1) * inside), each, None)
