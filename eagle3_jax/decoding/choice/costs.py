"""What a round of each tier costs on this machine: measured when an engine warms up, and kept in a file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from eagle3_jax.runs import disk, processes

_TURNS = 9
_SECONDS = 2.0  # enough for one tier, where a round takes long


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds. Attributes: rounds: a round of each tier, by name. waking: a resting head reads what it missed."""

    rounds: dict[str, float]
    waking: float


@dataclasses.dataclass(frozen=True)
class Round:
    """One round, in seconds. Attributes: stages: of each, and of the host ("host"). bytes_read: that it must read."""

    seconds: float
    stages: dict[str, float]
    bytes_read: int


def measure(works: Sequence[Callable[[], object]], prepare: Callable[[], object]) -> list[float]:
    """The lower quartile of each work's times, in turns: what slows a machine down for a while only ever adds to them.

    Few turns of what takes long, but of one process alone: of several all have to call a work of their mesh as often.

    Args:
        works: return when their work is done; the first call of each, which compiles, does not count.
        prepare: called in front of each.
    """
    times: list[list[float]] = [[] for _ in works]
    for turn in range(-1, _TURNS):
        for work, taken in zip(works, times, strict=True):
            if turn > 1 and sum(taken) > _SECONDS and processes.count() == 1:
                continue
            prepare()
            start = time.perf_counter()
            work()
            if turn >= 0:
                taken.append(time.perf_counter() - start)
    return [sorted(taken)[len(taken) // 4] for taken in times]


def kept_or_measured(folder: pathlib.Path | None, key: dict[str, Any], measure: Callable[[], Costs]) -> Costs:
    """Costs that the folder keeps for this key, or measured now and kept there; all processes take those of the first.

    Args:
        folder: None keeps nothing; nor does one that cannot be written, with a warning.
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
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # nothing there that can be used
        return None


def _write(folder: pathlib.Path, key: dict[str, Any], costs: dict[str, Any]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        disk.write_json(_file(folder, key), {"of": key, "costs": costs})
    except OSError as error:  # they are measured, and good for this engine
        warnings.warn(f"warm_up: {folder}: {error.strerror or error}, so the next start measures again", stacklevel=2)


def _file(folder: pathlib.Path, key: dict[str, Any]) -> pathlib.Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / f"round_costs_{digest[:16]}.json"
