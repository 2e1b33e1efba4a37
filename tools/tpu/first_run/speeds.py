"""Versions, chips and memory; times of products of few rows; collectives, whose results are checked too."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding

from eagle3_jax.config import MeshConfig
from eagle3_jax.kernels.linear import few_rows
from eagle3_jax.mesh import make_mesh
from eagle3_jax.models.inference_layout import Product
from eagle3_jax.runs import machine, processes, timing
from tpu.first_run.lines import OK, Line, attempt, chip_of, predict, right, skipped, time

# Shares of a chip's HBM: what the runtime gives to programs at least, and what may be in use before anything ran.
LEAST_LIMIT, MOST_USED = 0.85, 0.05
TIMES = 16  # collectives in one program


def device(*_: Any) -> Iterator[Line]:
    versions = machine.versions() | {"libtpu": "none"}
    versions |= {x.name: x.version for x in importlib.metadata.distributions(name="libtpu")}
    for name in ("python", "jax", "jaxlib", "libtpu", "eagle3_jax"):
        yield Line(name, versions[name], "-", OK)
    chips = jax.local_devices()
    platform = "tpu" if machine.has_tpu() else chips[0].platform
    yield right("platform", chips[0].platform, platform, versions=versions, device_kind=chips[0].device_kind)
    each = jax.device_count() // jax.process_count()
    yield right("chips of this host", len(chips), each, processes=processes.count(), devices=jax.device_count())
    for chip in chips:
        yield memory(chip)


def memory(chip: jax.Device) -> Line:
    """Makes the line of a device's memory, against the HBM that programs are planned for."""
    name, stats = f"{chip.device_kind} {chip.id}, at {getattr(chip, 'coords', None)}", chip.memory_stats()
    if not stats or chip.platform != "tpu":
        return skipped(name, "does not tell its memory")
    hbm, limit, used = pltpu.get_tpu_info().hbm_capacity_bytes, stats["bytes_limit"], stats["bytes_in_use"]
    ok = LEAST_LIMIT * hbm <= limit <= hbm and used <= MOST_USED * hbm
    got = f"{limit / 2**30:.2f} GiB, {used / 2**30:.2f} in use"
    expected = f"{LEAST_LIMIT * hbm / 2**30:.1f} to {hbm / 2**30:.1f} GiB, at most {MOST_USED:.0%} in use"
    return right(name, got, expected, ok=ok, limit=limit, in_use=used, hbm=hbm)


def speeds(arguments: Any, *_: Any) -> Iterator[Line]:
    small = arguments.small
    yield from attempt("products of few rows", functools.partial(_products, small=small))
    # The chips of a host as one row, then all chips as rows of their own.
    meshes = {"model": make_mesh(MeshConfig(model=jax.local_device_count())), "data": make_mesh(MeshConfig())}
    for axis, mesh in meshes.items():
        for elements in (2**11, 2**16 if small else 2**24):
            check = functools.partial(_collectives, axis, mesh, elements)
            yield from attempt(f"collectives over {axis}, {4 * elements} bytes", check)


def _products(*, small: bool) -> Iterator[Line]:
    shape = (256, 512) if small else (4096, 14336)
    keys = jax.random.split(jax.random.key(0), few_rows.SAMPLE)
    matrices = [0.02 * jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
    product, size = Product(shape, vocabulary=False), shape[0] * shape[1]
    works = [lambda n=rows: product.times(matrices, n).block_until_ready() for rows in few_rows.COUNTS]
    for rows, seconds in zip(few_rows.COUNTS, timing.in_turns(works, lambda: None), strict=True):
        predicted = predict(chip_of(matrices[0].device), read=2 * size, operations=2 * rows * size)
        yield time(f"product of {rows} rows, {shape[0]} x {shape[1]}", seconds / len(matrices), predicted, rows=rows)


def _collectives(axis: str, mesh: Mesh, elements: int) -> Iterator[Line]:
    size = mesh.shape[axis]
    name = f"over {axis} ({size}), {4 * elements:,} bytes"
    if size == 1:
        yield skipped(name, "one device")
        return

    def all_reduce(x: jax.Array) -> jax.Array:  # the mean: from the second on it stays
        return jax.lax.psum(x, axis) / size

    def all_gather(x: jax.Array) -> jax.Array:  # the next one's share
        whole = jax.lax.optimization_barrier(jax.lax.all_gather(x, axis, tiled=True))
        return jax.lax.dynamic_slice(whole, ((jax.lax.axis_index(axis) + 1) % size * len(x),), (len(x),))

    def several(kind: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, TIMES, lambda _, x: kind(x), x)

    def program(function: Callable[[jax.Array], jax.Array]) -> Any:  # of `function` on each device's share
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(axis), out_specs=P(axis), check_vma=False))

    # Of the bytes of an array, a ring moves this share through each link.
    for kind, share, own in (
        (all_reduce, 2 * (size - 1) / size, elements),
        (all_gather, (size - 1) / size, elements // size),
    ):
        # Shares of `own` numbers lie side by side, all equal to the share's place.
        numbers = functools.partial(jnp.repeat, jnp.arange(size, dtype=jnp.float32), own)
        start = jax.jit(numbers, out_shardings=NamedSharding(mesh, P(axis)))()
        once = program(kind)(start)
        found = [float(np.asarray(shard.data)[-1]) for shard in once.addressable_shards]
        places = {device: index for index, device in enumerate(mesh.devices.reshape(-1))}
        ranks = [places[shard.device] % size for shard in once.addressable_shards]
        expected = [(size - 1) / 2 if kind is all_reduce else float((rank + 1) % size) for rank in ranks]
        yield right(f"{kind.__name__} {name}", found, expected)
        run = program(functools.partial(several, kind))
        seconds = timing.in_turns([lambda f=run, x=start: f(x).block_until_ready()], lambda: None)[0] / TIMES
        chip, moved = chip_of(mesh.devices.flat[0]), share * 4 * elements
        predicted, rate = None if chip is None else moved / (chip.link * 1e9), moved / seconds / 1e9
        more = {"gigabytes_per_second": rate}
        yield time(f"{kind.__name__} {name}: time", seconds, predicted, f", {rate:.3g} GB/s", **more)
