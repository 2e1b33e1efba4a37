"""The report of a dispatch: the columns that a program packs on the device and the host reads.

A program returns one array of int32 with one row per request: one transfer per dispatch. The columns of
log-probabilities come last: a reader without need of them leaves them out (`best` None).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from eagle3_jax.decoding.device.shapes import ROUNDS


@functools.cache
def of_prefill(best: int | None) -> np.dtype:
    """Returns prefill's columns; `best`: number of alternatives with each token's log-probability."""
    return np.dtype([("root", "i4"), ("done", "i4"), ("failed", "i4"), *_logprobs(1, best)])


@functools.cache
def of_decode(steps: int, nodes: int, best: int | None) -> np.dtype:
    """Returns decode's columns; `steps`, `nodes`: the greatest `depth` and `nodes` of the engine's tiers."""
    numbers = [(name, "i4") for name in ("done", "failed", "num_output", "rounds", "drafted", "unread")]
    room = ROUNDS * (steps + 1)
    arrays = {"accepted": (steps,), "ends": (ROUNDS,), "tree": (3, nodes), "output": (room,)}
    return np.dtype([*numbers, *((name, "i4", shape) for name, shape in arrays.items()), *_logprobs(room, best)])


def _logprobs(tokens: int, best: int | None) -> list[tuple[str, str, tuple[int, ...]]]:
    if best is None:
        return []
    values, each = (tokens,), (tokens, best)
    return [("chosen", "f4", values), ("processed", "f4", values), ("tokens", "i4", each), ("best", "f4", each)]


def pack(columns: np.dtype, **values: Array) -> Int[Array, "b width"]:
    """Packs the columns by name, each with the batch first, on the device; floats as their bits."""
    names, packed = columns.names or (), []
    assert set(values) == set(names)
    for name in names:
        value, column = values[name], columns[name]
        assert value.shape[1:] == column.shape, name
        if column.base.kind == "f":
            value = jax.lax.bitcast_convert_type(value, jnp.int32)
        packed.append(value.reshape(len(value), -1).astype(jnp.int32))
    return jnp.concatenate(packed, axis=1)


def _read(columns: np.dtype, row: Int[np.ndarray, " width"]) -> Any:
    return row[: columns.itemsize // row.itemsize].view(columns)[0]


@dataclasses.dataclass(frozen=True)
class RoundTree:
    """The tree that one round drafted."""

    token_ids: list[int]  # the root, which was chosen before, and the drafts
    parents: list[int]  # node indices; -1 for the root
    accepted: list[bool]  # the root and the drafts that the target accepted

    @classmethod
    def of(cls, row: Int[np.ndarray, "3 n"]) -> RoundTree:
        """Reads tokens, parents and `taken` of a `LastTree`, without its unused places."""
        tokens, parents, taken = row.tolist()
        kept = [node for node, parent in enumerate(parents) if node == 0 or parent >= 0]
        place = {node: number for number, node in enumerate(kept)} | {-1: -1}
        nodes = [(tokens[node], place[parents[node]], bool(taken[node])) for node in kept]
        return cls(*map(list, zip(*nodes, strict=True)))


@dataclasses.dataclass(frozen=True)
class Advance:
    """One dispatch's progress of one request, on the host."""

    token_ids: list[int]
    depths: list[int]  # of each token's draft; 0 for the target's own
    done: bool
    failed: bool
    # For each token (its own, processed, [(token, its own) of the best]), see `TokenLogprobs`; empty if not requested.
    logprobs: list[tuple[float, float, list[tuple[int, float]]]]
    tree: np.ndarray | None = None  # a row of `LastTree` [3, nodes]; None if no round was run
    rounds: int = 0
    drafted: int = 0  # rounds with drafts
    unread: int = 0  # tokens that the head has missed while it rested
    accepted: list[int] = dataclasses.field(default_factory=list)


def progress(row: np.ndarray, sizes: tuple[int, int] | None, best: int | None) -> Advance:
    """Reads a row of decode's report, of these `steps` and `nodes`; without `sizes` of prefill's."""
    if sizes is None:
        found = _read(of_prefill(best), row)
        tokens = [] if found["failed"] else [int(found["root"])]
        return Advance(tokens, [0] * len(tokens), bool(found["done"]), bool(found["failed"]), _logprobs_of(found, 1))
    found = _read(of_decode(*sizes, best), row)
    count, rounds, accepted = int(found["num_output"]), int(found["rounds"]), found["accepted"].tolist()
    return Advance(
        token_ids=found["output"][:count].tolist(),
        depths=_depths(found["ends"].tolist(), sum(accepted)),
        tree=found["tree"] if rounds else None,
        done=bool(found["done"]),
        failed=bool(found["failed"]),
        rounds=rounds,
        drafted=int(found["drafted"]),
        unread=int(found["unread"]),
        accepted=accepted,
        logprobs=_logprobs_of(found, count),
    )


def _depths(ends: list[int], accepted: int) -> list[int]:
    """Returns the depth of each token's draft. A round gives its accepted drafts, then a token of the target's own.

    The limit may cut the last round, so that more drafts are `accepted` than there are tokens.
    """
    lengths = [end - start for start, end in itertools.pairwise([0, *ends]) if end > start]
    found = [depth for length in lengths[:-1] for depth in (*range(1, length), 0)]
    before = sum(length - 1 for length in lengths[:-1])
    return found + [depth if depth <= accepted - before else 0 for depth in range(1, sum(lengths[-1:]) + 1)]


def _logprobs_of(found: Any, count: int) -> list[tuple[float, float, list[tuple[int, float]]]]:
    if "chosen" not in found.dtype.names:
        return []
    names = ("chosen", "processed", "tokens", "best")
    chosen, processed, tokens, values = (found[name][:count].tolist() for name in names)
    every = [zip(*pair, strict=True) for pair in zip(tokens, values, strict=True)]
    best = [[pair for pair in pairs if pair[1] > -math.inf] for pairs in every]  # a constraint forbids the others
    return list(zip(chosen, processed, best, strict=True))
