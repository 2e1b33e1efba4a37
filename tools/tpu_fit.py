"""Checks whether a run fits a TPU: compiles its programs ahead of time and reports their memory on a device.

    .venv/bin/python tools/tpu_fit.py --config configs/llama31_8b.yaml --topology v6e:2x2 --mesh.model 4

Needs no TPU and no weights, only the target's config.json; without a hub, `--target.name` takes a folder with it, such
as configs/targets/llama31_8b. `evaluate.draft` names the draft: null is a head of the config's own shape, "mtp" the
target's layer, and a folder a head by its config.json. Exit status 1: something does not fit; 2: a wrong argument.
Memory is the compiler's plan of one program (arguments, results outside donated arguments, temporaries, code), and the
run's other arrays on the devices ("beside"). Not counted: fragmentation, and a second program's code.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from tpu.topology import ENVIRONMENT, topology_devices

os.environ.update(ENVIRONMENT)

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from eagle3_jax.config import AdaptConfig, RunConfig, run_file
from eagle3_jax.decoding.adapt import learner
from eagle3_jax.decoding.adapt.vocabulary import make_move
from eagle3_jax.decoding.choice import tiers
from eagle3_jax.decoding.device import programs
from eagle3_jax.decoding.device.calls import Models, PromptChunk
from eagle3_jax.decoding.device.memory import empty_state
from eagle3_jax.decoding.device.shapes import Sizes
from eagle3_jax.decoding.engine import PAGE_SIZE
from eagle3_jax.decoding.rounds.observed import Observed
from eagle3_jax.decoding.rounds.state import STATE_SHARDING_RULES
from eagle3_jax.decoding.tier import RoundPlan, Tier
from eagle3_jax.extract import hidden_states
from eagle3_jax.formats import mtp
from eagle3_jax.formats.eagle2 import heads as eagle2
from eagle3_jax.formats.packaged import LOOKUP
from eagle3_jax.kernels.linear.layouts import bytes_of
from eagle3_jax.mesh import batch_sharding, make_mesh, replicas, replicated, shardings
from eagle3_jax.models import states
from eagle3_jax.models.checkpoint.fetch import fetch, read_config
from eagle3_jax.models.drafts.eagle2 import Eagle2Head
from eagle3_jax.models.drafts.head import Draft, Head
from eagle3_jax.models.families import family_of
from eagle3_jax.models.inference_layout import tpu_formats, weights_beside
from eagle3_jax.models.layers import SHARDING_RULES
from eagle3_jax.models.quantisation import quantised_model
from eagle3_jax.models.shapes import shapes_of
from eagle3_jax.models.target import TargetModel
from eagle3_jax.models.target_config import ModelConfig
from eagle3_jax.runs import disk
from eagle3_jax.sequence import Split
from eagle3_jax.train.__main__ import IN_FLIGHT
from eagle3_jax.training.batch import TEACHER_SHARDING_RULES, Batch, Teacher
from eagle3_jax.training.fsdp import TRAINED_SHARDING_RULES
from eagle3_jax.training.kinds.kind import kind_of
from eagle3_jax.training.state import TrainState, init_state, make_optimizer, make_train_step

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Program:
    """One program of a run: its arguments, and what lies beside it on the devices, as shapes with shardings by name."""

    name: str
    mesh: Mesh
    arguments: dict[str, Any]
    beside: dict[str, Any]
    trace: Callable[[], jax.stages.Traced]


def run_parser(documentation: str | None) -> argparse.ArgumentParser:
    """Makes the parser of a tool with this docstring, for a config and a topology; what is unknown overrides fields."""
    parser = argparse.ArgumentParser(
        description=(documentation or "").splitlines()[0],
        epilog="Every field of the config can be overridden: --section.field VALUE",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="YAML run file, see configs/")
    parser.add_argument("--topology", required=True, help="v5e:2x2, v6e:4x4, v5p:2x2x1, tpu7x:2x2x1, ...")
    return parser


def read(arguments: argparse.Namespace, overrides: list[str]) -> tuple[RunConfig, ModelConfig, list[Any]]:
    """Reads the config, its target's shape, and the devices of the topology. Raises ValueError."""
    config = run_file.load(arguments.config, overrides)
    target = read_config(fetch(config.target.name, whole=False), config.target.aux_layers)
    return config, target, topology_devices(arguments.topology)


