"""Versions, chips and memory; every Pallas kernel against XLA's operations, with its time; products; collectives."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding

from eagle3_jax.config import MeshConfig
from eagle3_jax.kernels.linear import few_rows
from eagle3_jax.kernels.linear.api import linear
from eagle3_jax.kernels.vocabulary.api import argmax, vocabulary_logits
from eagle3_jax.mesh import make_mesh
from eagle3_jax.models.inference_layout import Product
from eagle3_jax.runs import machine, processes, timing
from tpu.cases import CASES, Case, attention, delta, grouped_product, moved_rows, top_k, training_time_test
from tpu.first_run.lines import OK, Line, attempt, predict, right, skipped, time, within

# Shares of a chip's HBM: what the runtime gives to programs at least, and what may be in use before anything ran.
LEAST_LIMIT, MOST_USED = 0.85, 0.05
# Largest error beside the largest number of the expected result, in bfloat16, as all cases are.
TOLERANCE = 2e-2
# Largest error of a float32 product of N(0, 1), beside the root of the number of products in a sum. One pass of
# bfloat16 instead of HIGHEST has 3e-3.
FLOAT32_TOLERANCE = 2e-5
CALLS, TIMES = 32, 16  # of a kernel and of a collective in one program, so that its start counts little
_SMALL: dict[Any, dict[str, int]] = {
    attention: {"nodes": 4, "query_heads": 4, "kv_heads": 2, "batch": 2, "keys": 512},
    top_k: {"queries": 4, "k": 4, "hidden": 128, "vocabulary": 512},
    grouped_product: {"rows": 4, "inputs": 256, "outputs": 256},
    training_time_test: {"length": 128, "steps": 2, "query_heads": 2, "kv_heads": 1},
    delta: {"tokens": 9, "key_heads": 1, "value_heads": 2},
    moved_rows: {"nodes": 4, "batch": 2, "layers": 1, "kv_heads": 2, "slots": 512, "length": 252},
}


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
    yield from attempt("products of few rows", functools.partial(_products, small=arguments.small))
    # The chips of a host as one row, then all chips as rows of their own.
    meshes = {"model": make_mesh(MeshConfig(model=jax.local_device_count())), "data": make_mesh(MeshConfig())}
    for axis, mesh in meshes.items():
        for elements in (2**11, 2**16 if arguments.small else 2**24):
            check = functools.partial(_collectives, axis, mesh, elements)
            yield from attempt(f"collectives over {axis}, {4 * elements} bytes", check)


def _products(*, small: bool) -> Iterator[Line]:
    shape = (256, 512) if small else (4096, 14336)
    keys = jax.random.split(jax.random.key(0), few_rows.SAMPLE)
    matrices = [0.02 * jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
    product, size = Product(shape, vocabulary=False), shape[0] * shape[1]
    works = [lambda n=rows: product.times(matrices, n).block_until_ready() for rows in few_rows.COUNTS]
    for rows, seconds in zip(few_rows.COUNTS, timing.in_turns(works, lambda: None), strict=True):
        predicted = predict(matrices[0].device, read=2 * size, operations=2 * rows * size)
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
        shards = program(kind)(start).addressable_shards
        ranks = [(shard.index[0].start or 0) // own for shard in shards]
        expected = [(size - 1) / 2 if kind is all_reduce else float((rank + 1) % size) for rank in ranks]
        yield right(f"{kind.__name__} {name}", [float(np.asarray(shard.data)[-1]) for shard in shards], expected)
        run = program(lambda x, kind=kind: jax.lax.fori_loop(0, TIMES, lambda _, x: kind(x), x))
        seconds = timing.in_turns([lambda f=run, x=start: f(x).block_until_ready()], lambda: None)[0] / TIMES
        moved = share * 4 * elements
        rate, predicted = moved / seconds / 1e9, predict(mesh.devices.flat[0], sent=moved)
        more = {"gigabytes_per_second": rate}
        yield time(f"{kind.__name__} {name}: time", seconds, predicted, f", {rate:.3g} GB/s", **more)


def kernels(arguments: Any, *_: Any) -> Iterator[Line]:
    device, how = jax.local_devices()[0], {}
    if device.platform == "cpu":
        from jax._src.pallas.mosaic import tpu_info

        how = {"interpret": True}
        # Kernels ask for a chip's sizes then too, which are v5e's.
        tpu_info.registry.setdefault("cpu", lambda: tpu_info.get_tpu_info_for_chip(tpu_info.ChipVersion.TPU_V5E, 1))
    for name, case in cases(small=arguments.small).items():
        yield from attempt(name, functools.partial(_kernel, name, case, device, how))
    yield from attempt("products in float32", functools.partial(_float32, small=arguments.small))
    yield from attempt("equal scores", functools.partial(_equal_scores, how))


def cases(*, small: bool) -> dict[str, Case]:
    """Makes the kernels' cases by name; small ones, each once, for an interpreter on a CPU."""
    found = [make(**_SMALL[make.func]) if small else make() for make in CASES]
    return {f"{case.fields['kernel']}, {case.sizes}": case for case in found}


