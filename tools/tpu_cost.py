"""Estimates the TPU hours and costs of extraction and training, from the programs' operations.

    .venv/bin/python tools/tpu_cost.py --config configs/llama31_8b.yaml --topology v5e:4x4 --price 1.20 \
      --target.name configs/targets/llama31_8b

The estimate counts the matrix products of the programs that `tools/tpu_fit.py` plans, loops included, from their
traces; no TPU is needed. It assumes that `--share` of the chip's published operations a second is used, and that only
products take time. Not counted: attention kernels, compilation, files, padding.
"""

from __future__ import annotations

import math
import os

from tpu_topology import CHIPS, ENVIRONMENT, topology_devices

os.environ.update(ENVIRONMENT)

import jax
import tpu_fit
from run_parser import run_parser

from eagle3_jax import config as configs
from eagle3_jax.models.checkpoint.fetch import fetch, read_config
from eagle3_jax.training.operations import products


def main() -> None:
    parser = run_parser(__doc__)
    parser.add_argument("--topology", required=True, help="v5e:4x4, v6e:2x4, v5p:2x2x2, ...")
    parser.add_argument("--tokens", type=float, default=100e6, help="of the conversations; 100 million without it")
    parser.add_argument("--share", type=float, default=0.4, help="of the chip's operations a second that is used: 0.4")
    parser.add_argument("--price", type=float, help="of a chip for an hour")
    arguments, overrides = parser.parse_known_args()
    try:
        if not 0 < arguments.share <= 1:
            raise ValueError(f"--share: got {arguments.share}, expected more than 0 and at most 1")
        if arguments.tokens <= 0:
            raise ValueError(f"--tokens: got {arguments.tokens}, expected more than 0")
        config = configs.load(arguments.config, overrides)
        devices = topology_devices(arguments.topology)
        target = read_config(fetch(config.target.name, whole=False), config.target.aux_layers)
        programs = [
            program for verb in ("extract", "train") for program in tpu_fit.VERBS[verb](config, target, devices)
        ]
    except ValueError as error:
        parser.error(str(error))
    chip = CHIPS[arguments.topology.split(":")[0]]
    chips, rate = len(devices) // chip.devices, chip.devices * chip.teraflops * 1e12 * arguments.share
    tokens = f"{arguments.tokens / 1e6:g} million tokens"
    print(f"{arguments.topology}: {chips} chips, {tokens}, {arguments.share:.0%} of the operations used")
    for program in programs:
        with jax.sharding.use_abstract_mesh(program.mesh.abstract_mesh):
            operations = products(program.trace().jaxpr.jaxpr)
        if program.name == "extract":
            a_step, passes = math.prod(program.arguments["tokens"].shape), 1
        else:
            a_step, passes = config.train.batch_size * config.train.row_length, config.train.epochs
        hours = operations / a_step * arguments.tokens * passes / rate / 3600
        cost = "" if arguments.price is None else f", {hours * arguments.price:,.1f} at {arguments.price:g} a chip hour"
        a_token = f"{operations / a_step / 1e9:.1f} GFLOP a token, {passes:g} times"
        print(f"{program.name}: {a_token}: {hours:,.1f} chip hours, {hours / chips:,.2f} hours{cost}")


if __name__ == "__main__":
    main()
