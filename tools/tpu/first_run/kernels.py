"""Every Pallas kernel against XLA's operations on this device, and its time; products in float32; equal scores."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.kernels.linear.api import linear
from eagle3_jax.kernels.vocabulary.api import argmax, vocabulary_logits
from eagle3_jax.runs import timing
from tpu.cases import CASES, Attention, Call, Case, Commit, Delta, GroupedProduct, TopK, TrainingTimeTest
from tpu.first_run.lines import Line, attempt, chip_of, predict, right, skipped, time, within

# Largest error beside the largest number of the expected result, in bfloat16, as all cases are.
TOLERANCE = 2e-2
# Largest error of a float32 product of N(0, 1), beside the root of the number of products in a sum. One pass of
# bfloat16 instead of HIGHEST has 3e-3.
FLOAT32_TOLERANCE = 2e-5
TIMES = 32  # calls of a kernel in one program, so that the start of a program counts little
_SMALL: dict[type[Case], dict[str, Any]] = {
    Attention: {"nodes": 4, "query_heads": 4, "kv_heads": 2, "batch": 2, "keys": 512},
    TopK: {"queries": 4, "k": 4, "hidden": 128, "vocabulary": 512},
    GroupedProduct: {"rows": 4, "inputs": 256, "outputs": 256},
    TrainingTimeTest: {"length": 128, "steps": 2, "query_heads": 2, "kv_heads": 1},
    Delta: {"tokens": 9, "key_heads": 1, "value_heads": 2},
    Commit: {"nodes": 4, "batch": 2, "layers": 1, "kv_heads": 2, "slots": 512, "length": 252},
}


def kernels(arguments: Any, *_: Any) -> Iterator[Line]:
    device = jax.local_devices()[0]
    how = _interpreted() if device.platform == "cpu" else {}
    for case in cases(small=arguments.small):
        name = f"{case.kernel}, {case.sizes}"
        yield from attempt(name, functools.partial(_kernel, name, case, device, how))
    yield from attempt("products in float32", functools.partial(_float32, small=arguments.small))
    yield from attempt("equal scores", functools.partial(_equal_scores, how))


def _interpreted() -> dict[str, Any]:
    """Returns how to run kernels without a TPU; they ask for a chip's sizes then too, which are v5e's."""
    from jax._src.pallas.mosaic import tpu_info

    tpu_info.registry.setdefault("cpu", lambda: tpu_info.get_tpu_info_for_chip(tpu_info.ChipVersion.TPU_V5E, 1))
    return {"interpret": True}


def cases(*, small: bool) -> list[Case]:
    """Lists the kernels' cases; small ones, each once, for an interpreter on a CPU."""
    if not small:
        return CASES
    shrunk = [dataclasses.replace(case, **_SMALL[type(case)]) for case in CASES]
    return list({(case.kernel, case.sizes): case for case in shrunk}.values())


def _kernel(name: str, case: Case, device: Any, how: dict[str, Any]) -> Iterator[Line]:
    pallas = case.call(implementation="pallas", **how)
    arguments = operands(case, pallas)
    got, expected = (jax.jit(call.function)(*arguments) for call in (pallas, case.call(implementation="xla")))
    yield within(name, difference(got, expected), TOLERANCE)
    del got, expected
    if how:
        yield skipped(f"{name}: time", "interpreted")
        return
    seconds = timed(pallas, arguments, TIMES)
    chip = chip_of(device)
    floor = predict(chip, read=case.floor_bytes, operations=case.operations)
    share = "" if floor is None else f", {floor / seconds:.0%} of the floor"
    yield time(f"{name}: time", seconds, floor, share)


