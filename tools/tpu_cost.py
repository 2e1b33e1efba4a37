"""Prices training, extraction and rounds of decoding on TPUs: milliseconds, tokens a second, hours and money.

    .venv/bin/python tools/tpu_cost.py --config configs/llama31_8b.yaml --topology v6e:2x4 --price 2.70 \
      --target.name configs/targets/llama31_8b

No TPU and no weights are needed. The compiler makes the optimised HLO of the programs that `tools/tpu_fit.py` plans.
`tools/tpu/price.py` says what each operation and collective of it costs, and on what grounds. Programs are compiled
with few of the target's layers, `--layers`, each of which then stands for several. Beside a price stands its floor:
the products' operations over the peak, or of a round their operands' bytes over the bandwidth, divided among the
devices.

`MFU` is the share of the peak that the traced products use, with those that `remat` computes again. `vanilla` says how
many vanilla rounds a round takes as long as: one with drafts pays off where it accepts more tokens. The collectives'
column also counts them: in straight code, and in loops.

`--verbs floors` compiles nothing: it counts what a single request's rounds read and compute, and their least time on as
many devices of each kind. Phi is a vanilla step's bytes over the round's. Bytes are those of the operands of matrix
products, each read once a product, in the bits that memory holds: weights, and the context in the caches.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

from tpu.topology import CHIPS, ENVIRONMENT

os.environ.update(ENVIRONMENT)
os.environ["EAGLE3_CPU_KERNELS"] = "0"  # products are XLA's operations, which can be read

import jax
import numpy as np
import tpu_fit
from jax.extend.core import Var, jaxprs_in_params
from tpu.hlo import Program
from tpu.price import Price, price

from eagle3_jax.config import DraftTree, MeshConfig, RunConfig
from eagle3_jax.decoding.rounds.round import advance, draft_tree
from eagle3_jax.decoding.tier import VANILLA, RoundPlan, Tier
from eagle3_jax.kernels.linear import quantised
from eagle3_jax.kernels.linear.layouts import bytes_of
from eagle3_jax.models.target_config import ModelConfig
from eagle3_jax.training.operations import products

COLUMNS = ("program", "mesh", "products", "passes", "collectives", "ms", "floor", "vanilla", "tokens/s", "MFU", "hours")


class Job(NamedTuple):
    """A program of a run with all of the target's layers, and with those that are compiled.

    Attributes:
        tokens: of one run of it; None where it is not known, with drafts.
        tier, batch: of a round; a batch of 0 is of no round.
    """

    whole: tpu_fit.Program
    few: tpu_fit.Program
    tokens: int | None
    tier: Tier = VANILLA
    batch: int = 0


def main() -> None:
    parser = tpu_fit.run_parser(__doc__)
    verbs = ("extract", "train", "rounds", "floors")
    parser.add_argument("--verbs", nargs="+", choices=verbs, default=["train", "rounds"], help="train and rounds")
    parser.add_argument("--trees", nargs="*", type=sized, default=[], help="num_steps,topk,num_draft_tokens of each")
    parser.add_argument("--batches", nargs="+", type=int, default=[1], help="sequences of a round: 1")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each sequence: 1024")
    parser.add_argument("--tokens", type=float, default=500e6, help="of the conversations: 500 million")
    parser.add_argument("--price", type=float, help="of a chip for an hour")
    parser.add_argument("--layers", type=int, default=4, help="of the target that are compiled: 4")
    arguments, overrides = parser.parse_known_args()
    try:
        config, shape, devices = tpu_fit.read(arguments, overrides)
        planned = [jobs(verb, arguments, config, shape, devices) for verb in arguments.verbs if verb != "floors"]
        every = [job for of_verb in planned for job in of_verb]
    except ValueError as error:
        parser.error(str(error))
    if "floors" in arguments.verbs:
        once = argparse.Namespace(**vars(arguments) | {"batches": [1]})
        print(*floors(once, config, shape, devices), sep="\n", flush=True)
    chip = CHIPS[arguments.topology.split(":")[0]]
    chips, layers = len(devices) // chip.devices, max(1.0, shape.num_hidden_layers / arguments.layers)

    def show(name: str, mesh: Any, paid: Price, floor: float, tokens: float | None, *, vanilla: float | None = None):
        times = [f"{1e3 * x:.2f}" for x in (paid.products, paid.passes, paid.collectives, paid.total, floor)]
        times[2] += f" ({paid.straight:.0f} + {paid.looped:.0f})"
        ratio, share = ("", f"{floor / paid.total:.0%}") if vanilla is None else (f"{paid.total / vanilla:.2f}", "")
        cells = [name, "x".join(map(str, mesh.shape.values())), *times, ratio]
        if tokens is not None:
            passes = config.train.epochs if name.startswith("train") else 1
            hours = arguments.tokens * passes * paid.total / tokens / 3600
            cells += [f"{tokens / paid.total:,.0f}", share, f"{hours:,.2f}"]
            cells += [f"{hours * chips * arguments.price:,.0f}"] if arguments.price else []
        print(f"| {' | '.join(cells)} |", flush=True)

    if every:
        print(f"{arguments.topology}: {chips} chips, {arguments.tokens / 1e6:g} million tokens; milliseconds")
        print(f"| {' | '.join([*COLUMNS, *['money'] * bool(arguments.price)])} |\n{'|---' * 12}|")
    vanilla, training = 0.0, []
    for job in every:
        mesh, how = job.whole.mesh, {"one_pass": True, "branch": min} if job.batch else {}  # a greedy round
        paid = price(compiled(job.few), mesh, chip, layers=layers, **how)
        tokens = job.tokens and job.tokens * len(devices) / mesh.size  # on all other devices too
        if job.batch:
            floor = chip.seconds(*counted(job.whole, job.tier)[1]) / mesh.size
            vanilla = vanilla if job.tier.tree else paid.total
            show(f"{job.tier.name}, batch {job.batch}", mesh, paid, floor, tokens, vanilla=vanilla)
            continue
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            floor = chip.seconds(0, products(job.whole.trace().jaxpr.jaxpr)) / mesh.size
        show(job.whole.name, mesh, paid, floor, tokens)
        training += [(paid, floor, tokens)] * job.whole.name.startswith("train")
    if len(training) > 1:
        prices, every_floor, (tokens, *_) = zip(*training, strict=True)
        show("train", mesh, Price(*np.sum([dataclasses.astuple(x) for x in prices], axis=0)), sum(every_floor), tokens)


def sized(text: str) -> DraftTree:
    """Parses "steps,topk,nodes"."""
    steps, topk, nodes = map(int, text.split(","))
    return DraftTree(num_steps=steps, topk=topk, num_draft_tokens=nodes)


def jobs(verb: str, arguments: Any, config: RunConfig, shape: ModelConfig, devices: list[Any]) -> Iterator[Job]:
    few = dataclasses.replace(shape, num_hidden_layers=min(arguments.layers, shape.num_hidden_layers))
    few = dataclasses.replace(few, aux_layers=tuple(range(len(shape.aux_layers))))  # boundaries, wherever they are
    if verb == "rounds":
        for batch, tree in itertools.product(arguments.batches, [None, *arguments.trees]):
            tier, length = Tier(tree, head=tree is not None), arguments.context
            plans = (tpu_fit.decoding(verb, config, x, devices, tier, batch, 1, length=length) for x in (shape, few))
            (_, whole), (_, compiled) = plans  # the first ones are prefills
            yield Job(whole, compiled, None if tree else batch, tier, batch)
        return
    for whole, compiled in zip(*(tpu_fit.VERBS[verb](config, x, devices) for x in (shape, few)), strict=True):
        tokens = config.train.batch_size * config.train.row_length
        yield Job(whole, compiled, whole.arguments["tokens"].size if verb == "extract" else tokens)


def compiled(program: tpu_fit.Program) -> Program:
    """Compiles a program, and reads the compiler's own text: JAX cannot read all that a newer libtpu writes."""
    with tempfile.TemporaryDirectory() as folder, jax.sharding.use_abstract_mesh(program.mesh.abstract_mesh):
        program.trace().lower().compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        (file,) = pathlib.Path(folder).glob("*.after_codegen.txt")
        return Program(file.read_text())


