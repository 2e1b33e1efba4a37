"""Measures speed at a target's full size on one accelerator, with random weights instead of a checkpoint.

    .venv/bin/python tools/full_size.py --config configs/llama31_8b.yaml --target.name configs/targets/llama31_8b

The tool has four parts, each timed after a first call that compiles. The first line gives this device's peaks, measured
in the same run: operations a second of a large bfloat16 product, bytes a second of a large matrix-vector product.

- train: the config's training step, all positions in the loss. Operations are 6 per weight and token (`fc` once, the
  other weights once per step of the training-time test) and 2 for the teacher's logits.
- extract: the forward pass of the longest conversations; 2 operations per weight and token.
- products: bytes a second of the products of target and head with few rows, and with as many as `evaluate`'s tree.
  "padded to" is the number of rows to which `Engine.warm_up` pads products of few rows, on devices where it does.
- decode: vanilla decoding and `benchmark.trees` (default: the tree of `evaluate`, chains of 3 and 7), by
  `Engine.generate` at each of `benchmark.batch_sizes`. Drafts of random weights are never accepted, so acceptance is
  simulated (`benchmark.simulated_acceptance`, by default 0.8); the result is the cost of a round. "costs" is a round's
  time over vanilla decoding's: a head with an acceptance length of tau decodes tau / costs times as fast. "reads" is
  the least bytes that a round must read, over its time. Products are padded; "unpadded" is vanilla decoding before.

Operations exclude attention scores.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from run_parser import run_parser

from eagle3_jax.config import DraftTree, MeshConfig, RunConfig, run_file
from eagle3_jax.decoding.choice.tiers import Tier
from eagle3_jax.decoding.device import programs
from eagle3_jax.decoding.device.models import Models
from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.decoding.measure import profile, timing
from eagle3_jax.extract import hidden_states
from eagle3_jax.kernels.linear import few_rows
from eagle3_jax.kernels.linear.quantised import bytes_of
from eagle3_jax.mesh import batch_sharding, make_mesh, mesh_set, put, shardings
from eagle3_jax.models import states
from eagle3_jax.models.checkpoint.fetch import fetch, read_config
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.families import family_of
from eagle3_jax.models.inference_layout import products as products_of
from eagle3_jax.models.layers import SHARDING_RULES
from eagle3_jax.models.target import ModelConfig, TargetModel
from eagle3_jax.training.batch import TEACHER_SHARDING_RULES, Batch, Teacher
from eagle3_jax.training.kinds.eagle3 import Eagle3
from eagle3_jax.training.optimizer import make_optimizer
from eagle3_jax.training.state import init_state, make_train_step

Row = dict[str, Any]
Predict = Callable[[jax.stages.Lowered, bool], float | None]  # of a program, and whether it loops over rounds
TURNS = 5  # after the first
ACCEPTANCE = 0.8
CHAINS = (DraftTree(num_steps=3, num_draft_tokens=4), DraftTree(num_steps=7, num_draft_tokens=8))


class NoTokenizer:
    """A tokenizer for an engine whose prompts are ids and whose answers are not read."""

    eos_token_id = unk_token_id = None

    def convert_tokens_to_ids(self, _: str) -> None:
        return None

    def decode(self, *_: Any, **__: Any) -> str:
        return ""


@dataclasses.dataclass(frozen=True)
class Run:
    """The models to measure.

    Attributes:
        peak: operations a second of a large product on the devices together.
        mesh: the devices; None is one.
        prompt, answer: tokens of each in `decode`; the first of an answer comes from the prompt's pass.
        predict: predicts the seconds of a training step, or of a round; None predicts nothing.
    """

    config: RunConfig
    shape: ModelConfig
    peak: float
    mesh: Mesh | None = None
    prompt: int = 512
    answer: int = 257
    predict: Predict | None = None

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


def train(run: Run) -> Iterator[Row]:
    config, head, rng = run.config.train, run.head, np.random.default_rng(0)
    shape, hidden, drafted = (config.batch_size, config.row_length), head.target_hidden_size, head.draft_vocab_size
    mesh = run.mesh or make_mesh(MeshConfig(), jax.devices()[:1])
    one, by_rows = np.ones(shape, np.int32), batch_sharding(mesh)

    def teacher() -> Teacher:
        embed, rows = (0.02 * jax.random.normal(key, (head.vocab_size, hidden), run.dtype) for key in _keys(2))
        return Teacher.of(embed, rows, jnp.arange(drafted))

    @functools.partial(jax.jit, out_shardings=by_rows)
    def states() -> tuple[jax.Array, jax.Array]:
        widths = head.num_aux_layers * hidden, hidden
        aux, last = (jax.random.normal(k, (*shape, w), jnp.bfloat16) for k, w in zip(_keys(2), widths, strict=True))
        return aux, last

    aux, last = states()
    ids = rng.integers(0, drafted, shape, np.int32)  # draft tokens only: every position is trained
    places = np.cumsum(one, axis=1, dtype=np.int32) - 1
    ids, ones, places = (put(x, by_rows) for x in (ids, one, places))
    batch = Batch(ids, aux, last, ids, ones, ones, places)
    where = shardings(jax.eval_shape(teacher), mesh, TEACHER_SHARDING_RULES)
    kind, optimizer, fixed = Eagle3(head, config), make_optimizer(config, 1000), jax.jit(teacher, out_shardings=where)()
    state = init_state(functools.partial(kind.new, 0), fixed.rows, optimizer, mesh)
    step = make_train_step(kind, optimizer, mesh)

    def work() -> Any:
        nonlocal state
        state, metrics = step(state, fixed, batch)
        return metrics["loss"]

    predicted = run.predict and run.predict(step.lower(state, fixed, batch), False)
    seconds = timed(work)
    once = math.prod(state.head.fc.shape)
    weights = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.head))
    operations = 6 * (once + config.ttt_steps * (weights - once)) + 2 * math.prod(fixed.rows.shape)
    yield throughput(run, "train", math.prod(shape), seconds, operations) | {"predicted_seconds": predicted}


def extract(run: Run) -> Iterator[Row]:
    settings = run.config.extract
    batch = hidden_states.plan_batches([settings.max_length], [settings.max_length], settings.batch_tokens)[0]
    size = batch.rows, batch.length
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, run.shape.vocab_size, size), jnp.int32)
    seconds = timed(lambda: states.target_states(run.target, tokens))
    weights = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(run.target))
    embedding = math.prod(run.target.embed.shape) if hasattr(run.target, "lm_head") else 0
    yield throughput(run, "extract", math.prod(size), seconds, 2 * (weights - embedding))


def products(run: Run) -> Iterator[Row]:
    tree = run.config.evaluate.tree
    nodes = {tree.num_draft_tokens} if isinstance(tree, DraftTree) else set()
    counts = sorted({*few_rows.COUNTS, *nodes})
    for kind, matrices in products_of(run.target, run.draft).items():
        seconds = {rows: timed(functools.partial(kind.times, matrices, rows)) for rows in counts}
        size = sum(bytes_of(leaf) for leaf in jax.tree.leaves(matrices[: few_rows.SAMPLE]))
        yield {
            "part": f"products, {len(matrices)} of {' x '.join(map(str, kind.shape))}",
            "gigabytes_per_second": {rows: size / taken / 1e9 for rows, taken in seconds.items()},
            "padded_to": few_rows.cheapest({rows: seconds[rows] for rows in few_rows.COUNTS}),
        }


def decode(run: Run) -> Iterator[Row]:
    settings, tree = run.config.benchmark, run.config.evaluate.tree
    trees = settings.trees or [*([tree] if isinstance(tree, DraftTree) else []), *CHAINS]
    acceptance = ACCEPTANCE if settings.simulated_acceptance is None else settings.simulated_acceptance
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=run.answer, ignore_eos=True)
    for batch in settings.batch_sizes:
        size = {"batch_size": batch, "max_length": run.prompt + run.answer, "prefix_cache": False}
        engine = Engine(run.target, NoTokenizer(), run.draft, trees, simulated_acceptance=acceptance, **size)
        prompts = rng.integers(0, run.shape.vocab_size, (batch, run.prompt)).tolist()
        of_vanilla: float | None = None

        def measured(tier: Tier, name: str, engine: Engine = engine, prompts: list[list[int]] = prompts) -> Row:
            seconds, tau = rounds(engine, tier, prompts, params)
            length = run.prompt + run.answer // 2
            read = profile.bytes_read(Models.of(run.target, run.draft), tier, len(prompts), length)
            return {
                "part": f"decode, batch {len(prompts)}, {name}",
                "tokens_per_second": len(prompts) * tau / seconds,
                "tau": tau,
                "round_ms": 1e3 * seconds,
                "gigabytes_per_second": read / seconds / 1e9,
                "predicted_seconds": run.predict and run.predict(_rounds_of(engine, tier), True),
            }

        vanilla = engine.tiers.tiers[0]
        if few_rows.counts():
            row = measured(vanilla, f"{vanilla.name}, unpadded")
            yield row | {"costs": 1.0}
            engine._runner.pad_products()
        for tier in engine.tiers.tiers:
            row = measured(tier, tier.name)
            of_vanilla = of_vanilla or row["round_ms"]
            yield row | {"costs": row["round_ms"] / of_vanilla}


def rounds(engine: Engine, tier: Tier, prompts: list[list[int]], params: SamplingParams) -> tuple[float, float]:
    """Measures the median seconds of a round in the engine's answers, after their first tokens, and tokens a round."""
    engine.tiers.pinned = tier
    seconds, tau = [], 1.0
    for turn in range(TURNS + 1):
        start = time.perf_counter()
        outputs = engine.generate(prompts, params)
        taken = time.perf_counter() - start
        stats = [output.stats for output in outputs]
        if turn:
            waited = max(each.seconds_to_first_token or 0.0 for each in stats)
            seconds.append((taken - waited) / max(each.rounds for each in stats))
        tau = statistics.mean(each.acceptance_length for each in stats)
    return statistics.median(seconds), tau


