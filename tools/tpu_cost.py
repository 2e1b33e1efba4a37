"""Estimates the TPU hours and costs of answers, extraction and training, from the programs' bytes and operations.

    .venv/bin/python tools/tpu_cost.py --config configs/llama31_8b.yaml --topology v5e:4x4 --price 1.20 \
      --target.name configs/targets/llama31_8b

The estimate counts the matrix products of the programs that `tools/tpu_fit.py` plans, loops included, from their
traces; no TPU is needed. It assumes that `--share` of the chip's published operations a second is used, and that only
products take time. Not counted: attention kernels, compilation, padding. For `regenerate` it assumes that share of the
bandwidth: vanilla decoding of a full batch reads the weights and half of the caches for each token of it.

A table then compares stored features ("files"), whose writing and reading overlaps with products, with states computed
in front of each step ("online"), for the topology's chips.
"""

from __future__ import annotations

import math
import os

from tpu_topology import CHIPS, ENVIRONMENT, Chip, topology_devices

os.environ.update(ENVIRONMENT)

import jax
import tpu_fit
from run_parser import run_parser

from eagle3_jax.config import RunConfig, run_file
from eagle3_jax.data.features import token_bytes
from eagle3_jax.models.checkpoint.fetch import fetch, read_config
from eagle3_jax.training.operations import products


def main() -> None:
    parser = run_parser(__doc__)
    parser.add_argument("--topology", required=True, help="v5e:4x4, v6e:2x4, v5p:2x2x2, ...")
    parser.add_argument("--tokens", type=float, default=100e6, help="of the conversations; 100 million without it")
    parser.add_argument("--share", type=float, default=0.4, help="of the chip's operations a second that is used: 0.4")
    parser.add_argument("--host-rate", type=float, default=1.0, help="GB/s between a host and the store: 1")
    parser.add_argument("--price", type=float, help="of a chip for an hour")
    arguments, overrides = parser.parse_known_args()
    try:
        if not 0 < arguments.share <= 1:
            raise ValueError(f"--share: got {arguments.share}, expected more than 0 and at most 1")
        if arguments.tokens <= 0:
            raise ValueError(f"--tokens: got {arguments.tokens}, expected more than 0")
        config = run_file.load(arguments.config, overrides)
        devices = topology_devices(arguments.topology)
        target = read_config(fetch(config.target.name, whole=False), config.target.aux_layers)
        modes = {mode: _with_features(config, mode) for mode in ("stored", "online")}
        programs = list(tpu_fit.VERBS["extract"](modes["stored"], target, devices))
        programs += tpu_fit.VERBS["train"](modes["online"], target, devices)  # its step is that of stored features
        answering = [x for x in tpu_fit.VERBS["regenerate"](config, target, devices) if x.name.endswith("rounds")]
    except ValueError as error:
        parser.error(str(error))
    chip = CHIPS[arguments.topology.split(":")[0]]
    chips, rate = len(devices) // chip.devices, chip.devices * chip.teraflops * 1e12 * arguments.share
    tokens = f"{arguments.tokens / 1e6:g} million tokens"
    print(f"{arguments.topology}: {chips} chips, {tokens}, {arguments.share:.0%} of the operations used")
    seconds: dict[str, float] = {}

    def said(hours: float) -> str:
        cost = "" if arguments.price is None else f", {hours * arguments.price:,.1f} at {arguments.price:g} a chip hour"
        return f"{hours:,.1f} chip hours, {hours / chips:,.2f} hours{cost}"

    for program in answering:
        a_second = _answers(program, chip, arguments.share)
        hours = arguments.tokens / a_second * program.mesh.size / chip.devices / 3600
        print(f"regenerate: {a_second:,.0f} tokens a second on {program.mesh.size} devices, if all: {said(hours)}")
    for program in programs:
        with jax.sharding.use_abstract_mesh(program.mesh.abstract_mesh):
            operations = products(program.trace().jaxpr.jaxpr)
        if program.name == "extract":
            a_step, passes = math.prod(program.arguments["tokens"].shape), 1
        else:
            a_step, passes = config.train.batch_size * config.train.row_length, config.train.epochs
        hours = operations / a_step * arguments.tokens * passes / rate / 3600
        seconds[program.name] = hours / chips * 3600
        a_token = f"{operations / a_step / 1e9:.1f} GFLOP a token, {passes:g} times"
        print(f"{program.name}: {a_token}: {said(hours)}")
    if seconds.keys() >= {"extract", "train: states", "train: step"}:
        hosts = len({device.process_index for device in devices})
        size = token_bytes(len(target.aux_layers), target.hidden_size, "fp8") * arguments.tokens
        files = size / (arguments.host_rate * 1e9 * hosts)  # seconds to write or read all of it once
        rows = {
            "files": (max(seconds["extract"], files), max(seconds["train: step"], files * config.train.epochs), size),
            "online": (0.0, seconds["train: states"] + seconds["train: step"], _TOKENS_ALONE * arguments.tokens),
        }
        print(f"{hosts} hosts at {arguments.host_rate:g} GB/s each:")
        for name, (extract, train, held) in rows.items():
            hours = (extract + train) / 3600
            cost = "" if arguments.price is None else f", {hours * chips * arguments.price:,.0f}"
            print(
                f"  {name}: extract {extract / 3600:.2f} hours, train {train / 3600:.2f} hours, {held / 1e12:,.3f} TB, "
                f"{hours * chips:,.1f} chip hours{cost}"
            )


def _answers(program: tpu_fit.Program, chip: Chip, share: float) -> float:
    """Estimates an engine's tokens a second: by what a round reads, or by its operations if they take longer."""
    state = program.arguments["state"]
    weights, caches = (jax.tree.leaves(x) for x in (program.arguments["target"], state.cache))
    batch = state.root.shape[0]
    sizes = [sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) for leaves in (weights, caches)]
    read = (sizes[0] + sizes[1] / 2) / (chip.gigabytes * 1e9)
    computed = 2 * sum(leaf.size for leaf in weights) * batch / (chip.teraflops * 1e12)
    return share * batch * program.mesh.size / max(read, computed)


_TOKENS_ALONE = token_bytes(0, 0, "none")


def _with_features(config: RunConfig, mode: str) -> RunConfig:
    values = run_file.to_dict(config)
    values["train"]["features"] = mode
    return run_file.from_dict(values)


if __name__ == "__main__":
    main()