# --------------------------------------------------------------------------------------------------------------- floors
class Work(NamedTuple):
    """Bytes of the operands of matrix products, and their operations; a multiply-add is two."""

    bytes: int = 0
    operations: int = 0


def work(jaxpr: Any) -> Work:
    """Sums the products of a program without loops around them; a conditional counts by its largest branch.

    An operand that is converted first counts as it lies in memory: the product converts it on its way.
    """
    found: list[Work] = []
    held: dict[Any, Any] = {}  # a converted variable -> the one that memory holds
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        operands: list[Any] = [x for x in equation.invars if isinstance(x, Var)]
        if name == "convert_element_type" and operands:
            held[equation.outvars[0]] = held.get(operands[0], operands[0])
        if name in ("dot_general", "pallas_call"):
            if name == "dot_general":
                (contracted, _), _ = equation.params["dimension_numbers"]
                inner = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            else:  # a grouped product, see `counted`
                inner = next(x.aval for x in operands if x.aval.ndim == 3).shape[1]
            read = sum(bytes_of((held.get(x, x) if name == "dot_general" else x).aval) for x in operands)
            found.append(Work(read, 2 * inner * equation.outvars[0].aval.size))
        else:
            parts = [work(part) for part in jaxprs_in_params(equation.params)]
            found += [max(parts, default=Work())] if name == "cond" else parts
    return Work(sum(x.bytes for x in found), sum(x.operations for x in found))


