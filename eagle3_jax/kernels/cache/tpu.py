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
from eagle3_jax.kernels.tpu.packed_rows import row_mover, tile_rows
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
    lengths: Array, path: Array, page_table: Array | None, *caches: Array, interpret: Any = False
) -> tuple[Array, ...]:
    """Commits one device's share, in as few calls as VMEM allows."""
    rows, kv_heads, page_size, head_dim = caches[0].shape
    height, nodes = tile_rows(caches[0].dtype), path.shape[1]
    targets = pl.cdiv(nodes - 1, height) + 1
    places = targets + nodes  # a source tile for each row, if none lies in a target tile
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
            functools.partial(_kernel, nodes, targets, len(some), 0 if page_table is None else page_table.shape[1]),
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


def _kernel(nodes: int, targets: int, count: int, pages: int, *refs: Any) -> None:
    """Commits one sequence in all caches: a read-modify-write of the target tiles.

    Rows move in order and in place: an ascending path reads no slot that an earlier row was written to.
    """
    lengths, path, *rest = refs
    table = rest.pop(0) if pages else None
    caches, (tiles, semaphore) = rest[count : 2 * count], rest[2 * count :]
    height, head_dim = tiles.shape[-2:]
    page_size, b = caches[0].shape[2], pl.program_id(0)
    length = lengths[b]
    base = length // height  # the first target tile

    def source(j: Any) -> Any:
        return length + path[b * nodes + j]

    def tile(j: Any) -> tuple[Any, Any]:
        """Returns the source tile of row j, and whether it is neither a target tile nor row j - 1's."""
        number, before = source(j) // height, source(jnp.maximum(j, 1) - 1) // height
        return number, (number >= base + targets) & ((j == 0) | (number != before))

    def copies(number: Any, place: Any) -> list[tuple[Any, Any]]:
        """Returns the pairs (HBM, VMEM) of tile `number` of the sequence, one per cache."""
        slot = number * height
        row = b if table is None else table[b * pages + slot // page_size]
        at = pl.multiple_of(slot if table is None else slot % page_size, height)
        return [(cache.at[row, :, pl.ds(at, height)], tiles.at[i, place]) for i, cache in enumerate(caches)]

    def read(number: Any, place: Any) -> None:
        for there, here in copies(number, place):
            pltpu.make_async_copy(there, here, semaphore).start()

    def write(number: Any, place: Any) -> None:
        for there, here in copies(number, place):
            pltpu.make_async_copy(here, there, semaphore).start()

    def wait(_: Any, place: Any) -> None:
        """Waits for as many bytes as a tile of all caches has, at once."""
        here = tiles.at[:, place]
        pltpu.make_async_copy(here, here, semaphore).wait()

    def each_source(act: Any) -> None:
        """Calls act(tile, place) for each source tile behind the target tiles."""

        def one(j: Any, place: Any) -> Any:
            number, new = tile(j)
            pl.when(new)(lambda: act(number, place))
            return place + new.astype(jnp.int32)

        jax.lax.fori_loop(0, nodes, one, jnp.int32(targets))

    def each_target(act: Any, end: Any) -> None:
        """Calls act(tile, place) for each target tile in front of slot `end`."""

        def one(i: Any, _: None) -> None:
            pl.when((base + i) * height < end)(lambda: act(base + i, i))

        jax.lax.fori_loop(0, targets, one, None)

    for act in (read, wait):
        each_source(act)
        each_target(act, jnp.maximum(length + nodes, source(nodes - 1) + 1))

    def move(j: Any, place: Any) -> Any:
        """Moves row j of the path to its target; `place` is the next source tile's."""
        slot, to, (number, new) = source(j), length + j, tile(j)
        place += new.astype(jnp.int32)
        at = jnp.where(number < base + targets, number - base, place - 1)
        target = to // height - base

        @pl.when(slot != to)
        def _() -> None:
            moved = row_mover(jnp.int32(slot % height), jnp.int32(to % height), tiles.dtype, head_dim)

            def one(i: Any, _: None) -> None:
                tiles[i, target] = moved(tiles[i, target], tiles[i, at])

            jax.lax.fori_loop(0, count, one, None)

        return place

    jax.lax.fori_loop(0, nodes, move, jnp.int32(targets))
    for act in (write, wait):
        each_target(act, length + nodes)
