"""Commit on a TPU: copies the tiles that the path touches from HBM to VMEM and back, for all layers at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from eagle3_jax.kernels.dispatch import over_mesh
from eagle3_jax.kernels.tpu.packed_rows import merge_rows, roll_rows, rows_between, tile_rows
from eagle3_jax.kernels.tpu.registers import LANES, SMEM_LIMIT, check_fits

# VMEM for the tiles of one call (TPUs since v5e have at least 64 MiB). Caches that do not fit take another call.
_VMEM = 32 << 20


def commit(
    caches: Sequence[Array],
    lengths: Int[Array, " b"],
    path: Int[Array, "b p"],
    page_table: Int[Array, "b pages"] | None,
    *,
    interpret: Any,
) -> tuple[Array, ...]:
    """See `cache.api.commit`."""
    cache, rows = P("data", "model"), P("data")
    return over_mesh(
        functools.partial(_local, interpret=interpret),
        (lengths, path, page_table, *caches),
        (rows, rows, rows, *[cache] * len(caches)),
        (cache,) * len(caches),
        # A page may hold tokens of any sequence: every device of the data axis needs all pages.
        {"model": caches[0].shape[1]} | ({"data": len(lengths)} if page_table is None else {}),
    )


def _local(
    lengths: Array,
    path: Array,
    page_table: Array | None,
    *caches: Array,
    interpret: Any = False,
) -> tuple[Array, ...]:
    """Commits one device's share, in as few calls as VMEM allows."""
    rows, kv_heads, page_size, head_dim = caches[0].shape
    height, nodes = tile_rows(caches[0].dtype), path.shape[1]
    places = nodes + pl.cdiv(nodes - 1, height) + 1  # a source tile for each row, then the target tiles
    lanes = pl.cdiv(head_dim, LANES) * LANES
    most = max(1, _VMEM // (places * kv_heads * height * lanes * caches[0].dtype.itemsize))
    # Clipped to the cache, since the kernel runs without bounds checks.
    slots = page_size * (1 if page_table is None else page_table.shape[1])
    lengths = jnp.clip(lengths, 0, slots - nodes)
    path = jnp.clip(path, 0, slots - 1 - lengths[:, None])
    tables = () if page_table is None else (jnp.clip(page_table, 0, rows - 1).reshape(-1),)
    scalars = lengths, path.reshape(-1), *tables
    check_fits("SMEM", sum(4 * x.size for x in scalars), SMEM_LIMIT, f"{len(lengths)} sequences of {slots} slots")
    kept = ()
    for begin in range(0, len(caches), most):
        some = caches[begin : begin + most]
        kept += pl.pallas_call(
            functools.partial(_kernel, nodes, len(some), 0 if page_table is None else page_table.shape[1]),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(scalars),
                grid=lengths.shape,
                in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * len(some),
                out_specs=(pl.BlockSpec(memory_space=pltpu.HBM),) * len(some),
                scratch_shapes=[
                    pltpu.VMEM((len(some), places, kv_heads, height, head_dim), caches[0].dtype),
                    pltpu.SemaphoreType.DMA,
                ],
            ),
            # Not `pltpu.HBM`: libtpu 0.0.41 refuses a program whose results alias arguments of another memory space.
            out_shape=tuple(jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in some),
            input_output_aliases={len(scalars) + i: i for i in range(len(some))},
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel",), vmem_limit_bytes=_VMEM + (8 << 20), disable_bounds_checks=True
            ),
            interpret=interpret,
            name="commit",
        )(*scalars, *some)
    return kept


def _kernel(nodes: int, count: int, pages: int, *refs: Any) -> None:
    """Commits one sequence in all caches: a read-modify-write of the target tiles."""
    lengths, path, *rest = refs
    table = rest.pop(0) if pages else None
    caches, (tiles, semaphore) = rest[count : 2 * count], rest[2 * count :]
    _, places, kv_heads, height, head_dim = tiles.shape
    page_size, b = caches[0].shape[2], pl.program_id(0)
    length = lengths[b]
    base = length // height  # the first target tile

    def source(j: Any) -> Any:
        return length + path[b * nodes + j]

    def before(j: Any) -> Any:
        """Returns the source slot of row j - 1; of row 0 for j = 0."""
        return source(jnp.maximum(j, 1) - 1)

    def copies(number: Any, place: Any) -> list[tuple[Any, Any]]:
        """Returns the pairs (HBM, VMEM) of tile `number` of the sequence, one per cache."""
        slot = number * height
        row = b if table is None else table[b * pages + slot // page_size]
        at = pl.multiple_of(slot if table is None else slot % page_size, height)
        return [(cache.at[row, :, pl.ds(at, height)], tiles.at[i, place]) for i, cache in enumerate(caches)]

    def each_source(act: Any) -> None:
        """Calls act(tile, j) for the source tile of row j, unless row j - 1 has the same tile."""

        def one(j: Any, _: None) -> None:
            number = source(j) // height
            pl.when((j == 0) | (number != before(j) // height))(lambda: act(number, j))

        jax.lax.fori_loop(0, nodes, one, None)

    def each_target(act: Any) -> None:
        """Calls act(tile, place) for each target tile."""

        def one(i: Any, _: None) -> None:
            pl.when((base + i) * height < length + nodes)(lambda: act(base + i, nodes + i))

        jax.lax.fori_loop(0, places - nodes, one, None)

    def transfer(*, inwards: bool, wait: bool) -> Any:
        def act(number: Any, place: Any) -> None:
            for there, here in copies(number, place):
                ends = (there, here) if inwards else (here, there)
                copy = pltpu.make_async_copy(*ends, semaphore)
                copy.wait() if wait else copy.start()

        return act

    for wait in (False, True):
        each_source(transfer(inwards=True, wait=wait))
        each_target(transfer(inwards=True, wait=wait))

    def move(j: Any, place: Any) -> Any:
        """Moves row j of the path to its target; `place` holds the source tile of row j - 1."""
        slot, to = source(j), length + j
        place = jnp.where((j == 0) | (slot // height != before(j) // height), j, place)
        row, target = to % height, nodes + to // height - base

        @pl.when(slot != to)
        def _() -> None:
            by = jnp.int32((slot % height - row + height) % height)
            chosen = rows_between(jnp.int32(row), row + 1, tiles.dtype, head_dim)

            def one(i: Any, _: None) -> None:
                for head in range(kv_heads):
                    moved = roll_rows(tiles[i, place, head], by)
                    tiles[i, target, head] = merge_rows(tiles[i, target, head], moved, chosen)

            jax.lax.fori_loop(0, count, one, None)

        return place

    jax.lax.fori_loop(0, nodes, move, jnp.int32(0))
    for wait in (False, True):
        each_target(transfer(inwards=False, wait=wait))
