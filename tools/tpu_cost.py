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

`--verbs floors` compiles nothing: it counts what a single request's rounds read (`tools/tpu/rounds.py`) and their least
time on as many devices of each kind. Phi is a vanilla step's bytes over the round's.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from tpu.topology import CHIPS, ENVIRONMENT, topology_devices

os.environ.update(ENVIRONMENT)

import jax
import numpy as np
import tpu_fit
from tpu.hlo import Program
from tpu.price import Price, price
from tpu.rounds import counted

from eagle3_jax.config import DraftTree, RunConfig, run_file
from eagle3_jax.decoding.tier import VANILLA, Tier
from eagle3_jax.models.checkpoint.fetch import fetch, read_config
from eagle3_jax.models.target_config import ModelConfig
from eagle3_jax.training.operations import products

COLUMNS = ("program", "mesh", "products", "passes", "collectives", "ms", "floor", "vanilla", "tokens/s", "MFU", "hours")


@dataclasses.dataclass(frozen=True)
class Job:
    """A program of a run.

    Attributes:
        whole, few: with all of the target's layers, and with those that are compiled.
        tokens: of one run of it; None where it is not known, with drafts.
        round: the batch and the tree of a round.
    """

    whole: tpu_fit.Program
    few: tpu_fit.Program
    tokens: int | None
    round: tuple[int, DraftTree | None] | None = None


def main() -> None:
    parser = tpu_fit.run_parser(__doc__)
    parser.add_argument("--topology", required=True, help="v5e:4x4, v6e:2x4, v5p:2x2x2, ...")
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
        config = run_file.load(arguments.config, overrides)
        devices = topology_devices(arguments.topology)
        shape = read_config(fetch(config.target.name, whole=False), config.target.aux_layers)
        planned = [jobs(verb, arguments, config, shape, devices) for verb in arguments.verbs if verb != "floors"]
        every = [job for of_verb in planned for job in of_verb]
    except ValueError as error:
        parser.error(str(error))
    if "floors" in arguments.verbs:
        print(*floors(config, arguments.trees, arguments.context, len(devices)), sep="\n", flush=True)
    chip = CHIPS[arguments.topology.split(":")[0]]
    chips = len(devices) // chip.devices
    layers = max(1.0, shape.num_hidden_layers / arguments.layers)

    def show(name: str, mesh: Any, paid: Price, floor: float, tokens: float | None, share: float | None, **more: Any):
        times = [f"{1e3 * x:.2f}" for x in (paid.products, paid.passes, paid.collectives, paid.total, floor)]
        times[2] += f" ({paid.straight:.0f} + {paid.looped:.0f})"
        cells = [name, "x".join(map(str, mesh.shape.values())), *times, more.get("vanilla", "")]
        if tokens is not None:
            passes = config.train.epochs if name.startswith("train") else 1
            hours = arguments.tokens * passes * paid.total / tokens / 3600
            cells += [f"{tokens / paid.total:,.0f}", "" if share is None else f"{share:.0%}", f"{hours:,.2f}"]
            cells += [f"{hours * chips * arguments.price:,.0f}"] if arguments.price else []
        print(f"| {' | '.join(cells)} |", flush=True)

    if every:
        print(f"{arguments.topology}: {chips} chips, {arguments.tokens / 1e6:g} million tokens; milliseconds")
        print(f"| {' | '.join([*COLUMNS, *['money'] * bool(arguments.price)])} |\n{'|---' * 12}|")
    vanilla, training = 0.0, []
    for job in every:
        mesh, how = job.whole.mesh, {"one_pass": True, "branch": min} if job.round else {}  # a greedy round
        paid = price(compiled(job.few), mesh, chip, layers=layers, **how)
        tokens = job.tokens and job.tokens * len(devices) / mesh.size  # on all other devices too
        if job.round:
            batch, tree = job.round
            floor = counted(config, tree, arguments.context, batch)[1].seconds(chip) / mesh.size
            vanilla = vanilla if tree else paid.total
            name, ratio = f"{Tier(tree, True).name}, batch {batch}", f"{paid.total / vanilla:.2f}"
            show(name, mesh, paid, floor, tokens, None, vanilla=ratio)
            continue
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            floor = products(job.whole.trace().jaxpr.jaxpr) / (chip.teraflops * 1e12) / mesh.size
        show(job.whole.name, mesh, paid, floor, tokens, floor / paid.total)
        training += [(paid, floor, tokens)] * job.whole.name.startswith("train")
    if len(training) > 1:
        prices, every_floor, (tokens, *_) = zip(*training, strict=True)
        paid = Price(*np.sum([dataclasses.astuple(x) for x in prices], axis=0))
        show("train", mesh, paid, sum(every_floor), tokens, sum(every_floor) / paid.total)


def jobs(verb: str, arguments: Any, config: RunConfig, shape: ModelConfig, devices: list[Any]) -> Iterator[Job]:
    few = dataclasses.replace(shape, num_hidden_layers=min(arguments.layers, shape.num_hidden_layers))
    few = dataclasses.replace(few, aux_layers=tuple(range(len(shape.aux_layers))))  # boundaries, wherever they are
    if verb == "rounds":
        for batch, tree in itertools.product(arguments.batches, [None, *arguments.trees]):
            tier = Tier(tree, head=True) if tree else VANILLA
            plans = (
                tpu_fit.decoding(verb, config, x, devices, tier, batch, 1, length=arguments.context)
                for x in (shape, few)
            )
            (_, whole), (_, compiled) = plans  # the first ones are prefills
            yield Job(whole, compiled, None if tree else batch, (batch, tree))
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


def floors(config: RunConfig, trees: Sequence[DraftTree], context: int, devices: int) -> Iterator[str]:
    """Yields the lines of a table: what rounds read, in GB, and the floor of as many devices of each kind."""
    yield f"| draft | drafts read, GB | a round, GB | phi | {' | '.join(f'{name}, ms' for name in CHIPS)} |"
    yield "|---" * (4 + len(CHIPS)) + "|"
    vanilla = 0
    for tree in [None, *trees]:
        drafts, whole = counted(config, tree, context)
        vanilla = vanilla or whole.bytes
        cells = [f"{x.bytes / 1e9:.2f}" for x in (drafts, whole)] + [f"{vanilla / whole.bytes:.2f}"]
        cells += [f"{1e3 * whole.seconds(chip) / devices:.2f}" for chip in CHIPS.values()]
        yield f"| {' | '.join([Tier(tree, True).name, *cells])} |"


def sized(text: str) -> DraftTree:
    """Parses "steps,topk,nodes"."""
    steps, topk, nodes = map(int, text.split(","))
    return DraftTree(num_steps=steps, topk=topk, num_draft_tokens=nodes)


if __name__ == "__main__":
    main()