def _kernel(name: str, case: Case, device: Any, how: dict[str, Any]) -> Iterator[Line]:
    arguments, pallas = operands(case), functools.partial(case.function, implementation="pallas", **how)
    xla = functools.partial(case.function, implementation="xla")
    got, expected = (jax.jit(function)(*arguments) for function in (pallas, xla))
    yield within(name, difference(got, expected), TOLERANCE)
    del got, expected
    if how:
        yield skipped(f"{name}: time", "interpreted")
        return
    seconds = timed(case, pallas, arguments)
    floor = predict(device, read=case.floor_bytes, operations=case.operations)
    yield time(f"{name}: time", seconds, floor, "" if floor is None else f", {floor / seconds:.0%} of the floor")


def operands(case: Case) -> list[jax.Array]:
    """Makes arguments as the engine and the trainer have them."""
    made = []
    for index, (shape, dtype) in enumerate(case.arguments):
        key = jax.random.key(index)
        if index in case.values:
            made.append(jnp.asarray(case.values[index], dtype))
        elif str(dtype).startswith("int"):
            made.append(jax.random.randint(key, shape, -7, 8, jnp.int8).astype(dtype))
        else:
            made.append(((case.scale if index else 1.0) * jax.random.normal(key, shape)).astype(dtype))
    return made


def difference(got: Any, expected: Any) -> float:
    """Returns the largest error of an array: the largest difference beside its largest expected number.

    The error of integers is the share that differs: tokens of almost equal scores may change places. NaN is infinity.
    """

    @jax.jit
    def of(x: jax.Array, y: jax.Array) -> jax.Array:
        if jnp.issubdtype(y.dtype, jnp.integer):
            return jnp.mean(x != y, dtype=jnp.float32)
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return jnp.max(jnp.abs(x - y)) / jnp.maximum(jnp.max(jnp.abs(y)), jnp.finfo(jnp.float32).tiny)

    leaves = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    found = [float(of(x, y)) for x, y in leaves]
    return max(x if np.isfinite(x) else np.inf for x in found)


def timed(case: Case, function: Callable[..., Any], arguments: Sequence[jax.Array]) -> float:
    """Measures the seconds of a call among several in one program, each of which waits for the one before.

    Donated arguments are replaced by the last results of the call before, as in the engine.
    """
    results = jax.tree.leaves(jax.eval_shape(function, *arguments))
    first = len(results) - len(case.donated)

    def once(_: Any, carried: Any) -> Any:
        results = jax.tree.leaves(function(*carried[0]))
        following = dict(zip(case.donated, results[first:], strict=True))
        given = [following.get(index, x) for index, x in enumerate(carried[0])]
        return jax.lax.optimization_barrier((given, results[:first]))

    run = jax.jit(lambda carried: jax.lax.fori_loop(0, CALLS, once, carried), donate_argnums=0)
    carried: Any = jax.tree.map(jnp.copy, list(arguments)), [jnp.zeros(x.shape, x.dtype) for x in results[:first]]

    def work() -> None:
        nonlocal carried
        carried = jax.block_until_ready(run(carried))

    return timing.in_turns([work], lambda: None)[0] / CALLS


def _float32(*, small: bool) -> Iterator[Line]:
    """Products of float32 against float64 on the host, for numbers of rows that a TPU multiplies by different units."""
    inputs, outputs = (256, 128) if small else (4096, 1024)
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(inputs, outputs)).astype(np.float32)
    for rows in (1, 2, 8, 256):
        x = rng.normal(size=(rows, inputs)).astype(np.float32)
        exact = x.astype(np.float64) @ matrix.astype(np.float64)
        for name, got in {
            "linear": jax.jit(linear)(x, matrix),
            "vocabulary_logits": jax.jit(vocabulary_logits)(x, matrix.T),
        }.items():
            error = float(np.abs(np.asarray(got, np.float64) - exact).max() / np.sqrt(inputs))
            yield within(f"{name} in float32, {rows} rows", error, FLOAT32_TOLERANCE)


def _equal_scores(how: dict[str, Any]) -> Iterator[Line]:
    """Of equal scores the lower index comes first: drafts are ranked so, and greedy tokens are chosen so."""
    case = top_k("vocabulary_top_k", queries=2, k=6, hidden=128, vocabulary=512)
    scores = np.zeros(512)
    scores[[400, 7, 130]], scores[[300, 20]] = 2.0, 1.0
    x, rows = jnp.ones((2, 128), jnp.bfloat16), jnp.asarray(np.tile(scores[:, None] / 128, 128), jnp.bfloat16)
    logits = vocabulary_logits(x, rows)
    expected = [7, 130, 400, 20, 300, 0]
    for name, got in {
        "vocabulary_top_k": jax.jit(functools.partial(case.function, implementation="pallas", **how))(x, rows)[1],
        "lax.top_k": jax.jit(lambda logits: jax.lax.top_k(logits, 6)[1])(logits),
        "argmax": jax.jit(argmax)(logits)[:, None],
    }.items():
        found = np.asarray(got)[0].tolist()
        yield right(f"equal scores, {name}", found, expected[: len(found)])
