"""Prices training, extraction and rounds of decoding on TPUs: milliseconds, tokens a second, hours and money.

    .venv/bin/python tools/tpu_cost.py --config configs/llama31_8b.yaml --topology v6e:2x4 --price 2.70 \
      --target.name configs/targets/llama31_8b

Needs no TPU and no weights. Prices the optimised HLO of the programs that `tools/tpu_fit.py` plans (tools/tpu/price.py
says how), compiled with few of the target's layers, `--layers`, each of which then stands for several. Beside a price
stands its floor: operations over the peak, or of a round its bytes over the bandwidth, divided among the devices.

`MFU` is the share of the peak that the traced products use, with those that `remat` computes again. `vanilla` says how
many vanilla rounds a round takes as long as. The collectives' column also counts them: in straight code, and in loops.
`--verbs floors` compiles nothing: it counts what rounds must read, and their least time on as many devices of each
kind. Phi is a vanilla round's bytes over the round's.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

from tpu.topology import CHIPS, ENVIRONMENT

os.environ.update(ENVIRONMENT)
os.environ["EAGLE3_CPU_KERNELS"] = "0"  # products are XLA's operations, which can be read

import jax
import numpy as np
import tpu_fit
from tpu.hlo import Program
from tpu.price import Price, price

from eagle3_jax.config import DraftTree, RunConfig
from eagle3_jax.decoding.device.calls import Models
from eagle3_jax.decoding.measure import profile
from eagle3_jax.decoding.rounds.round import advance
from eagle3_jax.decoding.tier import VANILLA, RoundPlan, Tier
from eagle3_jax.models.target_config import ModelConfig
from eagle3_jax.training.metrics import products

COLUMNS = ("program", "mesh", "products", "passes", "collectives", "ms", "floor", "vanilla", "tokens/s", "MFU", "hours")


class Job(NamedTuple):
    """A program with all of the target's layers, and with those that are compiled; tokens of one run of it, None where
    that is not known, with drafts. A batch of 0 is of no round."""

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
        aux = len(shape.aux_layers)
        few = min(max(arguments.layers, aux), shape.num_hidden_layers)
        shapes = shape, dataclasses.replace(shape, num_hidden_layers=few, aux_layers=tuple(range(1, aux + 1)))
        every = {verb: [*jobs(verb, arguments, config, shapes, devices)] for verb in arguments.verbs}
    except ValueError as error:
        parser.error(str(error))
    floors(every.pop("floors", []), arguments.context)
    chip = CHIPS[arguments.topology.split(":")[0]]
    chips, layers = len(devices) // chip.devices, shape.num_hidden_layers / few

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
    for job in itertools.chain(*every.values()):
        mesh, how = job.whole.mesh, {"one_pass": True, "branch": min} if job.batch else {}  # a greedy round
        paid = price(compiled(job.few), mesh, chip, layers=layers, **how)
        tokens = job.tokens and job.tokens * len(devices) / mesh.size  # on all other devices too
        if job.batch:
            vanilla = vanilla if job.tier.tree else paid.total
            floor = chip.seconds(*needed(job, arguments.context)) / mesh.size
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


def jobs(
    verb: str, arguments: Any, config: RunConfig, shapes: tuple[ModelConfig, ModelConfig], devices: list[Any]
) -> Iterator[Job]:
    """Plans the programs of a verb for the whole target and for one of few layers."""
    if verb in ("rounds", "floors"):
        for batch, tree in itertools.product(arguments.batches, [None, *arguments.trees]):
            tier, length = Tier(tree, head=tree is not None), arguments.context
            plans = (tpu_fit.decoding(verb, config, x, devices, tier, batch, 1, length=length) for x in shapes)
            (_, whole), (_, compiled) = plans  # the first ones are prefills
            yield Job(whole, compiled, None if tree else batch, tier, batch)
        return
    for whole, compiled in zip(*(tpu_fit.VERBS[verb](config, x, devices) for x in shapes), strict=True):
        tokens = config.train.batch_size * config.train.row_length
        yield Job(whole, compiled, whole.arguments["tokens"].size if verb == "extract" else tokens)


def compiled(program: tpu_fit.Program) -> Program:
    """Compiles a program, and reads the compiler's own text: JAX cannot read all that a newer libtpu writes."""
    with tempfile.TemporaryDirectory() as folder, jax.sharding.use_abstract_mesh(program.mesh.abstract_mesh):
        program.trace().lower().compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        (file,) = pathlib.Path(folder).glob("*.after_codegen.txt")
        return Program(file.read_text())


def needed(job: Job, context: int) -> tuple[int, int]:
    """Counts the bytes that a round must read and the operations of its products, of all devices together."""
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), job.whole.arguments)
    target, draft, plan = one["target"], one["draft"], RoundPlan(job.tier, greedy=True)
    traced = jax.make_jaxpr(lambda *x: advance(x[0], x[1], x[2], plan))(target, draft, one["state"])
    read = profile.bytes_read(Models.of(target, draft), job.tier, job.batch, context)
    return read, products(traced.jaxpr)


def floors(rounds: list[Job], context: int) -> None:
    """Prints a table: what rounds must read, in GB, and the floor of as many devices of each kind."""
    if rounds:
        print(f"| round | batch | GB | phi | {' | '.join(f'{name}, ms' for name in CHIPS)} |")
        print("|---" * (4 + len(CHIPS)) + "|")
    vanilla = 0
    for job in rounds:
        read, operations = needed(job, context)
        vanilla = vanilla if job.tier.tree else read
        times = [f"{1e3 * chip.seconds(read, operations) / job.whole.mesh.size:.2f}" for chip in CHIPS.values()]
        cells = [job.tier.name, str(job.batch), f"{read / 1e9:.2f}", f"{vanilla / read:.2f}", *times]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
