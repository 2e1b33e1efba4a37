"""Every Pallas kernel against XLA's operations on this device, and its time; products in float32; equal scores."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.kernels.linear.api import linear
from eagle3_jax.kernels.vocabulary.api import argmax, vocabulary_logits
from eagle3_jax.runs import timing
from tpu.cases import CASES, Case, attention, delta, grouped_product, moved_rows, top_k, training_time_test
from tpu.first_run.lines import Line, attempt, chip_of, predict, right, skipped, time, within

# Largest error beside the largest number of the expected result, in bfloat16, as all cases are.
TOLERANCE = 2e-2
# Largest error of a float32 product of N(0, 1), beside the root of the number of products in a sum. One pass of
# bfloat16 instead of HIGHEST has 3e-3.
FLOAT32_TOLERANCE = 2e-5
TIMES = 32  # calls of a kernel in one program, so that the start of a program counts little
_SMALL: dict[Any, dict[str, int]] = {
    attention: {"nodes": 4, "query_heads": 4, "kv_heads": 2, "batch": 2, "keys": 512},
    top_k: {"queries": 4, "k": 4, "hidden": 128, "vocabulary": 512},
    grouped_product: {"rows": 4, "inputs": 256, "outputs": 256},
    training_time_test: {"length": 128, "steps": 2, "query_heads": 2, "kv_heads": 1},
    delta: {"tokens": 9, "key_heads": 1, "value_heads": 2},
    moved_rows: {"nodes": 4, "batch": 2, "layers": 1, "kv_heads": 2, "slots": 512, "length": 252},
}


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
    floor = predict(chip_of(device), read=case.floor_bytes, operations=case.operations)
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

    run = jax.jit(lambda carried: jax.lax.fori_loop(0, TIMES, once, carried), donate_argnums=0)
    carried: Any = jax.tree.map(jnp.copy, list(arguments)), [jnp.zeros(x.shape, x.dtype) for x in results[:first]]

    def work() -> None:
        nonlocal carried
        carried = jax.block_until_ready(run(carried))

    return timing.in_turns([work], lambda: None)[0] / TIMES


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
