"""What the host reads of a dispatch: rows of the reports of `programs.prefill` and `programs.decode`."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from jaxtyping import Int

from eagle3_jax.decoding.device.programs import ROUNDS


@dataclasses.dataclass(frozen=True)
class RoundTree:
    """What one round drafted.

    Attributes:
        token_ids: the root, which was chosen before, and the drafts. parents: node indices, -1 of the root.
        accepted: the root and the drafts that the target accepted.
    """

    token_ids: list[int]
    parents: list[int]
    accepted: list[bool]

    @classmethod
    def of(cls, row: Int[np.ndarray, "3 n"]) -> RoundTree:
        """Of a row of `LastTree`, whose unused places are left out."""
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
    """What one dispatch did for one request, on the host.

    Attributes:
        depths: of each token's draft, 0 of the target's own.
        tree: a row of `LastTree` [3, nodes]; None where no round was run.
        drafted: rounds with drafts. unread: tokens that the head has missed while it rested.
        logprobs: (of the token, (token, of it) of the best ones) for each token; empty where nobody asks.
    """

    token_ids: list[int]
    depths: list[int]
    tree: np.ndarray | None
    done: bool
    failed: bool
    rounds: int
    drafted: int
    unread: int
    accepted: list[int]
    logprobs: list[tuple[float, list[tuple[int, float]]]]


def first_progress(row: np.ndarray, best: int | None) -> Progress:
    """A row of `prefill`'s report. `best`: logprobs that it has at each place, None where they are not asked for."""
    failed = bool(row[2])
    tokens = [] if failed else [int(row[0])]
    return Progress(tokens, [0] * len(tokens), None, bool(row[1]), failed, 0, 0, 0, [], _logprobs(row[3:], 1, best, 1))


def progress(row: np.ndarray, steps: int, nodes: int, best: int | None) -> Progress:
    """A row of `decode`'s report.

    Args:
        steps, nodes: `depth_of` and `nodes_of` the engine's tiers. best: see `first_progress`.
    """
    done, failed, count, taken, drafted, unread = (int(x) for x in row[:6])
    accepted, ends, tree, tokens = np.split(row[6:], np.cumsum([steps, ROUNDS, 3 * nodes]))
    room = ROUNDS * (steps + 1)
    return Progress(
        tokens[:count].tolist(),
        _depths(ends.tolist(), sum(accepted.tolist())),
        tree.reshape(3, nodes) if taken else None,
        bool(done),
        bool(failed),
        taken,
        drafted,
        unread,
        accepted.tolist(),
        _logprobs(tokens[room:], room, best, count),
    )


def _depths(ends: list[int], accepted: int) -> list[int]:
    """Of each token's draft. A round gives its accepted drafts, then a token of the target's own; the last may be cut.

    Args:
        ends: see `State`. accepted: drafts, in all rounds together; more than are here where the limit cut them.
    """
    lengths = [end - start for start, end in itertools.pairwise([0, *ends]) if end > start]
    found = [depth for length in lengths[:-1] for depth in (*range(1, length), 0)]
    before = sum(length - 1 for length in lengths[:-1])
    return found + [depth if depth <= accepted - before else 0 for depth in range(1, sum(lengths[-1:]) + 1)]


def _logprobs(
    columns: np.ndarray, room: int, best: int | None, count: int
) -> list[tuple[float, list[tuple[int, float]]]]:
    if best is None:
        return []
    chosen, tokens, values = np.split(columns, [room, room + room * best])
    chosen, values = chosen.view(np.float32), values.view(np.float32).reshape(room, best)
    tokens = tokens.reshape(room, best)
    return [
        (float(chosen[i]), [(int(t), float(v)) for t, v in zip(tokens[i], values[i], strict=True)])
        for i in range(count)
    ]