def _rounds_of(engine: Engine, tier: Tier) -> jax.stages.Lowered:
    """Lowers the program of rounds that the engine, which has answered, runs."""
    runner = engine._runner
    call = runner.decode_call(width=runner.sizes.batch, tier=tier)
    with mesh_set(runner.mesh):
        return programs.decode.lower(*call.arguments(runner._state), **call.static)


PARTS = {"train": train, "extract": extract, "products": products, "decode": decode}


def throughput(run: Run, part: str, tokens: int, seconds: float, operations: int) -> Row:
    """Makes a row. Args: operations: per token."""
    rate = tokens / seconds
    memory = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "part": part,
        "tokens_per_second": rate,
        "teraflops": rate * operations / 1e12,
        "peak_share": rate * operations / run.peak,
        "peak_gib": None if memory is None else memory / 2**30,
    }


def operations_per_second(size: int = 8192) -> float:
    """Measures operations a second of a large bfloat16 product; a smaller one on CPUs, to save a minute."""
    size = 1024 if jax.devices()[0].platform == "cpu" else size
    left, right = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in _keys(2))
    product = jax.jit(lambda x, y: x @ y)
    return 2 * size**3 / timed(lambda: product(left, right))


def timed(work: Callable[[], Any]) -> float:
    """Measures the seconds of a call, see `timing.in_turns`."""
    return timing.in_turns([lambda: jax.block_until_ready(work())], lambda: None)[0]


