"""The cache as the tree attention kernel reads it: pages prefetched from HBM into a double buffer in VMEM."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from eagle3_jax.kernels.tree_attention.plan import Shape


class Scalars(NamedTuple):
    """int32 numbers that are prefetched into SMEM before the kernel starts.

    Attributes:
        lengths: [b], committed tokens. before: [b * tiles], number of blocks read for all earlier tiles of queries.
        table: [b * pages], the page of each page_size slots; None is contiguous.
        lowest, highest: [b * tiles], of the first slots that a tile's queries see; None without a window.
    """

    lengths: Any
    before: Any
    table: Any = None
    lowest: Any = None
    highest: Any = None


def scalars(
    s: Shape, table: Int[Array, "b pages"] | None, lengths: Int[Array, " b"], first: Int[Array, "b t"] | None, rows: int
) -> Scalars:
    """Computes the scalars, clipped to the cache (of so many rows), since the kernel runs without bounds checks."""
    lengths = jnp.clip(lengths, 0, s.pages * s.page_size - s.tail).astype(jnp.int32)
    per_tile = jnp.repeat(lengths, s.tiles)
    lowest = highest = None
    if first is not None:
        seen = first.reshape(s.batch * s.tiles, s.tile).astype(jnp.int32)
        lowest, highest = jnp.clip(seen.min(axis=1), 0, per_tile + s.tail - 1), seen.max(axis=1)
    low, high, *_ = s.blocks(per_tile, 0 if lowest is None else lowest, 0)
    before = (jnp.cumsum(high - low) - (high - low)).astype(jnp.int32)
    if table is not None:
        table = jnp.clip(table.reshape(-1), 0, rows - 1).astype(jnp.int32)
    return Scalars(lengths, before, table, lowest, highest)


@dataclasses.dataclass(frozen=True)
class Pages:
    """A double buffer: one block of pages is attended while the next is copied.

    The blocks of all tiles of queries, one tile after the other, alternate between the two buffers. So the first block
    of a tile is prefetched while the last block of the tile before is attended. `buffer` computes a block's buffer from
    the number of blocks before it; prefetch, wait and write all use it.

    Attributes:
        caches: `Shape.caches` of them in HBM, [pages, k, page_size, d], or contiguous [b, k, slots, d].
        buffers: [2, k, block, d] in VMEM, for each cache.
        arrived: DMA semaphores [cache, buffer].
    """

    shape: Shape
    scalars: Scalars
    caches: tuple[Any, ...]
    buffers: tuple[Any, ...]
    arrived: Any

    @staticmethod
    def scratch(s: Shape, dtype: Any) -> list[Any]:
        """Returns the shapes of the buffers and of the semaphores."""
        block = pltpu.VMEM((2, s.kv_heads, s.block, s.head_dim), dtype)
        return [*[block] * s.caches, pltpu.SemaphoreType.DMA((s.caches, 2))]

    def length(self, tile: Any) -> Any:
        """Returns the committed tokens of the tile's sequence."""
        return self.scalars.lengths[tile // self.shape.tiles]

    def end(self, tile: Any) -> Any:
        """Returns the slot behind the tail."""
        return self.length(tile) + self.shape.tail

    def needed(self, tile: Any) -> tuple[Any, Any, Any, Any]:
        """Returns `Shape.blocks` of a tile of queries."""
        lowest, highest = (0 if ref is None else ref[tile] for ref in (self.scalars.lowest, self.scalars.highest))
        return self.shape.blocks(self.length(tile), lowest, highest)

    def buffer(self, tile: Any, block: Any) -> Any:
        """Returns the buffer, 0 or 1, of a tile's block."""
        low, *_ = self.needed(tile)
        return (self.scalars.before[tile] + block - low) & 1

    def prefetch(self, tile: Any, block: Any) -> None:
        self._each_copy(tile, block, lambda copy: copy.start())

    def wait(self, tile: Any, block: Any) -> None:
        self._each_copy(tile, block, lambda copy: copy.wait())

    def at(self, tile: Any, number: Any) -> tuple[Any, Any]:
        """Returns where the cache holds page `number` of the tile's sequence: the row, and the first slot in it."""
        s, b = self.shape, tile // self.shape.tiles
        if self.scalars.table is None:
            return b, number * s.page_size
        return self.scalars.table[b * s.pages + number], 0

    def _each_copy(self, tile: Any, block: Any, act: Callable[[Any], None]) -> None:
        """Calls act(copy) for each page of the block that holds a slot before the tail's end."""
        s, buffer = self.shape, self.buffer(tile, block)
        used = pl.cdiv(self.end(tile), s.page_size) - block * s.step
        for i in range(min(s.step, s.pages)):

            @pl.when(i < used)
            def _(i: int = i) -> None:
                row, slot = self.at(tile, block * s.step + i)
                for n in range(s.caches):
                    there = self.caches[n].at[row, :, pl.ds(slot, s.page_size)]
                    here = self.buffers[n].at[buffer, :, pl.ds(i * s.page_size, s.page_size)]
                    act(pltpu.make_async_copy(there, here, self.arrived.at[n, buffer]))