def operands(case: Case, call: Call) -> list[jax.Array]:
    """Makes arguments as the engine and the trainer have them."""
    fixed: dict[int, Any] = {}
    if isinstance(case, Attention):  # full sequences; a tree whose nodes see themselves and some before them
        mask = np.tril(np.random.default_rng(0).integers(0, 2, (case.nodes, case.nodes))) + np.eye(case.nodes)
        lengths = np.full(case.batch, case.keys - case.nodes)
        fixed = {0: _pages(call), 6: lengths, 7: np.broadcast_to(mask > 0, (case.batch, *mask.shape))}
    elif isinstance(case, TrainingTimeTest):  # one document
        fixed = {3: np.ones((1, case.length)), 4: case.steps - 1}
    elif isinstance(case, Delta):  # a tree as above, or one document
        sees = np.tril(np.ones(call.arguments[-1][0])) if not case.prompt else np.zeros(call.arguments[-1][0])
        fixed = {3: -np.ones(call.arguments[3][0]), 4: np.full(call.arguments[4][0], 0.5), 6: sees}
    elif isinstance(case, Commit):
        path = np.broadcast_to(2 * np.arange(case.nodes), (case.batch, case.nodes))
        fixed = {0: np.full(case.batch, case.length), 1: path, 2: _pages(call, 2)}
    made = []
    for index, (shape, dtype) in enumerate(call.arguments):
        key = jax.random.key(index)
        if index in fixed:
            made.append(jnp.asarray(fixed[index], dtype))
        elif str(dtype).startswith("int"):
            made.append(jax.random.randint(key, shape, -7, 8, jnp.int8).astype(dtype))
        else:
            scale = 0.02 if isinstance(case, TopK | GroupedProduct) and index else 1.0
            made.append((scale * jax.random.normal(key, shape)).astype(dtype))
    return made


def _pages(call: Call, index: int = 0) -> np.ndarray:
    shape, _ = call.arguments[index]
    return np.arange(np.prod(shape)).reshape(shape)


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


def timed(call: Call, arguments: Sequence[jax.Array], times: int) -> float:
    """Measures the seconds of a call among `times` in one program."""
    results = jax.tree.leaves(jax.eval_shape(call.function, *arguments))
    kept = [jnp.zeros(x.shape, x.dtype) for x in results[: len(results) - len(call.donated)]]
    carried, run = (jax.tree.map(jnp.copy, list(arguments)), kept), repeated(call, times)

    def work() -> None:
        nonlocal carried
        carried = jax.block_until_ready(run(carried))

    return timing.in_turns([work], lambda: None)[0] / times


def repeated(call: Call, times: int) -> jax.stages.Wrapped:
    """Makes a program of several calls, each of which waits for the one before.

    It takes and returns, donated, the arguments and the results that replace none. Donated arguments are replaced by
    the last results of the call before, as in the engine.
    """

    def once(_: Any, carried: Any) -> Any:
        given, _ = carried
        results = jax.tree.leaves(call.function(*given))
        first = len(results) - len(call.donated)
        following = dict(zip(call.donated, results[first:], strict=True))
        given = [following.get(index, x) for index, x in enumerate(given)]
        return jax.lax.optimization_barrier((given, results[:first]))

    return jax.jit(lambda carried: jax.lax.fori_loop(0, times, once, carried), donate_argnums=0)


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
    case = TopK("vocabulary_top_k", queries=2, k=6, hidden=128, vocabulary=512)
    x = jnp.ones((case.queries, case.hidden), case.dtype)
    scores = np.zeros(case.vocabulary)
    scores[[400, 7, 130]], scores[[300, 20]] = 2.0, 1.0
    rows = jnp.asarray(np.tile(scores[:, None] / case.hidden, case.hidden), case.dtype)
    logits = vocabulary_logits(x, rows)
    expected = [7, 130, 400, 20, 300, 0]
    for name, got in {
        "vocabulary_top_k": jax.jit(case.call(implementation="pallas", **how).function)(x, rows)[1],
        "lax.top_k": jax.jit(lambda logits: jax.lax.top_k(logits, case.k)[1])(logits),
        "argmax": jax.jit(argmax)(logits)[:, None],
    }.items():
        found = np.asarray(got)[0].tolist()
        yield right(f"equal scores, {name}", found, expected[: len(found)])
