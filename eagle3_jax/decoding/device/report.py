"""The report of a dispatch: the columns that a program packs on the device and the host reads.

A program returns one array of int32 with one row per request, so that the host makes one transfer per dispatch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from eagle3_jax.decoding.device.shapes import ROUNDS


@dataclasses.dataclass(frozen=True)
class Column:
    """One column: an array of `shape` for each request. Floats are passed as their bits."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: type = np.int32

    @property
    def width(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Report:
    """The columns of a program's report, in order; no other place knows where each lies.

    Columns of log-probabilities come last, so that a reader without need of them leaves them out.
    """

    columns: tuple[Column, ...]

    @classmethod
    @functools.cache
    def of_prefill(cls, best: int | None) -> Report:
        """Makes the columns of prefill.

        Args:
            best: number of alternatives with each token's log-probability; None reports none.
        """
        return cls((Column("root"), Column("done", dtype=bool), Column("failed", dtype=bool), *_logprobs(1, best)))

    @classmethod
    @functools.cache
    def of_decode(cls, steps: int, nodes: int, best: int | None) -> Report:
        """Makes the columns of decode.

        Args:
            steps: the greatest `depth` of the engine's tiers.
            nodes: the greatest `nodes` of the engine's tiers.
            best: as in `of_prefill`.
        """
        room = ROUNDS * (steps + 1)
        return cls(
            (
                Column("done", dtype=bool),
                Column("failed", dtype=bool),
                Column("num_output"),
                Column("rounds"),
                Column("drafted"),
                Column("unread"),
                Column("accepted", (steps,)),
                Column("ends", (ROUNDS,)),
                Column("tree", (3, nodes)),
                Column("output", (room,)),
                *_logprobs(room, best),
            )
        )

    def pack(self, **values: Array) -> Int[Array, "b width"]:
        """Packs the columns by name, each with the batch first, on the device."""
        assert set(values) == {column.name for column in self.columns}
        packed = []
        for column in self.columns:
            value = values[column.name]
            assert (value.shape[1:], value.dtype) == (column.shape, column.dtype), column
            if jnp.issubdtype(value.dtype, jnp.floating):
                value = jax.lax.bitcast_convert_type(value, jnp.int32)
            packed.append(value.reshape(len(value), -1).astype(jnp.int32))
        return jnp.concatenate(packed, axis=1)

    def read(self, row: Int[np.ndarray, " width"]) -> dict[str, np.ndarray]:
        """Reads the columns of one request by name, on the host."""
        found, start = {}, 0
        for column in self.columns:
            value = row[start : start + column.width]
            value = value.view(np.float32) if column.dtype is np.float32 else value.astype(column.dtype, copy=False)
            found[column.name] = value.reshape(column.shape)
            start += column.width
        return found


def _logprobs(tokens: int, best: int | None) -> tuple[Column, ...]:
    if best is None:
        return ()
    return (
        Column("logprobs", (tokens,), np.float32),
        Column("processed_logprobs", (tokens,), np.float32),
        Column("best_tokens", (tokens, best)),
        Column("best_logprobs", (tokens, best), np.float32),
    )


@dataclasses.dataclass(frozen=True)
class RoundTree:
    """The tree that one round drafted.

    Attributes:
        token_ids: the root, which was chosen before, and the drafts.
        parents: node indices; -1 for the root.
        accepted: the root and the drafts that the target accepted.
    """

    token_ids: list[int]
    parents: list[int]
    accepted: list[bool]

    @classmethod
    def of(cls, row: Int[np.ndarray, "3 n"]) -> RoundTree:
        """Reads a row of `LastTree`, without its unused places."""
        tokens, parents, taken = row.tolist()
        kept = [node for node, parent in enumerate(parents) if node == 0 or parent >= 0]
        place = {node: number for number, node in enumerate(kept)} | {-1: -1}
        return cls(
            [tokens[node] for node in kept],
            [place[parents[node]] for node in kept],
            [bool(taken[node]) for node in kept],
        )


@dataclasses.dataclass(frozen=True)
class Progress:
    """One dispatch's progress of one request, on the host.

    Attributes:
        depths: depth of each token's draft; 0 for the target's own.
        tree: a row of `LastTree` [3, nodes]; None if no round was run.
        drafted: rounds with drafts.
        unread: tokens that the head has missed while it rested.
        logprobs: (of the token, processed, [(token, its own) of the best]) for each token, see `TokenLogprobs`; empty
            if not requested.
    """

    token_ids: list[int]
    depths: list[int]
    done: bool
    failed: bool
    logprobs: list[tuple[float, float, list[tuple[int, float]]]]
    tree: np.ndarray | None = None
    rounds: int = 0
    drafted: int = 0
    unread: int = 0
    accepted: list[int] = dataclasses.field(default_factory=list)


def first_progress(row: np.ndarray, best: int | None) -> Progress:
    """Reads a row of prefill's report; `best` as in `Report.of_prefill`."""
    found = Report.of_prefill(best).read(row)
    failed = bool(found["failed"])
    tokens = [] if failed else [int(found["root"])]
    return Progress(
        token_ids=tokens,
        depths=[0] * len(tokens),
        done=bool(found["done"]),
        failed=failed,
        logprobs=_logprobs_of(found, 1),
    )


def progress(row: np.ndarray, steps: int, nodes: int, best: int | None) -> Progress:
    """Reads a row of decode's report; arguments as in `Report.of_decode`."""
    found = Report.of_decode(steps, nodes, best).read(row)
    count, rounds, accepted = int(found["num_output"]), int(found["rounds"]), found["accepted"].tolist()
    return Progress(
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

    Args:
        ends: see `State`. The limit may cut the last round.
        accepted: drafts in all rounds together; more than the tokens here if the limit cut them.
    """
    lengths = [end - start for start, end in itertools.pairwise([0, *ends]) if end > start]
    found = [depth for length in lengths[:-1] for depth in (*range(1, length), 0)]
    before = sum(length - 1 for length in lengths[:-1])
    return found + [depth if depth <= accepted - before else 0 for depth in range(1, sum(lengths[-1:]) + 1)]


def _logprobs_of(found: dict[str, np.ndarray], count: int) -> list[tuple[float, float, list[tuple[int, float]]]]:
    if "logprobs" not in found:
        return []
    names = ("logprobs", "processed_logprobs", "best_tokens", "best_logprobs")
    chosen, processed, tokens, values = (found[name][:count].tolist() for name in names)
    best = [list(zip(*pair, strict=True)) for pair in zip(tokens, values, strict=True)]
    return list(zip(chosen, processed, best, strict=True))