def main() -> None:
    parser = run_parser(__doc__)
    parser.add_argument("--verbs", default=",".join(USUAL), help="some of " + ",".join(VERBS))
    parser.add_argument("--json", type=pathlib.Path, help="file for the rows")
    arguments, overrides = parser.parse_known_args()
    try:
        config, target, devices = read(arguments, overrides)
        verbs = arguments.verbs.split(",")
        if unknown := set(verbs) - VERBS.keys():
            raise ValueError(f"--verbs: got {', '.join(sorted(unknown))}, expected some of {', '.join(VERBS)}")
        programs = [program for verb in verbs for program in VERBS[verb](config, target, devices)]
    except ValueError as error:
        parser.error(str(error))
    limit, rows = hbm(devices), []
    print(f"{arguments.topology}: {len(devices)} devices, {limit / GIB:.2f} GiB of HBM each; GiB a device")
    columns = ("arguments", "temporary", "beside", "total", "of HBM", "compile")
    print(f"{'':20}{'mesh':>5}" + "".join(f"{name:>11}" for name in columns))
    for program in programs:
        start, row = time.monotonic(), {"topology": arguments.topology, "program": program.name}
        try:
            row |= figures(program, limit)
        # A kernel checks VMEM and SMEM beforehand, or the compiler fails.
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            row |= {"fits": False, "refused": str(error)}
        rows.append(row | {"mesh": dict(program.mesh.shape), "seconds": time.monotonic() - start})
        print(describe(rows[-1]), flush=True)
    if arguments.json:
        disk.write_json(arguments.json, rows)
    sys.exit(any(not row["fits"] for row in rows))


# ------------------------------------------------------------------------------------------------------------- programs
def evaluate(config: RunConfig, target: ModelConfig, devices: list[Any]) -> Iterator[Program]:
    """Sizes `evaluate`: rounds with the draft, beside the state of the vanilla engine that it compares with."""
    settings, largest = config.evaluate, tiers.WITH_HEAD[-1].tree
    tier = Tier(largest if settings.tree == "auto" else settings.tree, head=True)
    tier, sizes = tiers.LOOKUP if settings.draft == LOOKUP else tier, (settings.batch_size, settings.max_tokens)
    return decoding("evaluate", config, target, devices, tier, *sizes, beside=tiers.VANILLA)


def regenerate(config: RunConfig, target: ModelConfig, devices: list[Any]) -> Iterator[Program]:
    """Sizes `regenerate`: vanilla decoding."""
    settings = config.regenerate
    return decoding("regenerate", config, target, devices, tiers.VANILLA, settings.batch_size, settings.max_tokens)


def decoding(
    verb: str,
    config: RunConfig,
    shape: ModelConfig,
    devices: list[Any],
    tier: Tier,
    batch: int,
    max_tokens: int,
    *,
    length: int | None = None,
    learned: int = 0,
    beside: Tier | None = None,
) -> Iterator[Program]:
    """Plans the engine's two programs: prefill of the longest chunk of a prompt, and rounds of a full batch.

    `length`: most tokens of a prompt and its answer, None is `regenerate`'s. `learned`: newest tokens of a request that
    a live head learns from. `beside`: tier of another engine, whose state is on the devices too.
    """
    mesh = replicas(make_mesh(config.mesh, devices))[0].rows[0]
    head, draft = drafting_head(config, shape) if tier.head else None, None
    if head is not None:
        shape = dataclasses.replace(shape, aux_layers=head.config.aux_layers)  # as in the engine
    target = by_rows(abstract_target(config, shape, mesh))
    if head is not None:
        head = quantised_model(head, config.serve.draft_weights or weights_beside(target), vocabulary=True)
        draft = Draft(by_rows(placed(head, mesh, SHARDING_RULES)), placed(ids_of(head.config), mesh))
    length = length or config.regenerate.max_length
    if length <= max_tokens:
        raise ValueError(f"{verb}.max_tokens: got {max_tokens}, expected less than regenerate.max_length")

    def empty(models: Models, tier: Tier) -> tuple[Sizes, Any]:
        kept = batch if shape.recurrent else None
        sizes = Sizes.plan(batch, length, PAGE_SIZE, [tier], learned=learned, kept_states=kept)
        make = functools.partial(empty_state, sizes=sizes, tiers=[tier], kv_dtype=None)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return sizes, placed(jax.eval_shape(make, models), mesh, STATE_SHARDING_RULES)

    models = Models.of(target, draft)
    sizes, state = empty(models, tier)
    also = {} if beside is None else {f"{beside.name} state": empty(Models.of(target, None), beside)[1]}
    longest = max(length for _, length in sizes.prefill_shapes)
    chunk = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, PromptChunk.of((), 1, longest, sizes)))
    asked = jax.eval_shape(lambda: (jnp.int32(1), jnp.zeros(batch, bool), jnp.bool_(True)))
    one, cancelled, greedy = placed(asked, mesh)
    parts, plan = {"target": target, "draft": draft, "state": state}, RoundPlan(tier, greedy)
    prefill = functools.partial(programs.prefill.trace, models, state, placed(chunk, mesh))
    yield Program(f"{verb}: prefill", mesh, parts, also, prefill)
    rounds = functools.partial(programs.decode.trace, models, state, cancelled, None, one, one, plan)
    yield Program(f"{verb}: rounds", mesh, parts, also, rounds)


