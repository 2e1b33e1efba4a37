"""Costs of rounds on this machine, by tier and width: measured when an engine warms up, and kept in a file.

They also decide which programs are worth compiling.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from eagle3_jax.decoding.choice.tiers import Costs, Tier, TierChoice
from eagle3_jax.decoding.device import shapes
from eagle3_jax.decoding.device.runner import ModelRunner
from eagle3_jax.decoding.measure import timing
from eagle3_jax.decoding.steps import Progress, steps
from eagle3_jax.runs import disk, machine, processes


def price(
    runner: ModelRunner, tiers: TierChoice, folder: pathlib.Path | None, *, progress: Progress, greedy_alone: bool
) -> list[tuple[Tier, bool, int]]:
    """Measures the costs of several tiers' rounds for their choice; the runner's state is forgotten.

    Args:
        folder: keeps costs on this machine for later starts; None measures.
        greedy_alone: leaves out the rounds of requests with a temperature or other sampling parameters.

    Returns:
        The rounds that may pay: tier, whether for greedy requests alone, rows.
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
        # A tier that does not pay in few rows pays less in many, whose drafts cost more. One that does not pay for
        # greedy requests pays less for others, whose rounds cost more.
        could_be = [tier for tier in useful[width] if tier in narrower]
        known[width] = tiers.useful(_costs(runner, could_be, folder, greedy, width))
        useful[width] = narrower = [tier for tier in tiers.tiers if tier.name in known[width].rounds]
        if width == widths[-1]:
            tiers.price(known, greedy=greedy)
            kinds += [(tier, greedy, width) for width, those in useful.items() for tier in those]
    return kinds


def _costs(runner: ModelRunner, of: Sequence[Tier], folder: pathlib.Path | None, greedy: bool, width: int) -> Costs:
    """Measures the rounds of some tiers on this machine, or reads their kept costs."""
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
    return kept_or_measured(folder, key, lambda: round_costs(runner, of, greedy=greedy, width=width))


def round_costs(runner: ModelRunner, tiers: Sequence[Tier], *, greedy: bool, width: int) -> Costs:
    """Measures the costs of rounds of these tiers, with `width` slots busy. Forgets the state.

    Args:
        tiers: vanilla decoding first. A tier that drafts from the text alone is sure of a match only in the first
            round of a dispatch. Its price is the time beyond a single vanilla round.
    """

    def work(tier: Tier, rounds: int) -> None:
        runner.decode((), range(width), rounds, width, width=width, tier=tier, greedy=greedy)
        runner.wait()

    def wake() -> None:
        runner.catch_up((), range(width), width=width)
        runner.wait()

    counts = [1 if tier.copies_alone else shapes.ROUNDS for tier in tiers]
    works = [functools.partial(work, tier, count) for tier, count in zip(tiers, counts, strict=True)]
    works += [functools.partial(work, tiers[0], 1)] + [wake] * runner.rests
    seconds = timing.in_turns(works, runner.rehearse)
    runner.reset()
    vanilla, single = seconds[0] / counts[0], seconds[len(tiers)]
    rounds = {
        tier.name: vanilla + max(0.0, taken - single) if tier.copies_alone else taken / count
        for tier, count, taken in zip(tiers, counts, seconds, strict=False)
    }
    return Costs(rounds, seconds[-1] if runner.rests else 0.0)


def kept_or_measured(folder: pathlib.Path | None, key: dict[str, Any], measure: Callable[[], Costs]) -> Costs:
    """Reads the folder's costs for this key, or measures and keeps them; all processes take those of process 0.

    Args:
        folder: None keeps nothing; one that cannot be written keeps nothing, with a warning.
        key: JSON-ready: machine, models, sizes, tiers.
    """
    kept = None if folder is None else processes.agree(lambda: _read(folder, key))
    if kept is None:
        measured = dataclasses.asdict(measure())
        kept = processes.agree(lambda: measured)
        if folder is not None:
            processes.agree(lambda: _write(folder, key, kept))
    return Costs(**kept)


def _read(folder: pathlib.Path, key: dict[str, Any]) -> dict[str, Any] | None:
    try:
        found = disk.read_json(_file(folder, key))
        Costs(**found["costs"]).rounds.items()
        return found["costs"] if found["of"] == json.loads(json.dumps(key)) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # no file, or a damaged one
        return None


def _write(folder: pathlib.Path, key: dict[str, Any], costs: dict[str, Any]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        disk.write_json(_file(folder, key), {"of": key, "costs": costs})
    except OSError as error:  # this engine has its costs all the same
        warnings.warn(f"warm_up: {folder}: {error.strerror or error}, so the next start measures again", stacklevel=2)


def _file(folder: pathlib.Path, key: dict[str, Any]) -> pathlib.Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / f"round_costs_{digest[:16]}.json"
