"""Measures the cost of more rows: the target's pass and the stage `verify` of a round, relative to one row.

    .venv/bin/python tools/rows_cost.py [--turns 41] [--length 256]

Batch 1, greedy. `pass`: all layers and the LM head; `chain`: also the argmax over the vocabulary and the walk; `tree`:
also a tree's mask and the commit of its path. All kinds take turns in random order, so that a slow phase of the machine
affects all. Figures are the lowest tenth of the turns, and their median.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding.device import programs
from eagle3_jax.decoding.device.calls import Models
from eagle3_jax.decoding.device.memory import empty_state
from eagle3_jax.decoding.device.shapes import Sizes
from eagle3_jax.decoding.measure import profile
from eagle3_jax.decoding.rounds.state import State
from eagle3_jax.decoding.rounds.tree import chain, root_only
from eagle3_jax.decoding.tier import VANILLA, Tier
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.checkpoint.fetch import load_target
from eagle3_jax.models.inference_layout import for_inference
from eagle3_jax.models.target import TargetModel

ROWS = (1, 2, 4, 8, 16, 32)
# Number of nodes, the root included -> (num_steps, topk) of the tree.
_TREES = {4: (2, 2), 8: (3, 3), 16: (5, 4), 32: (6, 4)}
Seconds = dict[tuple[str, int], tuple[float, float]]  # of (kind, rows)


def kinds(rows: Sequence[int]) -> dict[tuple[str, int], Tier]:
    """Lists the measurements for each number of rows; no head takes part."""
    found = {(kind, n): VANILLA for n in rows for kind in ("pass", "chain")}
    chains = {("chain", n): (n - 1, 1) for n in rows if n > 1}
    trees = {("tree", n): _TREES[n] for n in rows if n in _TREES}
    for (kind, n), (steps, topk) in (chains | trees).items():
        found[kind, n] = Tier(DraftTree(num_steps=steps, topk=topk, num_draft_tokens=n), head=True)
    return found


@functools.partial(jax.jit, donate_argnames="state")
def read(models: Models, state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
    """Computes the target's logits after each of the tokens, which follow the committed ones."""
    target, _ = models.modules()
    positions = state.lengths[:, None] + jnp.arange(tokens.shape[1])[None]
    hidden, _, cache = target(tokens, Pass(positions, state.lengths, pages=state.page_table), state.cache)
    return dataclasses.replace(state, cache=cache), target.logits(hidden)


def measure(target: TargetModel, rows: Sequence[int], turns: int, length: int) -> Seconds:
    """Measures the lowest tenth of the turns, and their median."""
    every = kinds(rows)
    tiers = list(every.values())
    sizes = Sizes.plan(1, 2 * length, 128, tiers)
    models = Models.of(for_inference(target), None)
    state: Any = jax.jit(functools.partial(empty_state, sizes=sizes, tiers=tiers, kv_dtype=None))(models)
    state = programs.rehearse(state, jnp.int32(length))
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in every}
    for turn in range(-1, turns):
        for kind, count in random.Random(turn).sample(list(every), len(every)):
            drafts = jnp.arange(1, count, dtype=jnp.int32)[None]
            nodes = chain(state.root, drafts) if count > 1 else root_only(state.root)
            jax.block_until_ready((nodes, state))
            start = time.perf_counter()
            if kind == "pass":
                state, result = read(models, state, nodes.tokens)
            else:
                state, result = profile.run_stage(models, state, nodes, stage="verify", tier=every[kind, count])
            jax.block_until_ready((state, result))
            if turn >= 0:  # the first one compiles
                seconds[kind, count].append(time.perf_counter() - start)
    return {key: (sorted(x)[len(x) // 10], statistics.median(x)) for key, x in seconds.items()}


def table(found: Seconds) -> str:
    """Formats a line for each kind and number of rows; a tree is relative to a chain of one row."""
    lines = [f"{'':6}{'rows':>6}{'lowest tenth, ms':>20}{'median, ms':>14}{'ratios':>16}"]
    for kind, count in sorted(found, key=lambda key: (("pass", "chain", "tree").index(key[0]), key[1])):
        ones = found["pass" if kind == "pass" else "chain", 1]
        low, median = found[kind, count]
        ratios = f"{low / ones[0]:.2f} {median / ones[1]:.2f}"
        lines.append(f"{kind:6}{count:>6}{1e3 * low:>20.2f}{1e3 * median:>14.2f}{ratios:>16}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--turns", type=int, default=41)
    parser.add_argument("--length", type=int, default=256, help="committed tokens")
    arguments = parser.parse_args()
    print(table(measure(load_target(arguments.target).model, ROWS, arguments.turns, arguments.length)))


if __name__ == "__main__":
    main()
