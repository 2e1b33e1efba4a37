"""Cycles of the TPU kernels, without a TPU: compiled ahead of time, counted by libtpu's scheduler.

    .venv/bin/python tools/tpu_profile.py [--chips v6e,v5e] [--json FILE] [--baseline FILE]

Each row is one program of tools/tpu_kernels.py, compiled in a process of its own. Its cycles are one of these:

- "static profile": libtpu's simulation of the program, waits for copies included. It takes branches over values that it
  does not know for nothing, with the copies and waits in them, so lengths are baked in; it follows simple arithmetic on
  loop counters, but not division. It ends the process where it has no model, as of loops over unknown bounds. Its
  memory is optimistic: reads and writes do not contend, and a copy may run above the chip's bandwidth.
- "bundles x trips": instructions of the stretches of code that have matrix products, times how often each runs. Nothing
  waits for a copy or starts one: a lower bound. For kernels that the simulation cannot follow, to be compared with each
  other only.

The microseconds are the larger of cycles / clock and bytes / bandwidth; the clocks are assumed, and nothing was ever
compared with a real TPU. Good for comparing kernels with each other and a kernel with itself.

With --baseline, rows are compared with those of an earlier --json; one that takes 3 % more cycles is an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

from tpu_kernels import BUNDLES, CASES, STATIC_PROFILE, Case

FLAGS = {
    STATIC_PROFILE: "--xla_jf_dump_static_llo_profile_to={folder}",
    BUNDLES: "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    " --xla_jf_dump_llo_pass_label_regex=.*final_bundles.*",
}
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
SECONDS = 600  # for one program
MOST_MORE = 1.03
# What a row measures; the rest of it says what of.
FIGURES = {"cycles", "microseconds", "floor_microseconds", "compute_floor_microseconds", "share", "reason"}


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
    print(f"{'kernel':34}{'sizes':18}{'chip':>6}{'cycles':>9}{'us':>8}{'floor':>8}{'share':>7}  method")
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
    """One row, of what `command` compiles; without cycles it has a reason."""
    chip, (cycles, reason) = CHIPS[name], count(case.method, command)
    floor = case.floor_bytes / chip.gigabytes / 1e3
    microseconds = None if cycles is None else max(cycles / chip.gigahertz / 1e3, floor)
    return dataclasses.asdict(case) | {
        "chip": name,
        "cycles": cycles,
        "microseconds": microseconds,
        "floor_microseconds": floor,
        "compute_floor_microseconds": case.operations / chip.teraflops / 1e6,
        "share": None if microseconds is None else floor / microseconds,
        "reason": reason,
    }


def line(case: Case, row: dict[str, Any]) -> str:
    begin = f"{case.kernel:34}{case.sizes:18}{row['chip']:>6}"
    if row["cycles"] is None:
        return f"{begin}{'-':>9}{'-':>8}{row['floor_microseconds']:8.1f}{'-':>7}  {row['reason']}"
    figures = (row["microseconds"], row["floor_microseconds"])
    return f"{begin}{row['cycles']:9}" + "".join(f"{x:8.1f}" for x in figures) + f"{row['share']:7.0%}  {case.method}"


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


def count(method: str, command: list[str]) -> tuple[int | None, str | None]:
    """Cycles of the program that `command` compiles, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | ENVIRONMENT | {"LIBTPU_INIT_ARGS": FLAGS[method].format(folder=folder)}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return None, f"does not compile: more than {SECONDS} seconds"
        if done.returncode > 0:
            errors = re.findall(r"^[\w.]+(?:Error|Exception)\b.*", done.stderr, re.MULTILINE)
            return None, f"does not compile: {errors[-1] if errors else done.stderr[-200:]}"
        if method == STATIC_PROFILE:  # whose failures are signals
            cycles = static_profile(pathlib.Path(folder)) if done.returncode == 0 else None
            return cycles, None if cycles else "not modelled"
        if done.returncode < 0:
            return None, f"does not compile: signal {-done.returncode}"
        return bundles(pathlib.Path(folder), json.loads(done.stdout.splitlines()[-1]))


def static_profile(folder: pathlib.Path) -> int | None:
    """Of the program's operations, but for copies of its arguments into the layouts that it wants."""
    total = 0
    for path in folder.glob("*.textproto"):
        for operation in path.read_text().split("hlo_op_estimate {")[1:]:
            name = re.search(r'hlo_op_name: "([^"]+)"', operation)
            cycles = re.search(r"estimated_cycles: (-?\d+)", operation)
            if name and cycles and not re.fullmatch(r"copy[.\d]*", name[1]):
                total += int(cycles[1])
    return total or None


def bundles(folder: pathlib.Path, trips: dict[str, list[int]]) -> tuple[int | None, str | None]:
    """Of the stretches of code with matrix products, each times how often it runs; one ends where a branch may land."""
    total = 0
    for name, times in trips.items():
        sizes = []
        for path in folder.glob(f"*-{name}*-final_bundles.txt"):
            if "schedule-analysis" in path.name:
                continue
            code = re.split(r"^ *0x[0-9a-f]+ (?=[A-Z]{2}:)", path.read_text(), flags=re.MULTILINE)
            sizes += [
                1 + len(re.findall(r"^ *0x[0-9a-f]+ ", stretch, re.MULTILINE))
                for stretch in code
                if "vmatmul" in stretch
            ]
        if len(sizes) != len(times):
            return None, f"stretches with matrix products: got {sizes} bundles, expected {len(times)} stretches"
        total += sum(size * trip for size, trip in zip(sizes, times, strict=True))
    return total, None


@functools.cache
def mesh(chip: Chip) -> Any:
    """Of one device of this kind, which need not be there."""
    import jax
    import numpy as np
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology).devices
    return jax.sharding.Mesh(np.array(devices[:1]), ("model",))


def compile_case(chip: Chip, case: Case) -> None:
    """Compiles one program and prints its trips; runs in the child, where libtpu leaves its profile or its code."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    place = NamedSharding(mesh(chip), PartitionSpec())
    with jax.sharding.use_abstract_mesh(place.mesh.abstract_mesh):
        program = case.program()
        arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in program.arguments]
        jax.jit(program.function, donate_argnums=program.donated).lower(*arguments).compile()
    print(json.dumps(program.trips))


if __name__ == "__main__":
    main()
