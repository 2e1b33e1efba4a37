"""Prices: what rounds of each tier cost in each width, and which of these programs are worth compiling."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Sequence

import jax

from eagle3_jax.decoding.choice import costs
from eagle3_jax.decoding.choice.costs import Costs
from eagle3_jax.decoding.choice.modes import Tier, TierChoice
from eagle3_jax.decoding.device.runner import ModelRunner
from eagle3_jax.decoding.steps import Progress, steps
from eagle3_jax.runs import machine


def price(
    runner: ModelRunner, tiers: TierChoice, folder: pathlib.Path | None, *, progress: Progress, greedy_alone: bool
) -> list[tuple[Tier, bool, int]]:
    """Tells a choice among several tiers what their rounds cost; the runner's state is forgotten.

    Args:
        folder: keeps costs on this machine, and has them from an earlier start; None measures.
        greedy_alone: leaves out the rounds of requests that have a temperature or other wishes.

    Returns:
        The rounds that may be of use: tier, whether for greedy requests alone, rows.
    """
    widths, passes = runner.sizes.widths, (True,) if greedy_alone else (True, False)
    useful: dict[int, Sequence[Tier]] = dict.fromkeys(widths, tiers.tiers)
    if len(tiers.tiers) == 1:
        return [(tier, greedy, width) for greedy in passes for width in widths for tier in tiers.tiers]
    kinds: list[tuple[Tier, bool, int]] = []
    known: dict[int, Costs] = {}
    narrower: Sequence[Tier] = tiers.tiers
    for greedy, width in steps(list(itertools.product(passes, widths)), "measure rounds", "width", progress):
        if width == widths[0]:
            known, narrower = {}, tiers.tiers
        # What is of no use in few rows is of less use in many, which only get dearer; what is of no use to greedy
        # requests is of less use to others, whose rounds cost more.
        could_be = [tier for tier in useful[width] if tier in narrower]
        known[width] = tiers.useful(_costs(runner, could_be, folder, greedy, width))
        useful[width] = narrower = [tier for tier in tiers.tiers if tier.name in known[width].rounds]
        if width == widths[-1]:
            tiers.price(known, greedy=greedy)
            kinds += [(tier, greedy, width) for width, those in useful.items() for tier in those]
    return kinds


def _costs(runner: ModelRunner, of: Sequence[Tier], folder: pathlib.Path | None, greedy: bool, width: int) -> Costs:
    """What rounds of some tiers cost on this machine."""
    key = {
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "target": repr(runner.target.config),
        "draft": repr(None if runner.draft is None else runner.draft.head.config),
        "dtype": str(runner.target.embed[...].dtype),
        "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves((runner.target, runner.draft))),
        "sizes": repr(runner.sizes),
        "kv_dtype": str(runner.kv_dtype),
        "mesh": repr(runner.mesh),
        "tiers": [repr(tier) for tier in of],
        "greedy": greedy,
        "width": width,
    }
    return costs.kept_or_measured(folder, key, lambda: runner.measure(of, greedy=greedy, width=width))
