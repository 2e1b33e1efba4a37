"""Costs of rounds on this machine, by tier and width: measured when an engine warms up, and kept in a file."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from eagle3_jax.decoding.device import calls, shapes
from eagle3_jax.decoding.device.runner import ModelRunner
from eagle3_jax.decoding.tier import Tier
from eagle3_jax.runs import disk, machine, processes, timing

_measuring = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds that rounds take."""

    rounds: dict[str, float]  # of each tier, by name, where sequences are `length` tokens long
    waking: float  # a rested head reads the tokens that it missed
    growth: dict[str, float] = dataclasses.field(default_factory=dict)  # by a token more in every sequence
    length: int = 0


def key(runner: ModelRunner, of: Sequence[Tier], greedy: bool, width: int) -> dict[str, Any]:
    """Describes all that the costs of these tiers' rounds depend on."""
    return {
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
        "lengths": runner.sizes.measured_lengths,
        "greedy": greedy,
        "width": width,
    }


def round_costs(
    runner: ModelRunner,
    tiers: Sequence[Tier],
    *,
    greedy: bool,
    width: int,
    give_way: Callable[[], object] = lambda: None,
) -> Costs:
    """Measures the costs of rounds of these tiers, with `width` slots busy. Forgets the state.

    Vanilla decoding is the first tier. One that drafts from the text alone is sure of a match only in the first round
    of a dispatch: its price is the time beyond a single vanilla round. What runs in `give_way`, called before each
    dispatch, may change the state.
    """

    def prepare(length: int) -> None:
        give_way()
        runner.finish(calls.rehearse(length))

    def work(tier: Tier, rounds: int) -> None:
        runner.finish(calls.decode(sizes, (), range(width), rounds, width, width=width, tier=tier, greedy=greedy))

    def wake() -> None:
        for slot in range(width - 1):
            runner.run(calls.catch_up(sizes, (), slot))
        runner.finish(calls.catch_up(sizes, (), width - 1))

    sizes = runner.sizes
    counts = [1 if tier.copies_alone else shapes.ROUNDS for tier in tiers]
    works = [functools.partial(work, tier, count) for tier, count in zip(tiers, counts, strict=True)]
    works += [functools.partial(work, tiers[0], 1)] + [wake] * runner.rests

    def rounds_of(seconds: Sequence[float]) -> list[float]:
        vanilla, single = seconds[0] / counts[0], seconds[len(tiers)]
        return [
            vanilla + max(0.0, taken - single) if tier.copies_alone else taken / count
            for tier, count, taken in zip(tiers, counts, seconds, strict=False)
        ]

    lengths, names = sizes.measured_lengths, [tier.name for tier in tiers]
    seconds = timing.in_turns(works, functools.partial(prepare, lengths[0]))
    rounds = [rounds_of(seconds)]
    for length in lengths[1:]:
        rounds.append(rounds_of(timing.in_turns(works[: len(tiers) + 1], functools.partial(prepare, length), turns=3)))
    runner.reset()
    slopes = np.polyfit(lengths, rounds, 1)[0] if len(lengths) > 1 else np.zeros(len(tiers))
    growth = dict(zip(names, np.maximum(slopes, 0.0).tolist(), strict=True))
    waking = seconds[-1] if runner.rests else 0.0
    return Costs(dict(zip(names, rounds[0], strict=True)), waking, growth, lengths[0])


def kept_or_measured(folder: pathlib.Path | None, key: dict[str, Any], measure: Callable[[], Costs]) -> Costs:
    """Reads the folder's costs for this key, or measures and keeps them if it can; all processes take process 0's."""
    with _measuring:  # replicas would disturb each other, and find what the first one kept
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
        disk.write_json(_file(folder, key), {"of": key, "costs": costs})
    except OSError as error:  # this engine has its costs all the same
        warnings.warn(f"warm_up: {folder}: {error.strerror or error}, so the next start measures again", stacklevel=2)


def _file(folder: pathlib.Path, key: dict[str, Any]) -> pathlib.Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / f"round_costs_{digest[:16]}.json"
