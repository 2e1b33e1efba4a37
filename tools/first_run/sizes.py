"""Rounds and training steps at an 8B target's size, with random weights; tools/full_size.py measures both."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import full_size
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from eagle3_jax.config import DraftTree, MeshConfig, run_file
from eagle3_jax.mesh import make_mesh
from eagle3_jax.models.checkpoint.fetch import read_config
from eagle3_jax.models.drafts.eagle3 import DraftHead
from eagle3_jax.models.families import family_of
from eagle3_jax.models.shapes import shapes_of
from eagle3_jax.runs import processes
from first_run.lines import Line, attempt, chip_of, predict, predict_program, skipped, time

ROOT = pathlib.Path(__file__).parents[2]
CONFIG, SHAPE = ROOT / "configs/llama31_8b.yaml", ROOT / "configs/targets/llama31_8b"
TREES = (DraftTree(num_steps=3, num_draft_tokens=4), DraftTree(num_steps=6, topk=8, num_draft_tokens=48))
_COPIES = 4  # weights, gradients and two moments of a head in training
_SMALL_SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "num_hidden_layers": 2,
}
MOST_OF_HBM = 0.8  # for weights, of what a device gives


def rounds(*, small: bool) -> Iterator[Line]:
    """Rounds of a single request on all chips of a host, by tier."""
    devices = jax.local_devices()
    mesh = make_mesh(MeshConfig(data=1, model=len(devices)), devices)
    with processes.among((processes.index(),)):
        yield from attempt("rounds", functools.partial(_rounds, sized(mesh, small=small)))


def sized(mesh: Mesh, *, small: bool) -> full_size.Run:
    """Makes the models of configs/llama31_8b.yaml, or small ones of the same family."""
    values = run_file.to_dict(run_file.load(CONFIG, []))
    shape = read_config(SHAPE, values["target"]["aux_layers"])
    values["benchmark"] |= {"batch_sizes": [1], "trees": [dataclasses.asdict(tree) for tree in TREES]}
    values["train"] |= {"batch_size": mesh.shape["data"]}
    if small:
        shape = dataclasses.replace(shape, **_SMALL_SHAPE, aux_layers=(0, 1, 2))
        trees = [DraftTree(num_steps=3, num_draft_tokens=4), DraftTree(num_steps=2, topk=2, num_draft_tokens=6)]
        values["benchmark"]["trees"] = [dataclasses.asdict(tree) for tree in trees]
        values["target"]["aux_layers"] = shape.aux_layers
        values["draft"]["vocab_size"] = 128
        values["train"] |= {"ttt_steps": 2, "row_length": 64, "loss_block": 64}
    config = run_file.from_dict(json.loads(json.dumps(values)))
    chip = chip_of(mesh.devices.flat[0])
    peak = float("inf") if chip is None else chip.teraflops * 1e12 * mesh.size
    lengths = {"prompt": 16, "answer": 17} if small else {}

    def predicted(lowered: jax.stages.Lowered, rounds: bool) -> float | None:
        return predict_program(lowered, mesh, rounds=rounds)

    return full_size.Run(config, shape, peak, mesh, **lengths, predict=predicted)


def _rounds(run: full_size.Run) -> Iterator[Line]:
    assert run.mesh is not None
    name = f"rounds of {run.shape.num_hidden_layers} layers x {run.shape.hidden_size} on {run.mesh.size} devices"
    family = family_of(run.shape).model
    weights = shapes_of(lambda rngs: family(run.shape, dtype=run.dtype, rngs=rngs))
    if reason := does_not_fit(weights, run.mesh):
        yield skipped(name, reason)
        return
    chip = chip_of(run.mesh.devices.flat[0])
    for row in full_size.decode(run):
        seconds = row["round_ms"] / 1e3
        read = row["gigabytes_per_second"] * 1e9 * seconds
        predicted = row["predicted_seconds"] or predict(chip, read=read, devices=run.mesh.size)
        more = f", {row['tokens_per_second']:.0f} tokens/s at tau {row['tau']:.2f}"
        yield time(f"{name}: {row['part'].removeprefix('decode, ')}", seconds, predicted, more, **row)


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


def steps(*, small: bool) -> Iterator[Line]:
    """Training steps on all chips of all hosts, the batch split over them; a row of tokens each."""
    yield from attempt("training step", functools.partial(_steps, sized(make_mesh(MeshConfig()), small=small)))


def _steps(run: full_size.Run) -> Iterator[Line]:
    assert run.mesh is not None
    config = run.config.train
    name = f"training step, {config.batch_size} x {config.row_length} tokens on {run.mesh.size} devices"
    head = shapes_of(lambda rngs: DraftHead(run.head, dtype=jnp.float32, rngs=rngs))
    if reason := does_not_fit(head, run.mesh, _COPIES):
        yield skipped(name, reason)
        return
    (row,) = full_size.train(run)
    done = config.batch_size * config.row_length
    seconds = done / row["tokens_per_second"]
    chip, operations = chip_of(run.mesh.devices.flat[0]), row["teraflops"] * 1e12 * seconds
    predicted = row["predicted_seconds"] or predict(chip, operations=operations, devices=run.mesh.size)
    used = f", MFU {row['peak_share']:.0%}" if row["peak_share"] else ""
    memory = "" if row["peak_gib"] is None else f", {row['peak_gib']:.1f} GiB at most"
    yield time(name, seconds, predicted, f", {row['tokens_per_second']:,.0f} tokens/s{used}{memory}", **row)