def drafting_head(config: RunConfig, shape: ModelConfig) -> Head:
    """Makes the shapes of the head that `evaluate.draft` names. Raises ValueError: it names none that is known."""
    named, dtype = config.evaluate.draft, jnp.dtype(config.target.dtype)
    if named is None:
        kind = kind_of(config, shape)
        rows = jax.ShapeDtypeStruct((shape.vocab_size, shape.hidden_size), dtype)
        trained = jax.eval_shape(
            lambda rows, ids: kind.draft(kind.build(nnx.Rngs(0)), rows, ids).head, rows, ids_of(kind.shape)
        )
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), trained)
    if named == mtp.MTP.name:
        return mtp.abstract(shape, dtype, "evaluate.draft")
    file = pathlib.Path(named) / "config.json"
    if not file.exists() or not eagle2.may_be_eagle2(json.loads(file.read_text())):
        expected = "none for a head of this config, 'mtp', 'lookup', or a folder with the config.json of"
        raise ValueError(f"evaluate.draft: got {named!r}, expected {expected} an EAGLE-2 head")
    published = eagle2.read_shape(file.parent, shape)
    return shapes_of(lambda rngs: Eagle2Head(published, dtype=dtype, rngs=rngs))


def extract(config: RunConfig, shape: ModelConfig, devices: list[Any]) -> Iterator[Program]:
    """Sizes `extract`: the forward pass of the longest conversations, while the previous batch is being fetched."""
    mesh, settings = replicas(make_mesh(config.mesh, devices))[0].mesh, config.extract
    target, longest = by_rows(abstract_target(config, shape, mesh)), [settings.max_length]
    batch = hidden_states.plan_batches(longest, longest, settings.batch_tokens, multiple=mesh.shape["data"])[0]
    tokens = jax.ShapeDtypeStruct((batch.rows, batch.length), jnp.int32, sharding=batch_sharding(mesh))
    before = placed(jax.eval_shape(states.target_states, target, tokens), mesh, states.STATES_SHARDING_RULES)
    trace = functools.partial(states.target_states.trace, target, tokens)
    yield Program("extract", mesh, {"target": target, "tokens": tokens}, {"batch before": before}, trace)


def train(config: RunConfig, shape: ModelConfig, devices: list[Any]) -> Iterator[Program]:
    """Sizes `train`: the training step; online the target's forward pass too, each beside the other's arrays."""
    run = config.train
    mesh = make_mesh(run.mesh or config.mesh, devices)
    target = abstract_target(config, shape, mesh)
    parts, batch, trace, _ = training_step(config, shape, mesh, target)
    beside: dict[str, Any] = {"batches on their way": [batch] * IN_FLIGHT}
    if run.features == "online":
        inputs = {"target": by_rows(target), "token ids": batch.token_ids, "segment ids": batch.segment_ids}
        states_of = functools.partial(states.target_states.trace, *inputs.values(), split=batch.split)
        yield Program("train: states", mesh, inputs, parts | beside, states_of)
        beside["target"] = inputs["target"]
    yield Program("train: step", mesh, parts | {"batch": batch}, beside, trace)


