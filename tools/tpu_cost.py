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
import hashlib
import math
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from tpu.topology import CHIPS, ENVIRONMENT, topology_devices

os.environ.update(ENVIRONMENT)

import jax
import tpu_fit
from tpu.hlo import Program, optimised_alone
from tpu.price import Price, price
from tpu.rounds import counted, sized

from eagle3_jax.config import DraftTree, RunConfig, run_file
from eagle3_jax.decoding.choice import tiers
from eagle3_jax.decoding.tier import Tier
from eagle3_jax.models.checkpoint.fetch import fetch, read_config
from eagle3_jax.models.target_config import ModelConfig
from eagle3_jax.training.operations import products

VERBS = ("extract", "train", "rounds", "floors")
_COLUMNS = (
    "program",
    "mesh",
    "products",
    "passes",
    "collectives",
    "ms",
    "floor",
    "vanilla",
    "tokens/s",
    "MFU",
    "hours",
    "money",
)


@dataclasses.dataclass(frozen=True)
class Job:
    """A program of a run.

    Attributes:
        name: `tools/tpu_fit.py`'s.
        layers: of the target, as it is compiled.
        tree: of a round; None is vanilla decoding. batch, context: its sequences, and the tokens of each.
    """

    config: RunConfig
    topology: str
    name: str
    layers: int
    tree: DraftTree | None = None
    batch: int = 1
    context: int = 0

    def shape(self) -> ModelConfig:
        return read_config(fetch(self.config.target.name, whole=False), self.config.target.aux_layers)

    def program(self, layers: int | None = None) -> tpu_fit.Program:
        """Plans the program, with so many layers or all of them."""
        shape = self.shape()
        if layers is not None and layers < shape.num_hidden_layers:
            first = tuple(range(len(shape.aux_layers)))  # boundaries, wherever they are
            shape = dataclasses.replace(shape, num_hidden_layers=layers, aux_layers=first)
        devices = topology_devices(self.topology)
        (found,) = (program for program in self._programs(shape, devices) if program.name == self.name)
        return found

    def _programs(self, shape: ModelConfig, devices: list[Any]) -> Iterator[tpu_fit.Program]:
        verb = self.name.partition(":")[0]
        if verb != "rounds":
            return tpu_fit.VERBS[verb](self.config, shape, devices)
        tier = Tier(self.tree, head=True) if self.tree else tiers.VANILLA
        return tpu_fit.decoding(verb, self.config, shape, devices, tier, self.batch, 1, length=self.context)

    def lowered(self) -> jax.stages.Lowered:
        program = self.program(self.layers)
        with jax.sharding.use_abstract_mesh(program.mesh.abstract_mesh):
            return program.trace().lower()

    def text(self, folder: pathlib.Path | None) -> str:
        """Returns its optimised HLO; with a folder, the one that lies there."""
        file = folder and folder / f"{hashlib.sha256(repr(self).encode()).hexdigest()[:16]}.hlo"
        if file and file.exists():
            return file.read_text()
        text = optimised_alone(self.lowered)
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return text


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table: what a program costs, and its floor.

    Attributes:
        floor: seconds. tokens: of a run of it, on the whole slice; None where it is not known, with drafts.
        share: of the peak, where products bound it. vanilla: how many vanilla rounds it takes as long as.
    """

    name: str
    mesh: str
    price: Price
    floor: float
    tokens: float | None
    share: float | None = None
    vanilla: float | None = None

    def line(self, tokens: float, chips: int, money: float | None) -> str:
        paid = self.price
        cells = [self.name, self.mesh, *(f"{1e3 * x:.2f}" for x in (paid.products, paid.passes, paid.collectives))]
        cells[-1] += f" ({paid.straight:.0f} + {paid.looped:.0f})"
        cells += [f"{1e3 * paid.total:.2f}", f"{1e3 * self.floor:.2f}"]
        cells += ["" if self.vanilla is None else f"{self.vanilla:.2f}"]
        if self.tokens is None:
            return f"| {' | '.join([*cells, '', '', '', ''])} |"
        rate = self.tokens / paid.total
        hours = tokens / rate / 3600
        cells += [f"{rate:,.0f}", "" if self.share is None else f"{self.share:.0%}", f"{hours:,.2f}"]
        return f"| {' | '.join([*cells, '' if money is None else f'{hours * chips * money:,.0f}'])} |"


def main() -> None:
    parser = tpu_fit.run_parser(__doc__)
    parser.add_argument("--topology", required=True, help="v5e:4x4, v6e:2x4, v5p:2x2x2, ...")
    parser.add_argument("--verbs", nargs="+", choices=VERBS, default=["train", "rounds"], help="train and rounds")
    parser.add_argument("--trees", nargs="*", type=sized, default=[], help="num_steps,topk,num_draft_tokens of each")
    parser.add_argument("--batches", nargs="+", type=int, default=[1], help="sequences of a round: 1")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each sequence: 1024")
    parser.add_argument("--tokens", type=float, default=500e6, help="of the conversations: 500 million")
    parser.add_argument("--price", type=float, help="of a chip for an hour")
    parser.add_argument("--layers", type=int, default=4, help="of the target that are compiled: 4")
    parser.add_argument("--hlo", type=pathlib.Path, help="folder for the HLO texts; those there are not made again")
    arguments, overrides = parser.parse_known_args()
    try:
        for name in ("tokens", "layers", "context"):
            if getattr(arguments, name) <= 0:
                raise ValueError(f"--{name}: got {getattr(arguments, name)}, expected more than 0")
        config = run_file.load(arguments.config, overrides)
        devices = topology_devices(arguments.topology)
        jobs = list(_jobs(arguments, config))
        for job in jobs[:1]:
            job.program(arguments.layers)  # is refused, if any
    except ValueError as error:
        parser.error(str(error))
    if "floors" in arguments.verbs:
        for line in floors(config, arguments.trees, arguments.context, len(devices)):
            print(line, flush=True)
    if not jobs:
        return
    chips = len(devices) // CHIPS[arguments.topology.split(":")[0]].devices
    print(f"{arguments.topology}: {chips} chips, {arguments.tokens / 1e6:g} million tokens; milliseconds")
    print(f"| {' | '.join(_COLUMNS)} |\n{'|---' * len(_COLUMNS)}|")
    rows: list[Row] = []
    vanilla = 0.0
    for job in jobs:
        row = measured(job, len(devices), arguments.hlo)
        if job.name.startswith("rounds"):
            vanilla = vanilla if job.tree else row.price.total
            row = dataclasses.replace(row, vanilla=row.price.total / vanilla)
        rows.append(row)
        passes = config.train.epochs if job.name.startswith("train") else 1
        print(rows[-1].line(arguments.tokens * passes, chips, arguments.price), flush=True)
    if len(training := [row for row in rows if row.name.startswith("train")]) > 1:
        whole = sum((row.price for row in training), Price())
        floor = sum(row.floor for row in training)
        row = Row("train", training[0].mesh, whole, floor, training[0].tokens, floor / whole.total)
        print(row.line(arguments.tokens * config.train.epochs, chips, arguments.price))


def _jobs(arguments: Any, config: RunConfig) -> Iterator[Job]:
    job = Job(config, arguments.topology, "", arguments.layers)
    if "extract" in arguments.verbs:
        yield dataclasses.replace(job, name="extract")
    if "train" in arguments.verbs:
        for name in ("states",) * (config.train.features == "online") + ("step",):
            yield dataclasses.replace(job, name=f"train: {name}")
    if "rounds" in arguments.verbs:
        for batch in arguments.batches:
            for tree in [None, *arguments.trees]:
                yield dataclasses.replace(job, name="rounds: rounds", tree=tree, batch=batch, context=arguments.context)


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


def measured(job: Job, devices: int, folder: pathlib.Path | None) -> Row:
    """Compiles and prices a program.

    Args:
        devices: of the slice; a program on fewer of them runs on all others too.
    """
    chip, config = CHIPS[job.topology.split(":")[0]], job.config
    whole, program = job.program(), Program(job.text(folder))
    every = job.shape().num_hidden_layers
    a_round = job.name.startswith("rounds")
    how: dict[str, Any] = {"one_pass": True, "branch": min} if a_round else {}
    found = price(program, whole.mesh, chip, layers=every / min(job.layers, every), **how)
    used = whole.mesh.size
    if a_round:  # a greedy one: its conditionals' shorter branches
        floor = counted(config, job.tree, job.context, job.batch)[1].seconds(chip) / used
        tokens, share = None if job.tree else job.batch * devices / used, None
        name = f"{Tier(job.tree, True).name}, batch {job.batch}"
    else:
        with jax.sharding.use_abstract_mesh(whole.mesh.abstract_mesh):
            floor = products(whole.trace().jaxpr.jaxpr) / (chip.teraflops * 1e12) / used
        train = config.train
        rows = whole.arguments["tokens"].shape if job.name == "extract" else (train.batch_size, train.row_length)
        tokens, share, name = math.prod(rows) * devices / used, floor / found.total, job.name
    mesh = "x".join(map(str, whole.mesh.shape.values()))
    return Row(name, mesh, found, floor, tokens, share)


if __name__ == "__main__":
    main()
