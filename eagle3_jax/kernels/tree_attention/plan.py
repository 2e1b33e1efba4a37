"""The tiling of one call of the tree attention kernel for TPU, and the memory that it needs."""

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
from eagle3_jax.kernels.tpu.registers import LANES, SMEM_LIMIT, SUBLANES, VMEM_LIMIT, check_fits

# Limits of the tiling by kind of chip, else "default"; chosen by libtpu's simulation (docs/tpu-plans.md): keys of a
# block over all KV heads, keys of one head in a block, scores of an item, and rows of a tile, which has all query heads
# of a KV head.
BLOCKS: dict[str, dict[str, int]] = json.loads(
    (importlib.resources.files("eagle3_jax.kernels.tree_attention") / "blocks.json").read_text()
)
_ITEM = 512  # fewest keys of an item: the fixed costs of narrower items outweigh what they save
_NODES = 16  # nodes come in multiples of this: the rows of a bfloat16 tile
WORD = 32  # bits


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static shape of one call.

    Attributes:
        nodes: queries of a sequence, padded to a multiple of 16; or a single one.
        group: query heads of a KV head; those of a single node are padded to whole registers.
        tile: nodes attended together; a divisor of `nodes`.
        pages: columns of the page table.
        step: pages of a block, the unit that is copied to VMEM.
        width: keys of one item; one of its matrix products takes at most 256 keys.
        tail: cache slots behind the committed ones that the queries may see.
        written: new tokens, the tail's last, whose keys and values the kernel writes; 0 if the cache has them already.
        caches: 2, of keys and of values; or 1, of keys that are the values too.
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
    caches: int

    @property
    def tiles(self) -> int:
        """Tiles of queries per sequence."""
        return self.nodes // self.tile

    @property
    def rows(self) -> int:
        """Rows of the matrix of one KV head and tile."""
        return self.group * self.tile

    @property
    def mask_rows(self) -> int:
        """Rows of a mask: a tile's nodes, or all query heads of a single node."""
        return self.rows if self.nodes == 1 else self.tile

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
        """Registers per cache row."""
        return -(-self.head_dim // LANES)

    def new_rows(self, dtype: Any) -> int:
        """Returns the rows of the new entries, padded to whole tiles."""
        return pl.cdiv(self.written, tile_rows(dtype)) * tile_rows(dtype)

    def blocks(self, length: Any, lowest: Any, highest: Any) -> tuple[Any, Any, Any, Any]:
        """Returns the blocks that a tile of queries needs, [low, high), and those without a mask, [plain, masked).

        `lowest` and `highest` are those of the first slots that the tile's queries see.
        """
        end = length + self.tail
        return lowest // self.block, pl.cdiv(end, self.block), pl.cdiv(highest, self.block), length // self.block

    def vmem_bytes(self, query_bytes: int, key_bytes: int) -> int:
        """Returns the bytes of VMEM: blocks and queries twice (double buffers), sums, sinks, two items."""
        lanes, height = self.parts * LANES, 32 // key_bytes
        streamed = self.caches * self.block * self.kv_heads * lanes * key_bytes
        tiles = 2 * self.kv_heads * self.rows * lanes * query_bytes
        words = self.tile * -(-self.words // LANES) * LANES * 4
        new = self.caches * self.kv_heads * -(-self.written // WORD) * WORD * lanes * key_bytes
        placed = new + 2 * self.caches * self.kv_heads * height * lanes * key_bytes
        sums = self.kv_heads * self.rows * (3 * LANES + lanes) * 4
        items = 2 * self.rows * self.width * (4 + 4 + query_bytes)
        return 2 * (streamed + tiles + words + new) + placed + sums + items

    def smem_bytes(self, paged: bool) -> int:
        """Returns the bytes prefetched into SMEM, int32: page table, lengths, three numbers per tile of queries."""
        return 4 * self.batch * (1 + 3 * self.tiles + (self.pages if paged else 0))


def plan(
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    dtypes: tuple[Any, Any],
    *,
    tail: int,
    pages: int | None,
    continued: bool = False,
    caches: int = 2,
) -> Shape:
    """Chooses the tiling.

    Args:
        queries, keys: shapes, as `tree_attention` takes them. dtypes: of both.
        tail: slots of the tail.
        pages: columns of the page table; None is contiguous.

    Raises:
        ValueError: the call does not fit; with the numbers.
    """
    b, t, n, d = queries
    kv_heads, slots = keys[1], keys[2]
    group, nodes = n // kv_heads, -(-t // _NODES) * _NODES
    if t == 1:  # rows are heads alone
        group, nodes = -(-group // SUBLANES) * SUBLANES, 1
    paged = pages is not None
    page_size = slots if paged else math.gcd(slots, 256)
    height = tile_rows(dtypes[1])
    if page_size % height:
        what = "page_size" if paged else "slots"
        raise ValueError(f"{what}: got {slots}, expected a multiple of {height} for the TPU kernel")
    pages = pages or slots // page_size
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
            # Else later tiles of queries, or later sequences, would read blocks that are being written.
            written=t if tile == nodes and not continued else 0,
            caches=caches,
        )

    sizes = [jnp.dtype(dtype).itemsize for dtype in dtypes]
    shape = cut(tile)
    while shape.vmem_bytes(*sizes) > VMEM_LIMIT and tile > _NODES:  # many KV heads
        tile = max(_NODES, tile // 2 // _NODES * _NODES)
        shape = cut(tile)
    check_fits("VMEM", shape.vmem_bytes(*sizes), VMEM_LIMIT, shape)
    check_fits("SMEM", shape.smem_bytes(paged), SMEM_LIMIT, f"{b} sequences, {pages if paged else 0} pages each")
    return shape