def adapt(config: RunConfig, shape: ModelConfig, devices: list[Any]) -> Iterator[Program]:
    """Sizes a server whose head learns: its programs, a step, and the ways to another vocabulary and to the engine."""
    settings = config.serve
    learns = settings.adapt or AdaptConfig()
    config = dataclasses.replace(config, train=learner.training(learns))
    tier, sizes = Tier(tiers.WITH_HEAD[-1].tree, head=True), (settings.batch_size, 1)
    more = {"length": settings.max_length, "learned": learns.row_length}
    serving = [*decoding("adapt", config, shape, devices, tier, *sizes, **more)]
    mesh, served = serving[-1].mesh, serving[-1].arguments
    target = abstract_target(config, shape, mesh)
    (training, batch, step, state), kind = training_step(config, shape, mesh, target), kind_of(config, shape)
    teacher, head = training.pop("teacher"), served["draft"].head
    # The held-back requests' too; a row of each is room to copy into.
    c, tokens = state.head.config, learns.ring_tokens + 2 * learns.row_length
    widths = c.num_aux_layers * c.target_hidden_size, shape.hidden_size
    every = served | training | {"copy of the head that drafts": [state.head, state.opt_state]}
    every["ring"] = placed(jax.eval_shape(lambda: Observed.empty(1, tokens, *widths)), mesh)
    if hasattr(target, "lm_head"):  # else the embeddings are the rows of new tokens
        every["copy of the LM head"] = target.lm_head
    ids, rows = placed(ids_of(kind.shape), mesh), teacher.rows

    @functools.partial(jax.jit, out_shardings=jax.tree.map(lambda x: x.sharding, head))
    def swap(trained: Any, rows: Any, token_ids: Any) -> Any:
        made = kind.draft(trained, rows, token_ids).head
        return jax.tree.map(lambda x, like: x.astype(like.dtype), made, head)

    planned = [(program.name, served, program.trace) for program in serving]
    planned.append(("adapt: step", training | {"teacher": teacher, "batch": batch}, step))
    if kind.shape.draft_vocab_size < shape.vocab_size:
        move = functools.partial(make_move(state.head.vocabulary_rows, mesh).trace, state, ids, rows, rows)
        planned.append(("adapt: vocabulary", training | {"rows of the old and the new vocabulary": [rows] * 2}, move))
    swapped = {"weights": state.head, "rows of the LM head": rows}
    planned.append(("adapt: swap", swapped, functools.partial(swap.trace, state.head, rows, ids)))
    for name, given, trace in planned:
        yield Program(name, mesh, given, {x: y for x, y in every.items() if x not in given}, trace)


def training_step(
    config: RunConfig, shape: ModelConfig, mesh: Mesh, target: TargetModel
) -> tuple[dict[str, Any], Batch, Callable[[], jax.stages.Traced], TrainState]:
    """Plans a training step. Returns its arguments by name but for the batch, that, its trace, and its state."""
    run, kind, split = config.train, kind_of(config, shape), Split.of(mesh, config.train.sequence)
    optimizer, new_head = make_optimizer(run, 1), functools.partial(kind.new, config.seed)
    drawn = jax.eval_shape(lambda x, ids: Teacher.of(x.embed[...], x.output_rows, ids), target, ids_of(kind.shape))
    teacher = placed(drawn, mesh, TEACHER_SHARDING_RULES)
    state = jax.eval_shape(lambda rows: init_state(new_head, rows, optimizer, mesh), teacher.rows)
    state = placed(state, mesh, TRAINED_SHARDING_RULES)

    def rows(*width: int) -> jax.ShapeDtypeStruct:
        size = run.batch_size * split.pieces, run.row_length // split.pieces, *width
        return jax.ShapeDtypeStruct(size, jnp.bfloat16 if width else jnp.int32, sharding=batch_sharding(mesh))

    hidden = shape.hidden_size
    batch = Batch(rows(), rows(len(shape.aux_layers) * hidden), rows(hidden), *[rows()] * 4, split=split)
    parts = {"weights": state.head, "optimizer": state.opt_state, "teacher": teacher}
    return parts, batch, functools.partial(make_train_step(kind, optimizer, mesh).trace, state, teacher, batch), state


VERBS = {"evaluate": evaluate, "regenerate": regenerate, "extract": extract, "train": train, "adapt": adapt}
# What a run needs; `adapt` is of a server.
USUAL = ("evaluate", "regenerate", "extract", "train")


def ids_of(head: Any) -> jax.ShapeDtypeStruct:
    """The draft vocabulary's tokens, of a head's config."""
    return jax.ShapeDtypeStruct((head.draft_vocab_size,), jnp.int32)