def counted(program: tpu_fit.Program, tier: Tier) -> tuple[Work, Work]:
    """Counts the draft's passes before a verification, and the whole round, of a planned program, on one device."""
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), program.arguments)
    target, draft, state = one["target"], one["draft"], one["state"]
    plan = RoundPlan(tier, greedy=True)
    # A TPU multiplies groups by a Pallas kernel; XLA's operations for them read more.
    with mock.patch.object(quantised, "choose", lambda _, *, pallas: "pallas" if pallas else "xla"):
        drafting = jax.make_jaxpr(lambda *x: draft_tree(x[0], x[1], x[2], plan)[1].draft_cache)(target, draft, state)
        whole = jax.make_jaxpr(lambda *x: advance(x[0], x[1], x[2], plan))(target, draft, state)
    return work(drafting.jaxpr), work(whole.jaxpr)


def floors(arguments: Any, config: RunConfig, shape: ModelConfig, devices: list[Any]) -> Iterator[str]:
    """Yields the lines of a table: what rounds read, in GB, and the floor of as many devices of each kind."""
    yield f"| draft | drafts read, GB | a round, GB | phi | {' | '.join(f'{name}, ms' for name in CHIPS)} |"
    yield "|---" * (4 + len(CHIPS)) + "|"
    vanilla, alone = 0, dataclasses.replace(config, mesh=MeshConfig())
    for job in jobs("rounds", arguments, alone, shape, devices[:1]):
        drafts, every = counted(job.whole, tier := job.tier)
        vanilla = vanilla or every.bytes
        cells = [f"{x.bytes / 1e9:.2f}" for x in (drafts, every)] + [f"{vanilla / every.bytes:.2f}"]
        cells += [f"{1e3 * chip.seconds(*every) / len(devices):.2f}" for chip in CHIPS.values()]
        yield f"| {' | '.join([tier.name, *cells])} |"


if __name__ == "__main__":
    main()
