"""Rounds and training steps at an 8B target's size, with random weights.

Drafts of random weights are never accepted, so acceptance is simulated: what counts is the time of a round. Operations
of a training step are 6 per weight and token (`fc` once, the other weights once per step of the training-time test) and
2 for the teacher's logits, without attention scores.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from eagle3_jax.config import DraftTree, MeshConfig, RunConfig, run_file
from eagle3_jax.decoding.device.models import Models
from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.decoding.measure import profile
from eagle3_jax.decoding.tier import Tier
from eagle3_jax.kernels.linear import few_rows
from eagle3_jax.mesh import batch_sharding, make_mesh, put, shardings
from eagle3_jax.models.checkpoint.fetch import read_config
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.families import family_of
from eagle3_jax.models.layers import SHARDING_RULES
from eagle3_jax.models.shapes import shapes_of
from eagle3_jax.models.target import TargetModel
from eagle3_jax.models.target_config import ModelConfig
from eagle3_jax.runs import processes, timing
from eagle3_jax.training.batch import TEACHER_SHARDING_RULES, Batch, Teacher
from eagle3_jax.training.kinds.eagle3 import Eagle3
from eagle3_jax.training.optimizer import make_optimizer
from eagle3_jax.training.state import init_state, make_train_step
from tpu.first_run.lines import Line, attempt, chip_of, predict, skipped, time

ROOT = pathlib.Path(__file__).parents[3]
CONFIG, SHAPE = ROOT / "configs/llama31_8b.yaml", ROOT / "configs/targets/llama31_8b"
TREES = (DraftTree(num_steps=3, num_draft_tokens=4), DraftTree(num_steps=6, topk=8, num_draft_tokens=48))
_SMALL_TREES = (DraftTree(num_steps=3, num_draft_tokens=4), DraftTree(num_steps=2, topk=2, num_draft_tokens=6))
ACCEPTANCE = 0.8
TURNS = 5  # after the first
_COPIES = 4  # weights, gradients and two moments of a head in training
_SMALL_SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "aux_layers": (0, 1, 2),
}
MOST_OF_HBM = 0.8  # for weights, of what a device gives


class NoTokenizer:
    """A tokenizer for an engine whose prompts are ids and whose answers are not read."""

    eos_token_id = unk_token_id = None

    def convert_tokens_to_ids(self, _: str) -> None:
        return None

    def decode(self, *_: Any, **__: Any) -> str:
        return ""


@dataclasses.dataclass(frozen=True)
class Run:
    """The models to measure, on the devices of a mesh.

    Attributes:
        prompt, answer: tokens of each in a round; the first of an answer comes from the prompt's pass.
    """

    config: RunConfig
    shape: ModelConfig
    mesh: Mesh
    trees: tuple[DraftTree, ...] = TREES
    prompt: int = 512
    answer: int = 257

    @property
    def head(self) -> DraftHeadConfig:
        return DraftHeadConfig.for_target(self.config.draft, self.shape)

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.config.target.dtype)

    @functools.cached_property
    def draft(self) -> Draft:
        head = random(lambda: DraftHead(self.head, dtype=self.dtype, rngs=nnx.Rngs(0)), self.mesh)
        return Draft(head, jnp.arange(self.head.draft_vocab_size))

    @functools.cached_property
    def target(self) -> TargetModel:
        return random(lambda: family_of(self.shape).model(self.shape, dtype=self.dtype, rngs=nnx.Rngs(0)), self.mesh)


def sized(mesh: Mesh, *, small: bool) -> Run:
    """Makes the models of configs/llama31_8b.yaml, or small ones of the same family."""
    values = run_file.to_dict(run_file.load(CONFIG, []))
    shape = read_config(SHAPE, values["target"]["aux_layers"])
    values["train"] |= {"batch_size": mesh.shape["data"]}
    if not small:
        return Run(run_file.from_dict(json.loads(json.dumps(values))), shape, mesh)
    shape = dataclasses.replace(shape, **_SMALL_SHAPE)
    values["target"]["aux_layers"] = shape.aux_layers
    values["draft"]["vocab_size"] = 128
    values["train"] |= {"ttt_steps": 2, "row_length": 64, "loss_block": 64}
    config = run_file.from_dict(json.loads(json.dumps(values)))
    return Run(config, shape, mesh, _SMALL_TREES, prompt=16, answer=17)


def random(make: Callable[[], Any], mesh: Mesh | None = None) -> Any:
    """Makes a module with weights N(0, 0.02), by one program per shape: a single program compiles for minutes."""
    shapes = nnx.eval_shape(make)
    if mesh is None:
        return jax.tree.map(lambda leaf: _normal(leaf.shape, leaf.dtype, None)(), shapes)
    where = shardings(shapes, mesh, SHARDING_RULES)
    return jax.tree.map(lambda leaf, place: _normal(leaf.shape, leaf.dtype, place)(), shapes, where)


@functools.cache
def _normal(shape: tuple[int, ...], dtype: Any, place: Any) -> Callable[[], jax.Array]:
    return jax.jit(lambda: 0.02 * jax.random.normal(jax.random.key(0), shape, dtype), out_shardings=place)


def does_not_fit(module: Any, mesh: Mesh, copies: int = 1) -> str | None:
    """Says why a device cannot hold its share of a module's weights; None if it can, or if nobody knows.

    Args:
        module: shapes, such as `shapes_of`'s.
        copies: arrays of each parameter's size.
    """
    share = copies * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(module)) / mesh.size
    limit = (mesh.local_devices[0].memory_stats() or {}).get("bytes_limit")
    if limit is None or share <= MOST_OF_HBM * limit:
        return None
    return f"{share / 2**30:.1f} GiB a device, of {limit / 2**30:.1f}"


# --------------------------------------------------------------------------------------------------------------- rounds
def rounds(arguments: Any, *_: Any) -> Iterator[Line]:
    """Rounds of a single request on all chips of a host, by tier."""
    devices = jax.local_devices()
    mesh = make_mesh(MeshConfig(data=1, model=len(devices)), devices)
    with processes.among((processes.index(),)):
        yield from attempt("rounds", functools.partial(_rounds, sized(mesh, small=arguments.small)))


def _rounds(run: Run) -> Iterator[Line]:
    name = f"rounds of {run.shape.num_hidden_layers} layers x {run.shape.hidden_size} on {run.mesh.size} devices"
    family = family_of(run.shape).model
    weights = shapes_of(lambda rngs: family(run.shape, dtype=run.dtype, rngs=rngs))
    if reason := does_not_fit(weights, run.mesh):
        yield skipped(name, reason)
        return
    size = {"batch_size": 1, "max_length": run.prompt + run.answer, "prefix_cache": False}
    engine = Engine(run.target, NoTokenizer(), run.draft, run.trees, simulated_acceptance=ACCEPTANCE, **size)
    vanilla = engine.tiers.tiers[0]
    if few_rows.counts():
        yield _round(f"{name}: {vanilla.name}, products unpadded", run, engine, vanilla)
        engine.own_runner.pad(profile.cheapest_rows(engine.own_runner))
    for tier in engine.tiers.tiers:
        yield _round(f"{name}: {tier.name}", run, engine, tier)


def _round(name: str, run: Run, engine: Engine, tier: Tier) -> Line:
    """Measures the median time of a round in the engine's answers, after their first tokens, and tokens a round."""
    engine.tiers.pinned = tier
    prompt = np.random.default_rng(0).integers(0, run.shape.vocab_size, run.prompt).tolist()
    taken, tau = [], 1.0
    for _ in range(TURNS + 1):  # the first one compiles
        start = perf_counter()
        (output,) = engine.generate([prompt], SamplingParams(max_tokens=run.answer, ignore_eos=True))
        stats = output.stats
        taken.append((perf_counter() - start - (stats.seconds_to_first_token or 0.0)) / stats.rounds)
        tau = stats.acceptance_length
    seconds = statistics.median(taken[1:])
    read = profile.bytes_read(Models.of(run.target, run.draft), tier, 1, run.prompt + run.answer // 2)
    floor = predict(chip_of(run.mesh.devices.flat[0]), read=read, devices=run.mesh.size)
    numbers = {"tokens_per_second": tau / seconds, "tau": tau, "gigabytes_per_second": read / seconds / 1e9}
    more = f", {tau / seconds:.0f} tokens/s at tau {tau:.2f}"
    return time(name, seconds, floor, more, **numbers)


# ------------------------------------------------------------------------------------------------------- training steps
def steps(*, small: bool) -> Iterator[Line]:
    """Training steps on all chips of all hosts, the batch split over them; a row of tokens each."""
    yield from attempt("training step", functools.partial(_steps, sized(make_mesh(MeshConfig()), small=small)))


def _steps(run: Run) -> Iterator[Line]:
    config, head = run.config.train, run.head
    name = f"training step, {config.batch_size} x {config.row_length} tokens on {run.mesh.size} devices"
    if reason := does_not_fit(shapes_of(lambda rngs: DraftHead(head, dtype=jnp.float32, rngs=rngs)), run.mesh, _COPIES):
        yield skipped(name, reason)
        return
    teacher, batch = _inputs(run)
    kind, optimizer = Eagle3(head, config), make_optimizer(config, 1000)
    state = init_state(functools.partial(kind.new, 0), teacher.rows, optimizer, run.mesh)
    step = make_train_step(kind, optimizer, run.mesh)

    def work() -> None:
        nonlocal state
        state, metrics = step(state, teacher, batch)
        jax.block_until_ready(metrics["loss"])

    seconds, tokens = timing.in_turns([work], lambda: None)[0], config.batch_size * config.row_length
    once, weights = math.prod(state.head.fc.shape), sum(leaf.size for leaf in jax.tree.leaves(state.head))
    operations = tokens * (6 * (once + config.ttt_steps * (weights - once)) + 2 * teacher.rows.size)
    chip = chip_of(run.mesh.devices.flat[0])
    floor = predict(chip, operations=operations, devices=run.mesh.size)
    memory = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    used = "" if floor is None else f", MFU {floor / seconds:.0%}"
    used += "" if memory is None else f", {memory / 2**30:.1f} GiB at most"
    numbers = {"tokens_per_second": tokens / seconds, "teraflops": operations / seconds / 1e12, "peak_bytes": memory}
    yield time(name, seconds, floor, f", {tokens / seconds:,.0f} tokens/s{used}", **numbers)


def _inputs(run: Run) -> tuple[Teacher, Batch]:
    """Makes random inputs of a step that trains every position."""
    config, head, by_rows = run.config.train, run.head, batch_sharding(run.mesh)
    size, hidden, drafted = (config.batch_size, config.row_length), head.target_hidden_size, head.draft_vocab_size

    def normal(index: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jax.random.normal(jax.random.key(index), shape, dtype)

    def teacher() -> Teacher:
        embed, rows = (0.02 * normal(index, (head.vocab_size, hidden), run.dtype) for index in range(2))
        return Teacher.of(embed, rows, jnp.arange(drafted))

    @functools.partial(jax.jit, out_shardings=by_rows)
    def states() -> tuple[jax.Array, jax.Array]:
        widths = head.num_aux_layers * hidden, hidden
        aux, last = (normal(index, (*size, width), jnp.bfloat16) for index, width in enumerate(widths))
        return aux, last

    aux, last = states()
    ones = np.ones(size, np.int32)
    ids = np.random.default_rng(0).integers(0, drafted, size, np.int32)  # draft tokens only: all are trained
    ids, ones, places = (put(x, by_rows) for x in (ids, ones, np.cumsum(ones, axis=1, dtype=np.int32) - 1))
    where = shardings(jax.eval_shape(teacher), run.mesh, TEACHER_SHARDING_RULES)
    return jax.jit(teacher, out_shardings=where)(), Batch(ids, aux, last, ids, ones, ones, places)