def abstract_target(config: RunConfig, shape: ModelConfig, mesh: Mesh) -> TargetModel:
    """Makes a target's shapes in the bits that the config names. Raises ValueError: those of its file."""
    dtype, model, weights = jnp.dtype(config.target.dtype), family_of(shape).model, config.target.weights
    if weights == "stored":
        raise ValueError("target.weights: got 'stored', expected 'int8', 'fp8' or 'int4': only shapes are known here")
    floats = placed(shapes_of(lambda rngs: model(shape, dtype=dtype, rngs=rngs)), mesh, SHARDING_RULES)
    return placed(quantised_model(floats, weights, vocabulary=config.target.quantise_vocabulary), mesh, SHARDING_RULES)


def placed(tree: Any, mesh: Mesh, rules: Any = ()) -> Any:
    """Gives shapes the shardings of the rules."""
    return by_rows(tree, shardings(tree, mesh, rules))


def by_rows(tree: Any, places: Any = None) -> Any:
    """Gives shapes these places; without any, the layouts that `models.inference_layout` uses for inference."""
    places = tpu_formats(tree) if places is None else places
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, places)


# -------------------------------------------------------------------------------------------------------------- figures
def figures(program: Program, limit: float) -> dict[str, Any]:
    """Compiles a program, unless its arguments alone are too large. Returns the compiler's plan, in bytes a device, and
    its "total" with what lies beside it; of a refused program what it needs."""
    arguments, beside = share(program.arguments), share(program.beside)
    plan: dict[str, Any] = {"arguments": arguments, "total": arguments}
    if arguments <= limit:
        with jax.sharding.use_abstract_mesh(program.mesh.abstract_mesh):
            lowered = program.trace().lower()
        try:
            memory: Any = lowered.compile().memory_analysis()
        except jax.errors.JaxRuntimeError as error:
            plan["total"] = needed_and_available(error)[0]
        else:
            plan = {
                "arguments": memory.argument_size_in_bytes,
                "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
                "temporaries": memory.temp_size_in_bytes,
                "code": memory.generated_code_size_in_bytes,
            }
            plan["total"] = sum(plan.values())
    total, parts = plan["total"] + beside, program.arguments | program.beside
    row = plan | {"beside": beside, "total": total, "hbm": limit, "fits": total <= limit}
    return row | {"parts": {name: share(tree) for name, tree in parts.items()}}


def hbm(devices: list[Any]) -> float:
    """Returns the bytes of a device's memory available to a program, from the compiler's refusal of a huge one."""
    where = replicated(Mesh(np.array(devices[:1]), "x"))
    # Each array alone fits: of one that does not, libtpu 0.0.41 says the memory with its reserve.
    huge = [jax.ShapeDtypeStruct((1 << 15, 1 << 15), jnp.float32, sharding=where)] * 64
    try:
        jax.jit(lambda arrays: [x + 1 for x in arrays]).lower(huge).compile()
    except jax.errors.JaxRuntimeError as error:
        return needed_and_available(error)[1]
    raise AssertionError("the compiler took a program of 512 GiB")


def needed_and_available(error: Exception) -> tuple[float, float]:
    """Parses needed and available bytes of HBM from the compiler's refusal; re-raises any other error."""
    between = r"\) exceeds available HBM \(| of (?=\S+ hbm)|\) would exceed memory \(size="
    if (found := re.search(rf"([\d.]+)([KMGT]?)(?:{between})([\d.]+)([KMGT]?)", str(error))) is None:
        raise error
    sizes = [float(found[n]) * 2 ** (10 * " KMGT".index(found[n + 1] or " ")) for n in (1, 3)]
    return sizes[0], sizes[1]


def share(tree: Any) -> int:
    """Counts a tree's bytes on one device."""
    parts = [jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype) for x in jax.tree.leaves(tree)]
    return sum(map(bytes_of, parts))


def describe(row: dict[str, Any]) -> str:
    """Formats a line of the table, and a line of its arguments' parts."""
    begin = f"{row['program']:20}{'x'.join(str(size) for size in row['mesh'].values()):>5}"
    if "refused" in row:
        return f"{begin}\n    refused: {row['refused']}"
    temporary, surplus = row["total"] - row["arguments"] - row["beside"], row["total"] - row["hbm"]
    sizes = "".join(f"{size / GIB:11.2f}" for size in (row["arguments"], temporary, row["beside"], row["total"]))
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in row["parts"].items())
    text = f"{begin}{sizes}{row['total'] / row['hbm']:11.0%}{row['seconds']:9.0f} s\n    {parts}"
    return text if row["fits"] else f"{text}\n    does not fit: {surplus / GIB:.2f} GiB too much"


if __name__ == "__main__":
    main()