def describe(row: Row) -> str:
    if "padded_to" in row:
        rates = ", ".join(f"{rows} {rate:.0f}" for rows, rate in row["gigabytes_per_second"].items())
        return f"{row['part']:40} rows, GB/s: {rates}; padded to {row['padded_to'] or 'none'}"
    text = f"{row['part']:32}{row['tokens_per_second']:12,.1f} tokens/s"
    if "round_ms" not in row:
        memory = "" if row["peak_gib"] is None else f", {row['peak_gib']:.1f} GiB at most so far"
        return f"{text}{row['teraflops']:10.1f} TFLOP/s, {row['peak_share']:.0%} of a large product's{memory}"
    return (
        f"{text}  tau {row['tau']:.2f}  round {row['round_ms']:.2f} ms, costs {row['costs']:.2f}, "
        f"reads {row['gigabytes_per_second']:.0f} GB/s"
    )


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


def _keys(count: int) -> list[jax.Array]:
    return list(jax.random.split(jax.random.key(0), count))


def main() -> None:
    parser = run_parser(__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of " + ",".join(PARTS))
    parser.add_argument("--json", type=pathlib.Path, help="file for the rows")
    arguments, overrides = parser.parse_known_args()
    parts = arguments.parts.split(",")
    if unknown := set(parts) - PARTS.keys():
        parser.error(f"--parts: got {', '.join(sorted(unknown))}, expected some of {', '.join(PARTS)}")
    try:
        config = run_file.load(arguments.config, overrides)
        shape = read_config(fetch(config.target.name, whole=False), config.target.aux_layers)
    except ValueError as error:
        parser.error(str(error))
    device = jax.devices()[0]
    run, rows = Run(config, shape, operations_per_second()), []
    ceilings = f"{run.peak / 1e12:.2f} TFLOP/s, {profile.bandwidth() / 1e9:.0f} GB/s"
    print(f"{device.device_kind}, jax {jax.__version__}: {ceilings}", flush=True)
    for part in parts:
        for row in PARTS[part](run):
            rows.append(row)
            print(describe(row), flush=True)
            if arguments.json:
                partial = arguments.json.with_suffix(".partial")
                partial.write_text(json.dumps(rows, indent=1) + "\n")
                partial.replace(arguments.json)


if __name__ == "__main__":
    main()
