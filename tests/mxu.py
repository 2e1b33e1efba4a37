"""The products of a TPU's matrix unit (MXU), on a CPU.

The MXU multiplies bfloat16. XLA computes a float32 product of the highest precision as six products of bfloat16: each
operand is the sum of three bfloat16 numbers, high, middle and low, and the products with low by low, low by middle and
middle by low are left out. A matrix times one row goes to the vector unit instead, which knows float32
(`test_one_row_leaves_the_matrix_unit`). So the rows of a draft are computed unlike vanilla decoding's single one.

Counts what that changes for the packaged target, in 62 answers that llama.cpp gave:

    PYTHONPATH=. .venv/bin/python tests/mxu.py
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.interpreters import mlir as registered  # where the rules in force are, and only there
from jax.interpreters import mlir

from eagle3_jax.decoding.measure.near_tie import near_tie
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.checkpoint.fetch import load_target
from eagle3_jax.models.inference_layout import for_inference
from eagle3_jax.models.target import TargetModel


@contextlib.contextmanager
def tpu_products(*, padded: bool = False) -> Iterator[None]:
    """Lowers every float32 product for a CPU as a TPU would compute it; CPU kernels are off.

    The sums of a row do not depend on the rows beside it, as long as there are any.

    Args:
        padded: one row is padded to eight, so the MXU multiplies it too.

    Raises:
        ValueError: a product that is lowered has less than the highest precision: a TPU would round its operands.
    """
    rules = registered._platform_specific_lowerings["cpu"]
    plain = rules[jax.lax.dot_general_p]

    def lower(ctx: Any, x: Any, y: Any, **options: Any) -> Any:
        numbers, precision, avals = options["dimension_numbers"], options["precision"], ctx.avals_in
        if any(aval.dtype != jnp.float32 for aval in avals):
            return plain.rule(ctx, x, y, **options)
        if precision != (jax.lax.Precision.HIGHEST,) * 2:
            raise ValueError(f"precision: got {precision} for a product of float32 {avals}, expected HIGHEST")
        (contracted, batch) = numbers
        rows, columns = (
            math.prod(size for axis, size in enumerate(aval.shape) if axis not in (*summed, *shared))
            for aval, summed, shared in zip(avals, contracted, batch, strict=True)
        )
        if 1 in (rows, columns) and not batch[0] and not padded:  # attention, which has a batch, is a kernel on TPUs
            return plain.rule(ctx, x, y, **options)
        return mlir.lower_fun(functools.partial(_six, numbers), multiple_results=False)(ctx, x, y)

    mlir.register_lowering(jax.lax.dot_general_p, lower, platform="cpu")
    jax.clear_caches()
    try:
        with mock.patch.dict(os.environ, EAGLE3_CPU_KERNELS="0"):
            yield
    finally:
        rules[jax.lax.dot_general_p] = plain
        jax.clear_caches()


def _six(numbers: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Sums six products of bfloat16, the smallest first. CPUs multiply one row in another order than two: two it is."""
    (summed, _), (shared, _) = numbers
    own = [axis for axis in range(x.ndim) if axis not in (*summed, *shared)]
    alone = own and math.prod(x.shape[axis] for axis in own) == 1
    if alone:
        x = jnp.pad(x, [(0, int(axis == own[0])) for axis in range(x.ndim)])

    (x0, x1, x2), (y0, y1, y2) = _parts(x), _parts(y)
    x, y = (
        jnp.concatenate(parts, axis=axes[0])
        for parts, axes in zip(((x2, x1, x0, x1, x0, x0), (y0, y1, y2, y0, y1, y0)), numbers[0], strict=True)
    )
    result = jax.lax.dot_general(x, y, numbers, preferred_element_type=jnp.float32)
    return jax.lax.slice_in_dim(result, 0, 1, axis=len(shared)) if alone else result


def _parts(x: jax.Array) -> list[jax.Array]:
    """Splits x into high, middle and low. `reduce_precision` rounds where XLA would leave a pair of casts out."""
    parts = []
    for _ in range(3):
        parts.append(jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7))
        x -= parts[-1]
    return [part.astype(jnp.bfloat16) for part in parts]


_LONGEST = 77  # tokens of a text
_BATCH = 8


@jax.jit
def _logits(target: TargetModel, tokens: jax.Array) -> jax.Array:
    """Computes the logits behind every token by one pass."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    cache = target.empty_cache(*tokens.shape)
    return target.logits(target(tokens, Pass(positions, jnp.zeros(len(tokens), jnp.int32)), cache)[0])


def main(answers: int) -> None:
    """Compares the choice behind every token of real answers by the one products and by the others.

    One pass over a text has the bits of the verification of drafts: a row's sums do not depend on other rows. Those of
    vanilla decoding's single row are a CPU kernel's, float32 in order of k.
    """
    target = load_target("smollm2-135m-instruct").model
    golden = json.loads((pathlib.Path(__file__).parent / "golden/smollm2.json").read_text())["conversations"]
    texts = [(x["token_ids"], x["answer"]) for x in golden if len(x["token_ids"] + x["answer"]) <= _LONGEST][:answers]
    rows, behind = np.zeros((len(texts), _LONGEST), np.int32), np.zeros((len(texts), _LONGEST), bool)
    for row, chosen, (prompt, answer) in zip(rows, behind, texts, strict=True):
        row[: len(prompt + answer)] = prompt + answer
        chosen[len(prompt) - 1 : len(prompt + answer) - 1] = True

    def logits(model: TargetModel) -> np.ndarray:
        parts = range(0, len(rows), _BATCH)
        found = [np.asarray(_logits(model, jnp.asarray(rows[i : i + _BATCH])))[behind[i : i + _BATCH]] for i in parts]
        return np.concatenate(found)

    one = logits(for_inference(target))
    with tpu_products():
        other = logits(target)
        changed = one.argmax(1) != other.argmax(1)
        best = np.argsort(-one)[:, :2]
        gaps, moved = (-np.diff(np.take_along_axis(x, best, axis=1))[:, 0] for x in (one, other))
        moves = np.abs(gaps - moved)
        # A gap g of the two best is closed by a larger move against it. Gaps below 0.5 are taken for even.
        rate = (gaps < 0.5).mean() / 0.5 * moves.mean() / 2
        print(f"{len(one)} tokens, changed: {changed.sum()}; logits move by {np.abs(one - other).max():.1e} at most")
        print(f"gap of the two best: moves by {moves.mean():.1e}, is below 0.5 for {(gaps < 0.5).mean():.1%}")
        print(f"expected: {1e6 * rate:.2f} changed tokens of a million")
        for (text, at), row in zip(np.argwhere(behind)[changed], np.flatnonzero(changed), strict=True):
            tie = near_tie(target, rows[text, : at + 1].tolist(), (int(one[row].argmax()), int(other[row].argmax())))
            print(f"text {text}, token {at + 1}: {tie or 'no near-tie'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int, default=64)
    main(**vars(parser.parse_args()))
