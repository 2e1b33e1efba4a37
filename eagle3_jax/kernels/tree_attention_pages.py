"""Pages of the cache in VMEM, for tree attention: brought by blocks, new entries put into them and sent back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from eagle3_jax.kernels.packed_rows import merge_rows, rows_at, rows_between, tile_rows
from eagle3_jax.kernels.registers import LANES, SUBLANES
from eagle3_jax.kernels.tree_attention_shape import Shape


def scalars(
    s: Shape, table: Int[Array, "b pages"], lengths: Int[Array, " b"], first: Int[Array, "b t"] | None, rows: int
) -> tuple[Array, ...]:
    """What the kernel must know before it reads anything, see `Pages.known`; within the cache, whatever it is given.

    Args:
        first: lowest slot that each query sees. rows: of the cache, its first dimension.
    """
    lengths = jnp.clip(lengths, 0, s.pages * s.page_size - s.tail)
    per_tile = jnp.repeat(lengths, s.tiles)
    bounds: tuple[Array, ...] = ()
    if first is not None:
        seen = first.reshape(s.batch * s.tiles, s.tile)
        bounds = jnp.clip(seen.min(axis=1), 0, per_tile + s.tail - 1), seen.max(axis=1)
    low, high, *_ = s.blocks(per_tile, *(bounds or (0, 0)))
    before = jnp.cumsum(high - low) - (high - low)
    table = jnp.clip(table.reshape(-1), 0, rows - 1)
    return tuple(x.astype(jnp.int32) for x in (table, lengths, before, *bounds))


def bytes_moved(s: Shape, lengths: Int[np.ndarray, " b"], *, query_bytes: int, key_bytes: int) -> tuple[int, int]:
    """Bytes between HBM and VMEM: those that the kernel copies, by its own walk, and the least that would do.

    The kernel copies pages, and new entries as whole tiles, in and out. The least: queries and results once, new
    entries once each way, and once each page that holds a token a query sees, for every tile of queries.
    """
    table = jnp.zeros((s.batch, s.pages), jnp.int32)
    known = tuple(np.asarray(x) for x in scalars(s, table, jnp.asarray(lengths), None, 1))
    walk = Pages(s, known, (), (), (), None, None)
    copied = 0
    for tile in range(s.batch * s.tiles):
        low, high, *_ = walk.needed(tile)
        copied += sum(int(np.clip(walk.count(tile, block), 0, s.step)) for block in range(low, high))
    row = 2 * s.kv_heads * s.head_dim * key_bytes
    ends, height = lengths + s.tail, 32 // key_bytes
    written = (-(-ends // height) - (ends - s.written) // height).sum() * height if s.written else 0
    entries = (s.batch * -(-s.written // height) * height + int(written)) * row
    queries = 2 * s.batch * s.kv_heads * s.group * s.nodes * s.head_dim * query_bytes
    bits = s.batch * s.nodes * s.words * 4
    used = int((-(-ends // s.page_size)).sum()) * s.tiles
    least = used * s.page_size * row + 2 * s.batch * s.written * row + queries
    return copied * s.page_size * row + entries + queries + bits, least


@dataclasses.dataclass(frozen=True)
class Pages:
    """References of one call.

    Attributes:
        known: int32 in SMEM: pages, lengths, number of blocks in front of each tile of queries, and with a window the
            lowest and the highest slot that a tile's queries see first. Nothing where the length is baked in.
        caches: keys and values, in HBM.
        blocks: two blocks of either, [2, k, block, d]: one is attended while the other comes.
        new: new keys and values as words, [parts * k, words, lanes], behind a tile of anything, with another behind
            them: a tile may be taken from any row on.
        fetched: semaphores [keys or values, block]. sent: one.
    """

    shape: Shape
    known: tuple[Any, ...]
    caches: tuple[Any, ...]
    blocks: tuple[Any, ...]
    new: tuple[Any, ...]
    fetched: Any
    sent: Any

    @staticmethod
    def scratch(s: Shape, dtype: Any) -> list[Any]:
        """What `of` takes."""
        words = s.new_rows(dtype) // tile_rows(dtype) * SUBLANES
        new = (s.parts * s.kv_heads, words + 2 * SUBLANES, min(s.head_dim, LANES))
        return [
            *[pltpu.VMEM((2, s.kv_heads, s.block, s.head_dim), dtype)] * 2,
            *[pltpu.VMEM(new, jnp.uint32)] * (2 if s.written else 0),
            pltpu.SemaphoreType.DMA((2, 2)),
            pltpu.SemaphoreType.DMA,
        ]

    @classmethod
    def of(cls, s: Shape, known: tuple[Any, ...], caches: tuple[Any, ...], scratch: tuple[Any, ...]) -> Pages:
        keys, values, *new, fetched, sent = scratch
        return cls(s, known, caches, (keys, values), tuple(new), fetched, sent)

    def length(self, tile: Any) -> Any:
        """Committed tokens of the sequence of a tile of queries."""
        s = self.shape
        return self.known[1][tile // s.tiles] if s.length is None else s.length

    def end(self, tile: Any) -> Any:
        return self.length(tile) + self.shape.tail

    def needed(self, tile: Any) -> tuple[Any, Any, Any, Any]:
        """`Shape.blocks` of a tile of queries."""
        bounds = [ref[tile] for ref in self.known[3:]] or (0, 0)
        return self.shape.blocks(self.length(tile), *bounds)

    def place(self, tile: Any, block: Any) -> Any:
        """Which of the two a block is in: they take turns, from tile to tile."""
        low, high, *_ = self.needed(tile)
        before = self.known[2][tile] if self.known else tile * (high & 1)  # profiles follow what is this simple
        return (before + block - low) & 1

    def count(self, tile: Any, block: Any) -> Any:
        """How many pages the tail's end is behind the block's begin: so many are brought, where it has them."""
        return pl.cdiv(self.end(tile), self.shape.page_size) - block * self.shape.step

    def copies(self, tile: Any, block: Any, act: Callable[[Any], None]) -> None:
        """`act` with each copy that brings a page of a block; pages behind the tail are not brought."""
        s, place, count = self.shape, self.place(tile, block), self.count(tile, block)
        for i in range(min(s.step, s.pages)):

            @pl.when(i < count)
            def _(i: int = i) -> None:
                row, slot = self._page(tile, block * s.step + i)
                for n in range(2):
                    there = self.caches[n].at[row, :, pl.ds(slot, s.page_size)]
                    here = self.blocks[n].at[place, :, pl.ds(i * s.page_size, s.page_size)]
                    act(pltpu.make_async_copy(there, here, self.fetched.at[n, place]))

    def hold(self, entries: tuple[Any, ...]) -> None:
        """Takes a sequence's new entries, [1, k, rows, d] each."""
        for given, held in zip(entries, self.new, strict=True):
            for part, head, lanes in self._registers():
                words = pltpu.bitcast(given[0, head, :, lanes], jnp.uint32)
                held[part * self.shape.kv_heads + head, pl.ds(SUBLANES, len(words)), : lanes.size] = words

    def write(self, tile: Any, block: Any) -> None:
        """Puts new entries into a block, and sends the tiles of rows that they touch to the cache."""

        def one(row: Any) -> None:
            s, dtype, place = self.shape, self.blocks[0].dtype, self.place(tile, block)
            height = tile_rows(dtype)
            first = block * s.block + row - (self.end(tile) - s.written)  # of the new ones, in the tile's first row
            written = rows_between(-first, s.written - first, dtype, min(s.head_dim, LANES))
            for buffer, held in zip(self.blocks, self.new, strict=True):
                for part, head, lanes in self._registers():
                    at = (place, head, pl.ds(row, height), lanes)
                    fresh = rows_at(held.at[part * s.kv_heads + head], height + first, dtype)[:, : lanes.size]
                    buffer[at] = merge_rows(buffer[at], fresh, written[:, : lanes.size])
            for copy in self._sends(tile, block, row):
                copy.start()

        self._each_written(tile, block, one)

    def settle(self, tile: Any, block: Any) -> None:
        """Waits for what `write` sent: before other pages come to where these are."""

        def one(row: Any) -> None:
            for copy in self._sends(tile, block, row):
                copy.wait()

        self._each_written(tile, block, one)

    def _page(self, tile: Any, number: Any) -> tuple[Any, Any]:
        """Where the cache holds the number-th page of a tile's sequence: [row, :, slots from the second on]."""
        s, b = self.shape, tile // self.shape.tiles
        if not s.paged:
            return b, number * s.page_size
        number += b * s.pages
        return (self.known[0][number] if self.known else number), 0

    def _registers(self) -> list[tuple[int, int, Any]]:
        """(part, head, lanes) of every register that a row of the cache fills."""
        s = self.shape
        parts = [(part, part * LANES, min(LANES, s.head_dim - part * LANES)) for part in range(s.parts)]
        return [(part, head, pl.ds(at, width)) for part, at, width in parts for head in range(s.kv_heads)]

    def _sends(self, tile: Any, block: Any, row: Any) -> list[Any]:
        """Copies of a tile of keys' rows and of one of values' to the cache; it begins with the block's row `row`."""
        s, place, height = self.shape, self.place(tile, block), tile_rows(self.blocks[0].dtype)
        there, slot = self._page(tile, block * s.step + row // s.page_size)
        slot = pl.multiple_of(slot + row % s.page_size, height)
        return [
            pltpu.make_async_copy(
                buffer.at[place, :, pl.ds(row, height)], cache.at[there, :, pl.ds(slot, height)], self.sent
            )
            for buffer, cache in zip(self.blocks, self.caches, strict=True)
        ]

    def _each_written(self, tile: Any, block: Any, act: Callable[[Any], None]) -> None:
        """act(row) for the tiles of a block's rows that new entries touch; `row` is the first of one."""
        s, height, end = self.shape, tile_rows(self.blocks[0].dtype), self.end(tile)
        first, last, inside = (end - s.written) // height, pl.cdiv(end, height), s.block // height
        if s.length is not None:  # static profiles follow branches, but no loop over what is known at run time
            for n in range(first, last):
                pl.when(block == n // inside)(functools.partial(act, n % inside * height))
            return

        def each(n: Any, _: None) -> None:
            act(pl.multiple_of(n * height - block * s.block, height))

        jax.lax.fori_loop(jnp.maximum(first, block * inside), jnp.minimum(last, (block + 1) * inside), each, None)
