"""What one call of the TPU kernel of tree attention looks like: how its work is cut, what it holds."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax.experimental import pallas as pl

from eagle3_jax.kernels.tpu.packed_rows import tile_rows
from eagle3_jax.kernels.tpu.registers import LANES

WORD = 32  # bits


@dataclasses.dataclass(frozen=True)
class Shape:
    """All of it static.

    Attributes:
        nodes: queries of a sequence, padded to a multiple of 16.
        tile: nodes that are attended together, a divisor of `nodes`.
        pages: columns of the page table.
        step: pages of a block, which is what VMEM holds at a time.
        width: keys of one item. Its matrix products are of 256 keys at most.
        tail: cache slots behind the committed ones that the queries may see.
        written: new tokens, the tail's last, whose keys and values the kernel writes; 0 where they are in the cache.
    """

    batch: int
    nodes: int
    group: int
    kv_heads: int
    head_dim: int
    page_size: int
    pages: int
    tile: int
    step: int
    width: int
    tail: int
    written: int

    @property
    def tiles(self) -> int:
        """Of queries, in a sequence."""
        return self.nodes // self.tile

    @property
    def rows(self) -> int:
        """Of the matrix of one KV head and tile."""
        return self.group * self.tile

    @property
    def block(self) -> int:
        """Keys of a block."""
        return self.step * self.page_size

    @property
    def piece(self) -> int:
        """Keys of one matrix product."""
        return math.gcd(self.width, 256)

    @property
    def words(self) -> int:
        """int32 words that hold a node's ancestor bits."""
        return -(-self.tail // WORD)

    @property
    def parts(self) -> int:
        """Registers that hold a row."""
        return -(-self.head_dim // LANES)

    def new_rows(self, dtype: Any) -> int:
        """Rows of the new entries, whole tiles."""
        return pl.cdiv(self.written, tile_rows(dtype)) * tile_rows(dtype)

    def blocks(self, length: Any, lowest: Any, highest: Any) -> tuple[Any, Any, Any, Any]:
        """Which blocks a tile of queries needs, [low, high), and which of those need no mask, [plain, masked).

        Args:
            lowest, highest: of the first slots that its queries see.
        """
        end = length + self.tail
        return lowest // self.block, pl.cdiv(end, self.block), pl.cdiv(highest, self.block), length // self.block

    def vmem_bytes(self, query_bytes: int, key_bytes: int) -> int:
        """What the kernel holds in VMEM: blocks and queries twice (double buffers), sums, sinks, two items."""
        lanes, height = self.parts * LANES, 32 // key_bytes
        streamed = 2 * self.block * self.kv_heads * lanes * key_bytes
        tiles = 2 * self.kv_heads * self.rows * lanes * query_bytes
        words = self.tile * -(-self.words // LANES) * LANES * 4
        new = 2 * self.kv_heads * -(-self.written // WORD) * WORD * lanes * key_bytes
        placed = new + 4 * self.kv_heads * height * lanes * key_bytes
        sums = self.kv_heads * self.rows * (3 * LANES + lanes) * 4
        items = 2 * self.rows * self.width * (4 + 4 + query_bytes)
        return 2 * (streamed + tiles + words + new) + placed + sums + items

    def smem_bytes(self, paged: bool) -> int:
        """What is prefetched into SMEM, int32: the page table, lengths, three numbers for each tile of queries."""
        return 4 * self.batch * (1 + 3 * self.tiles + (self.pages if paged else 0))
