"""What one call of the TPU kernel of tree attention looks like: how its work is cut, what it holds."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import math
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from eagle3_jax.kernels.dispatch import device
from eagle3_jax.kernels.tpu.packed_rows import tile_rows
from eagle3_jax.kernels.tpu.registers import LANES, SMEM_LIMIT, VMEM_LIMIT, check_fits

# How the kernel's work is cut, by the kind of chip, else "default"; chosen by libtpu's simulation (docs/benchmarks.md).
# At most: keys of a block over all KV heads, those of one head in it, scores of an item, and rows of a tile, all query
# heads of a KV head together.
BLOCKS: dict[str, dict[str, int]] = json.loads(
    (importlib.resources.files("eagle3_jax.kernels.tree_attention") / "blocks.json").read_text()
)
_ITEM = 512  # keys of an item, at least: the fixed costs of narrower ones outweigh what they save
_NODES = 16  # nodes come in multiples of this: the rows of a bfloat16 tile
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


def plan(
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    dtypes: tuple[Any, Any],
    *,
    tail: int,
    pages: int | None,
    continued: bool = False,
) -> Shape:
    """How the kernel cuts its work.

    Args:
        queries, keys: shapes, as `tree_attention` takes them. dtypes: of both.
        tail: slots of the tail.
        pages: columns of the page table; None is contiguous.
        continued: see `tree_attention`.

    Raises:
        ValueError: with the numbers, where something does not fit.
    """
    b, t, n, d = queries
    kv_heads, slots = keys[1], keys[2]
    group = n // kv_heads
    paged = pages is not None
    page_size = slots if paged else math.gcd(slots, 256)
    height = tile_rows(dtypes[1])
    if page_size % height:
        what = "page_size" if paged else "slots"
        raise ValueError(f"{what}: got {slots}, expected a multiple of {height} for the TPU kernel")
    pages = pages or slots // page_size
    nodes = -(-t // _NODES) * _NODES
    blocks = BLOCKS.get(device().device_kind, BLOCKS["default"])
    tile = min(nodes, max(_NODES, blocks["rows"] // group // _NODES * _NODES))
    unit = math.lcm(page_size, LANES)  # whole pages, whole registers of scores
    most = min(blocks["keys_per_head"], blocks["keys_per_step"] // kv_heads, -(-pages * page_size // unit) * unit)
    block = max(unit, most // unit * unit)
    piece = math.gcd(block, 256)

    def cut(tile: int) -> Shape:
        item = max(_ITEM, blocks["scores_per_item"] // (group * tile))
        width = max(piece, min(item, block) // piece * piece)
        while block % width:  # a block is a whole number of items
            width -= piece
        return Shape(
            batch=b,
            nodes=-(-nodes // tile) * tile,
            group=group,
            kv_heads=kv_heads,
            head_dim=d,
            page_size=page_size,
            pages=pages,
            tile=tile,
            step=block // page_size,
            width=width,
            tail=tail,
            # A later tile of queries would read what an earlier one writes, and so would a later sequence.
            written=t if tile == nodes and not continued else 0,
        )

    sizes = [jnp.dtype(dtype).itemsize for dtype in dtypes]
    shape = cut(tile)
    while shape.vmem_bytes(*sizes) > VMEM_LIMIT and tile > _NODES:  # many KV heads
        tile = max(_NODES, tile // 2 // _NODES * _NODES)
        shape = cut(tile)
    check_fits("VMEM", shape.vmem_bytes(*sizes), VMEM_LIMIT, shape)
    check_fits("SMEM", shape.smem_bytes(paged), SMEM_LIMIT, f"{b} sequences, {pages if paged else 0} pages each")
    return shape
