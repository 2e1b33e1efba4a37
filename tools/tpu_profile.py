"""Static cycles of the TPU kernels, without a TPU: compiled ahead of time, simulated by libtpu's scheduler.

    .venv/bin/python tools/tpu_profile.py [--chips v6e,v5e] [--json FILE] [--baseline FILE]

Each row is one program of tools/tpu_kernels.py, compiled in a process of its own (what the simulator cannot model ends
the process). Lengths are baked in, because the simulator takes loops and branches over run-time values for nothing. Its
model of the memory is optimistic: reads and writes do not contend, and a copy may run above the chip's bandwidth. The
microseconds here are therefore the larger of cycles / clock and bytes / bandwidth; the clocks are assumed, and nothing
was ever compared with a real TPU. Good for comparing kernels with each other and a kernel with itself.

With --baseline, rows are compared with those of an earlier --json; one that takes 3 % more cycles is an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

from tpu_kernels import CASES, Case

FLAG = "--xla_jf_dump_static_llo_profile_to"
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
MOST_MORE = 1.03
# What a row measures; the rest of it says what of.
FIGURES = {"cycles", "microseconds", "floor_microseconds", "compute_floor_microseconds", "share"}


@dataclasses.dataclass(frozen=True)
class Chip:
    """One JAX device. Bandwidth and operations are published figures; the clock is assumed.

    Attributes:
        gigahertz: clock. gigabytes: HBM bandwidth a second. teraflops: bfloat16, a second.
    """

    topology: str
    gigahertz: float
    gigabytes: float
    teraflops: float


CHIPS = {
    "v5e": Chip("v5e:1x1", 1.5, 819, 197),
    "v5p": Chip("v5p:1x1x1", 1.75, 2460, 459),
    "v6e": Chip("v6e:1x1", 1.75, 1638, 918),
    "tpu7x": Chip("tpu7x:1x1x1", 2.2, 3700, 1155),  # one of a chip's two cores
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chips", default=",".join(CHIPS), help="of " + ", ".join(CHIPS))
    parser.add_argument("--kernels", default="", help="only kernels whose name begins so")
    parser.add_argument("--json", type=pathlib.Path, help="file for the rows")
    parser.add_argument("--baseline", type=pathlib.Path, help="rows to compare with")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        compile_case(CHIPS[arguments.child[0]], CASES[int(arguments.child[1])])
        return
    chips = arguments.chips.split(",")
    if unknown := set(chips) - CHIPS.keys():
        parser.error(f"--chips: got {', '.join(sorted(unknown))}, expected some of {', '.join(CHIPS)}")
    rows = []
    print(f"{'kernel':34}{'sizes':18}{'chip':>6}{'cycles':>9}{'us':>8}{'floor':>8}{'share':>7}")
    for chip in chips:
        for number, case in enumerate(CASES):
            if case.kernel.startswith(arguments.kernels):
                rows.append(row := measure(chip, case, [sys.executable, __file__, "--child", chip, str(number)]))
                print(line(case, row), flush=True)
    if arguments.json:
        partial = arguments.json.with_suffix(".partial")
        partial.write_text(json.dumps(rows, indent=1) + "\n")
        partial.replace(arguments.json)
    if arguments.baseline:
        slower = regressions(rows, json.loads(arguments.baseline.read_text()))
        sys.exit("\n".join(slower) if slower else 0)


def measure(name: str, case: Case, command: list[str]) -> dict[str, Any]:
    """One row, of what `command` compiles; cycles are None where the simulator has no model of the program."""
    chip, cycles = CHIPS[name], static_cycles(command)
    floor = case.floor_bytes / chip.gigabytes / 1e3
    microseconds = None if cycles is None else max(cycles / chip.gigahertz / 1e3, floor)
    return dataclasses.asdict(case) | {
        "chip": name,
        "cycles": cycles,
        "microseconds": microseconds,
        "floor_microseconds": floor,
        "compute_floor_microseconds": case.operations / chip.teraflops / 1e6,
        "share": None if microseconds is None else floor / microseconds,
    }


def line(case: Case, row: dict[str, Any]) -> str:
    begin = f"{case.kernel:34}{case.sizes:18}{row['chip']:>6}"
    if row["cycles"] is None:
        return f"{begin}{'not modelled':>17}{row['floor_microseconds']:8.1f}"
    figures = (row["microseconds"], row["floor_microseconds"])
    return f"{begin}{row['cycles']:9}" + "".join(f"{x:8.1f}" for x in figures) + f"{row['share']:7.0%}"


def regressions(rows: list[dict[str, Any]], baseline: list[dict[str, Any]]) -> list[str]:
    """Rows that take more cycles than they did; those that the baseline does not know are left alone."""

    def program(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(sorted((key, value) for key, value in row.items() if key not in FIGURES))

    before = {program(row): row["cycles"] for row in baseline}
    found = []
    for row in rows:
        was, now = before.get(program(row)), row["cycles"]
        if was is not None and (now is None or now > MOST_MORE * was):
            found.append(f"{dict(program(row))}: got {now} cycles, expected {was}")
    return found


def static_cycles(command: list[str]) -> int | None:
    """Cycles of the program's operations, but for copies of its arguments into the layouts that it wants."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | ENVIRONMENT | {"LIBTPU_INIT_ARGS": f"{FLAG}={folder}"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        if done.returncode > 0:  # an exception; the simulator's own failures are signals
            sys.exit(done.stderr)
        if done.returncode < 0:
            return None
        total = 0
        for path in pathlib.Path(folder).glob("*.textproto"):
            for operation in path.read_text().split("hlo_op_estimate {")[1:]:
                name = re.search(r'hlo_op_name: "([^"]+)"', operation)
                cycles = re.search(r"estimated_cycles: (-?\d+)", operation)
                if name and cycles and not re.fullmatch(r"copy[.\d]*", name[1]):
                    total += int(cycles[1])
        return total or None


def compile_case(chip: Chip, case: Case) -> None:
    """Compiles one program; runs in the child, where libtpu leaves its profile."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology).devices
    mesh = Mesh(np.array(devices[:1]), ("model",))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        function, shapes = case.program()
        place = NamedSharding(mesh, PartitionSpec())
        arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in shapes]
        jax.jit(function).lower(*arguments).compile()


if __name__ == "__main__":
    main()
