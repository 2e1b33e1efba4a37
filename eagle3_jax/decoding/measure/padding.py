"""Measures to how many rows products of few rows are best padded."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from eagle3_jax.decoding.device.runner import ModelRunner
from eagle3_jax.kernels.linear import few_rows
from eagle3_jax.mesh import mesh_set
from eagle3_jax.models.inference_layout import Matrix, Product, products
from eagle3_jax.runs import processes, timing


def cheapest(runner: ModelRunner) -> dict[Product, tuple[int, ...]]:
    """Returns the numbers of rows for each kind of product, see `layouts.Padded`; none where padding never pays."""
    counts, found = few_rows.counts(), dict[Product, tuple[int, ...]]()
    with mesh_set(runner.mesh):
        for kind, matrices in products(runner.target, runner.draft).items() if counts else ():

            def work(rows: int, kind: Product = kind, matrices: Sequence[Matrix] = matrices) -> None:
                kind.times(matrices, rows).block_until_ready()

            seconds = timing.in_turns([functools.partial(work, rows) for rows in counts], lambda: None)
            best = few_rows.cheapest(dict(zip(counts, seconds, strict=True)))
            found[kind] = tuple(processes.agree(lambda best=best: best))
    return found
