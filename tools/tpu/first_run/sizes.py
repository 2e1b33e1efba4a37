"""Rounds and training steps at an 8B target's size, with random weights; the verb `train`, stopped and resumed."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re
import signal
import subprocess
import sys
import time as clock
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import yaml
from flax import nnx
from jax.sharding import Mesh

from eagle3_jax.config import DraftTree, MeshConfig, RunConfig, TargetConfig, run_file
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.measure import profile
from eagle3_jax.extract import __main__ as extract
from eagle3_jax.mesh import batch_sharding, make_mesh, shardings
from eagle3_jax.models.checkpoint.fetch import load_target, read_config
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.families import family_of
from eagle3_jax.models.layers import SHARDING_RULES
from eagle3_jax.models.target import TargetModel
from eagle3_jax.models.target_config import ModelConfig
from eagle3_jax.runs import disk, manifest, processes, timing
from eagle3_jax.runs.command import STOPPED
from eagle3_jax.training.batch import TEACHER_SHARDING_RULES, Batch, Teacher
from eagle3_jax.training.kinds.kind import kind_of
from eagle3_jax.training.metrics import products
from eagle3_jax.training.state import init_state, make_optimizer, make_train_step
from tpu.first_run.lines import OK, Line, attempt, predict, right, skipped, time

ROOT = pathlib.Path(__file__).parents[3]
CONFIG, SHAPE = ROOT / "configs/llama31_8b.yaml", ROOT / "configs/targets/llama31_8b"
TREES = (DraftTree(num_steps=3, num_draft_tokens=4), DraftTree(num_steps=6, topk=8, num_draft_tokens=48))
LENGTH = 768  # tokens of a cache
SECONDS = 300  # for one run of the verb `train`
_TIMES = re.compile(r"second|wait|teraflops|mfu|gibibytes")  # numbers that depend on the clock
_SMALL: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8}
_SMALL |= {"num_key_value_heads": 8, "head_dim": 16, "num_hidden_layers": 2}


class NoTokenizer:
    """A tokenizer for an engine whose prompts are ids and whose answers are not read."""

    eos_token_id = unk_token_id = None

    def convert_tokens_to_ids(self, _: str) -> None:
        return None

    def decode(self, *_: Any, **__: Any) -> str:
        return ""


@dataclasses.dataclass(frozen=True)
class Run:
    """The models to measure, on the devices of a mesh."""

    config: RunConfig
    shape: ModelConfig
    mesh: Mesh

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.config.target.dtype)

    @functools.cached_property
    def draft(self) -> Draft:
        return random_draft(DraftHeadConfig.for_target(self.config.draft, self.shape), self.dtype, self.mesh)

    @functools.cached_property
    def target(self) -> TargetModel:
        return random(lambda: family_of(self.shape).model(self.shape, dtype=self.dtype, rngs=nnx.Rngs(0)), self.mesh)


def sized(mesh: Mesh, *, small: bool) -> Run:
    """Makes the models of configs/llama31_8b.yaml, or small ones of the same family."""
    flags = ["--train.batch-size", str(mesh.shape["data"])]
    if small:
        flags += ["--draft.vocab-size", "128", "--train.ttt-steps", "2"]
        flags += ["--train.row-length", "64", "--train.loss-block", "64", "--target.aux-layers", "0", "1", "2"]
    config = run_file.load(CONFIG, flags)
    shape = read_config(SHAPE, config.target.aux_layers)
    return Run(config, dataclasses.replace(shape, **_SMALL) if small else shape, mesh)


def random_draft(shape: DraftHeadConfig, dtype: Any, mesh: Mesh) -> Draft:
    head = random(lambda: DraftHead(shape, dtype=dtype, rngs=nnx.Rngs(0)), mesh)
    return Draft(head, jnp.arange(shape.draft_vocab_size, dtype=jnp.int32))


def random(make: Callable[[], Any], mesh: Mesh) -> Any:
    """Makes a module with weights N(0, 0.02), by one program per shape: a single program compiles for minutes."""
    shapes = nnx.eval_shape(make)
    where = shardings(shapes, mesh, SHARDING_RULES)
    return jax.tree.map(lambda leaf, place: _normal(leaf.shape, leaf.dtype, place)(), shapes, where)


@functools.cache
def _normal(shape: tuple[int, ...], dtype: Any, place: Any) -> Callable[[], jax.Array]:
    return jax.jit(lambda: 0.02 * jax.random.normal(jax.random.key(0), shape, dtype), out_shardings=place)


def rounds(arguments: Any, *_: Any) -> Iterator[Line]:
    """Greedy rounds of a single request on all chips of a host, by tier."""
    devices = jax.local_devices()
    mesh = make_mesh(MeshConfig(data=1, model=len(devices)), devices)
    check = functools.partial(rounds_of, sized(mesh, small=arguments.small), TREES[:1] if arguments.small else TREES)
    with processes.among((processes.index(),)):
        yield from attempt("rounds", check, may_not_fit=True)


def rounds_of(run: Run, trees: Sequence[DraftTree]) -> Iterator[Line]:
    """Measures a vanilla round, and one of each tree."""
    size = {"batch_size": 1, "max_length": LENGTH, "prefix_cache": False}
    engine = Engine(run.target, NoTokenizer(), run.draft, trees, **size)
    engine.own_runner.pad(profile.cheapest_rows(engine.own_runner))
    for tier in engine.tiers.tiers:
        found = engine.profile(tier)
        floor = predict(run.mesh.devices.flat[0], read=found.bytes_read, devices=run.mesh.size)
        name = f"rounds of {run.shape.num_hidden_layers} layers x {run.shape.hidden_size} on {run.mesh.size} devices"
        rate = found.bytes_read / found.seconds / 1e9
        numbers = {"bytes_read": found.bytes_read, "gigabytes_per_second": rate, "stages": found.stages}
        yield time(f"{name}: {tier.name}", found.seconds, floor, f", {rate:.3g} GB/s", **numbers)


def _steps(run: Run) -> Iterator[Line]:
    """Training steps on all chips of all hosts, the batch split over them; a row of tokens each."""
    config, (step, operations) = run.config.train, training_step(run.config, run.shape, run.mesh)
    seconds, tokens = timing.in_turns([step], lambda: None)[0], config.batch_size * config.row_length
    floor = predict(run.mesh.devices.flat[0], operations=operations, devices=run.mesh.size)
    memory = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    used = "" if floor is None else f", MFU {floor / seconds:.0%}"
    used += "" if memory is None else f", {memory / 2**30:.1f} GiB at most"
    numbers = {"tokens_per_second": tokens / seconds, "teraflops": operations / seconds / 1e12, "peak_bytes": memory}
    name = f"training step, {config.batch_size} x {config.row_length} tokens on {run.mesh.size} devices"
    yield time(name, seconds, floor, f", {tokens / seconds:,.0f} tokens/s{used}", **numbers)


def training_step(config: RunConfig, shape: ModelConfig, mesh: Mesh) -> tuple[Callable[[], None], int]:
    """Makes a call that trains every position of a batch of ones, which takes as long as features; and its operations.

    Operations are those of `training.metrics.products`, over all devices.
    """
    run, kind, hidden = config.train, kind_of(config, shape), shape.hidden_size
    optimizer, size = make_optimizer(run, 1000), (run.batch_size, run.row_length)

    def teacher() -> Teacher:
        table = jnp.ones((shape.vocab_size, hidden), config.target.dtype)
        return Teacher.of(table, table, jnp.arange(kind.shape.draft_vocab_size))

    def batch() -> Batch:
        ones = jnp.ones(size, jnp.int32)
        aux, last = (jnp.ones((*size, width * hidden), jnp.bfloat16) for width in (len(shape.aux_layers), 1))
        return Batch(ones, aux, last, ones, ones, ones, jnp.cumsum(ones, axis=1) - 1)

    teaches = jax.jit(teacher, out_shardings=shardings(jax.eval_shape(teacher), mesh, TEACHER_SHARDING_RULES))()
    given = jax.jit(batch, out_shardings=batch_sharding(mesh))()
    state = init_state(functools.partial(kind.new, 0), teaches.rows, optimizer, mesh)
    step = make_train_step(kind, optimizer, mesh)
    operations = products(step.trace(state, teaches, given).jaxpr.jaxpr)

    def work() -> None:
        nonlocal state
        state, metrics = step(state, teaches, given)
        jax.block_until_ready(metrics["loss"])

    return work, operations


# ----------------------------------------------------------------------------------------------------- the verb `train`
def training(arguments: Any, folder: pathlib.Path) -> Iterator[Line]:
    """Training steps; then two equal runs up to their features, and their config, which `resumed` runs."""
    run = functools.partial(_steps, sized(make_mesh(MeshConfig()), small=arguments.small))
    yield from attempt("training step", run, may_not_fit=True)
    del run
    features, config = "features of the verb extract", folder / "train.yaml"
    config.unlink(missing_ok=True)
    if arguments.run_dir is None and processes.count() > 1:
        yield skipped(features, "needs --run-dir, a folder that all hosts see, such as gs://BUCKET/first-run")
        return
    place = processes.agree(lambda: f"{arguments.run_dir or folder / 'training'}/{clock.strftime('%Y%m%d-%H%M%S')}")
    write = functools.partial(_features, features, arguments.target, place, config, small=arguments.small)
    yield from attempt(features, write)


def _features(name: str, target: str, run_dir: str, path: pathlib.Path, *, small: bool) -> Iterator[Line]:
    """The target computes the states of its conversations while the head is trained: no states are kept."""
    rows, length, steps = (jax.device_count(), 64, 10) if small else (jax.device_count(), 1024, 30)
    values = {
        "target": {"name": target},
        "draft": {"vocab_size": 128 if small else 8192},
        "mesh": {"data": 0, "model": 1},
        "extract": {"states": "none", "max_length": length, "batch_tokens": length},
        "train": {"features": "online", "ttt_steps": 2 if small else 7, "batch_size": rows, "row_length": length}
        | {"loss_block": min(length, 512), "epochs": 1000, "log_every": 1, "argmax_mask": False}
        | dict.fromkeys(("max_steps", "eval_every", "checkpoint_every"), steps),
    }
    identity = load_target(TargetConfig(name=target), only=()).identity
    for run in ("whole", "stopped"):
        config = run_file.from_dict(values | {"run_dir": f"{run_dir}/{run}"})
        processes.agree(functools.partial(_conversations, config.folder("regenerate"), identity, rows))
        extract.extract(config)
    path.write_text(yaml.safe_dump(values | {"run_dir": run_dir}))
    yield Line(name, f"written, {rows} rows of {length} tokens a step", "-", OK)


def _conversations(folder: disk.Path, identity: Any, rows: int) -> None:
    if manifest.begin(folder, {"target": identity}):
        return
    for split, count in (("train", 4 * rows), ("held_out", 2)):
        with disk.atomic(folder / f"{split}.jsonl") as temporary, temporary.open("w") as file:
            for number in range(count):
                words = " ".join(f"{number * place % 97} and {place}" for place in range(40))
                messages = [{"role": "user", "content": f"Count {number}."}, {"role": "assistant", "content": words}]
                line = {"id": f"{split}-{number}", "category": "chat", "truncated": False, "answer_ids": None}
                print(json.dumps(line | {"messages": messages}), file=file)
    manifest.finish(folder, files=["train.jsonl", "held_out.jsonl"])


def resumed(config: pathlib.Path) -> Iterator[Line]:
    """Runs the verb on both runs, in processes of their own; called where no device is held."""
    run_dir = yaml.safe_load(config.read_text())["run_dir"]
    whole, stopped = f"{run_dir}/whole", f"{run_dir}/stopped"
    yield right("train: exit status", _train(config, whole, "whole"), 0)
    before = metrics(whole)
    yield right("train: exit status after SIGTERM", _train(config, stopped, "stopped", stop=True), STOPPED)
    reached = max(line["step"] for line in metrics(stopped))
    yield right("train: exit status, started again", _train(config, stopped, "again"), 0)
    yield same(before, metrics(stopped), reached)


def metrics(run_dir: str) -> list[dict[str, Any]]:
    """Reads the metrics of a run; none before its first step."""
    path = disk.path_of(run_dir) / "checkpoints" / "metrics.jsonl"
    if disk.system_path(path) is None:
        with disk.open_log(path) as log:
            lines = list(log)
    else:  # `open_log` would cut the line that the verb is writing
        lines = path.read_bytes().rpartition(b"\n")[0].splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def same(expected: Sequence[dict[str, Any]], got: Sequence[dict[str, Any]], stopped: int) -> Line:
    """Makes the line of a run that was stopped behind a step: every number must be that of the run that was not."""

    def alike(line: dict[str, Any], other: dict[str, Any]) -> bool:
        return all(line.get(x) == other.get(x) for x in line.keys() | other.keys() if not _TIMES.search(x))

    differ = next((line for line, other in zip(expected, got, strict=False) if not alike(line, other)), None)
    text, ok = f"{len(got)} lines, stopped behind step {stopped}", differ is None and len(expected) == len(got)
    text += "" if differ is None else f", another {differ['kind']} at step {differ['step']}"
    return right("train: the run that was stopped", text, f"the same {len(expected)} lines", ok=ok)


def _train(config: pathlib.Path, run_dir: str, log: str, *, stop: bool = False) -> int:
    """Runs the verb to its end, or sends SIGTERM behind its first step; returns its exit status."""
    command = [sys.executable, "-m", "eagle3_jax.train", "--config", str(config), "--run-dir", run_dir]
    with open(config.parent / f"train-{log}.log", "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    until = clock.monotonic() + SECONDS
    while process.poll() is None:
        if stop and metrics(run_dir):
            process.send_signal(signal.SIGTERM)
            stop = False
        if clock.monotonic() > until:
            process.kill()
        clock.sleep(0.02)
    return process.returncode
