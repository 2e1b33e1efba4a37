"""The profile of a round: its stages as programs of their own, the bytes that it must read, products of few rows."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from eagle3_jax.decoding.device import calls, shapes
from eagle3_jax.decoding.device.calls import Models
from eagle3_jax.decoding.device.runner import ModelRunner
from eagle3_jax.decoding.rounds.round import draft_tree, extend, verify_tree
from eagle3_jax.decoding.rounds.state import State
from eagle3_jax.decoding.tier import RoundPlan, Tier
from eagle3_jax.kernels.linear import few_rows
from eagle3_jax.kernels.linear.layouts import bytes_of
from eagle3_jax.mesh import mesh_set, parameter_path
from eagle3_jax.models.cache import KVCache
from eagle3_jax.models.inference_layout import Matrix, Product, products
from eagle3_jax.models.target import TargetModel
from eagle3_jax.runs import processes, timing

STAGES = ("draft", "verify", "extend")
_TURNS = 9
_SIDE, _PRODUCTS = 12288, 4  # 576 MiB per product


@dataclasses.dataclass(frozen=True)
class Round:
    """The profile of one round: its seconds, those of each stage and of the "host", and the bytes it must read."""

    seconds: float
    stages: dict[str, float]
    bytes_read: int


@functools.partial(jax.jit, static_argnames=("stage", "tier"), donate_argnames="state")
def run_stage(models: Models, state: State, found: Any, *, stage: str, tier: Tier) -> tuple[State, Any]:
    """Runs a stage for greedy requests: `draft_tree`, `verify_tree` of its nodes, or `extend` by what it verified."""
    (target, head), plan = models.modules(), RoundPlan(tier, greedy=True)
    if stage == "draft":
        found, state = draft_tree(target, head, state, plan)
    elif stage == "verify":
        found, state = verify_tree(target, state, found, plan)
    else:
        found, state = None, extend(target, head, state, found, plan)
    return state, found


def measure(runner: ModelRunner, tier: Tier) -> Round:
    """Profiles a greedy round of this tier, with all slots busy; the host's part is a dispatch's, beside its rounds."""

    def dispatch(tier: Tier, count: int) -> None:
        runner.finish(calls.decode(sizes, (), range(batch), count, batch, width=batch, tier=tier))

    def rehearse() -> None:
        runner.finish(calls.rehearse(sizes.measured_length))

    vanilla, most, sizes, batch = runner.tiers[0], shapes.ROUNDS, runner.sizes, runner.sizes.batch
    works = [functools.partial(dispatch, kind, count) for kind in (tier, vanilla) for count in (1, most)]
    one, several, single, plain = timing.in_turns(works, rehearse)
    rehearse()
    seconds = runner.lend(lambda models, state: times(models, state, tier))
    runner.reset()
    host = max(0.0, (most * single - plain) / (most - 1)) / most
    return Round(
        plain / most + max(0.0, one - single) if tier.copies_alone else several / most,
        seconds | {"host": host},
        bytes_read(Models.of(runner.target, runner.draft), tier, batch, sizes.measured_length, runner.kv_dtype),
    )


def times(models: Models, state: State, tier: Tier) -> tuple[State, dict[str, float]]:
    """Measures the median seconds of each stage of greedy rounds, stage by stage. `state` is donated."""
    taken: dict[str, list[float]] = {stage: [] for stage in STAGES}
    found = None
    for _ in range(_TURNS + 1):
        for stage in STAGES:
            start = time.perf_counter()
            state, found = jax.block_until_ready(run_stage(models, state, found, stage=stage, tier=tier))
            taken[stage].append(time.perf_counter() - start)
    return state, {stage: statistics.median(seconds[1:]) for stage, seconds in taken.items()}  # the first one compiled


def bytes_read(models: Models, tier: Tier, batch: int, length: int, kv_dtype: Any = None) -> int:
    """Counts the bytes that a round must read: weights, once per pass, keys and values in use, and recurrent states.

    Embeddings count as a few rows, unless they are the LM head too. Experts count as many as the tokens of a pass may
    choose, as if no two chose the same. The draft's passes are its `passes`; what it reads once, `read_once`, counts
    once. A head's own keys and values are left out.
    """
    target, draft = models.modules()
    total = _of_model(target, batch, tier.nodes, length, kv_dtype)
    if tier.head and tier.tree is not None and draft is not None:
        head = draft.head
        passes = head.passes(tier.tree)
        for nodes in passes:
            if head.model is not None:
                total += _of_model(head.model, batch, nodes, length, kv_dtype)
            else:
                total += _weights(head, getattr(head.config, "model", head.config), batch * nodes)
        once = [getattr(head, name) for name in head.read_once]
        total -= (len(passes) - 1) * sum(map(bytes_of, jax.tree.leaves(once)))
    return total


def _of_model(model: TargetModel, batch: int, nodes: int, length: int, kv_dtype: Any) -> int:
    embedding = sum(map(bytes_of, jax.tree.leaves(model.embed))) if hasattr(model, "lm_head") else 0
    token, states = (sum(map(bytes_of, part)) for part in jax.eval_shape(lambda model: _caches(model, kv_dtype), model))
    return _weights(model, model.config, batch * nodes) - embedding + batch * (length * token + states)


def _caches(model: TargetModel, kv_dtype: Any) -> tuple[list[Any], list[Any]]:
    """Allocates the keys and values of a token, and the recurrent states of a sequence."""
    layers = model.empty_pages(1, 1, kv_dtype, tail=0).layers
    keys, states = ([own for own in layers if isinstance(own, KVCache) is kept] for kept in (True, False))
    return jax.tree.leaves(keys), jax.tree.leaves(states)


def _weights(module: nnx.Module, config: Any, tokens: int) -> int:
    """Counts the bytes of weights that a pass over `tokens` tokens reads; axis 0 of `expert_*` is the expert."""
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(module):
        of, experts = bytes_of(leaf), leaf.shape[0] if "/expert_" in parameter_path(path) else 0
        total += of // experts * min(experts, tokens * config.num_experts_per_tok) if experts else of
    return total


def cheapest_rows(runner: ModelRunner) -> dict[Product, tuple[int, ...]]:
    """Measures to how many rows each kind of product is best padded, see `layouts.Padded`; none where it never pays."""
    counts, found = few_rows.counts(), dict[Product, tuple[int, ...]]()
    with mesh_set(runner.mesh):
        for kind, matrices in products(runner.target, runner.draft).items() if counts else ():

            def work(rows: int, kind: Product = kind, matrices: Sequence[Matrix] = matrices) -> None:
                kind.times(matrices, rows).block_until_ready()

            seconds = timing.in_turns([functools.partial(work, rows) for rows in counts], lambda: None)
            best = few_rows.cheapest(dict(zip(counts, seconds, strict=True)))
            found[kind] = tuple(processes.agree(lambda best=best: best))
    return found


def bandwidth() -> float:
    """Measures the bytes per second that the device reads: a matrix far larger than its caches, times a vector."""
    matrix, vector = jnp.zeros((_SIDE, _SIDE), jnp.float32), jnp.zeros(_SIDE, jnp.float32)
    seconds = []
    for _ in range(_TURNS):
        start = time.perf_counter()
        result = vector
        for _ in range(_PRODUCTS):  # a fast device reads the matrix in less time than an answer takes
            result = _product(matrix, result)
        result.block_until_ready()
        seconds.append(time.perf_counter() - start)
    return _PRODUCTS * matrix.nbytes / min(seconds[1:])


@jax.jit
def _product(matrix: jax.Array, vector: jax.Array) -> jax.Array:
    return matrix @ vector
