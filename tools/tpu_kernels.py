"""Estimates cycles of the TPU kernels without a TPU: compiles ahead of time and reads libtpu's dumps.

    .venv/bin/python tools/tpu_kernels.py [--chips v6e,v5e] [--json FILE]

Each row is one program of tools/tpu/cases.py. Its cycles are counted in one of two ways:

- "static profile": libtpu's simulation of programs whose loops and copies do not depend on data, waits for copies
  included. Reads and writes do not contend in it, and a copy may exceed the chip's bandwidth.
- "bundles x trips": instruction bundles times their trip counts from the case, without waits: a lower bound, good for
  comparing a kernel with itself. With "matrix products" only stretches of code with such products count, once for
  blocks without a mask and once for blocks with one. With "loops" all code counts.

Each row has three times, none measured: cycles over the assumed clock, least bytes over the chip's bandwidth, and
operations over its peak. A TPU takes at least the largest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tpu.cases import CASES, PRODUCTS, STATIC_PROFILE, Case
from tpu.topology import CHIPS, ENVIRONMENT, topology_devices

Counted = tuple[int | None, str | None]  # cycles, or the reason for none
_PROFILE = "--xla_jf_dump_static_llo_profile_to={folder}"
_BUNDLES = "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final_bundles.*"
SECONDS = 600  # for one program


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chips", default=",".join(CHIPS), help="of " + ", ".join(CHIPS))
    parser.add_argument("--kernels", default="", help="only kernels whose name begins so")
    parser.add_argument("--json", type=pathlib.Path, help="file for the rows")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        compile_case(arguments.child[0], CASES[int(arguments.child[1])]())
        return
    chips = arguments.chips.split(",")
    if unknown := set(chips) - CHIPS.keys():
        parser.error(f"--chips: got {', '.join(sorted(unknown))}, expected some of {', '.join(CHIPS)}")
    rows = []
    print(f"{'kernel':24}{'sizes':28}{'chip':>6}{'cycles':>9}{'us':>8}{'memory':>8}{'compute':>8}  method")
    for chip, (number, make) in itertools.product(chips, enumerate(CASES)):
        case = make()
        if case.fields["kernel"].startswith(arguments.kernels):
            rows.append(row := measure(chip, case, [sys.executable, __file__, "--child", chip, str(number)]))
            times = [row[f"{what}_microseconds"] for what in ("cycles", "memory", "compute")]
            cells = f"{row['cycles'] or '-':>9}" + "".join("       -" if x is None else f"{x:8.1f}" for x in times)
            print(f"{row['kernel']:24}{case.sizes:28}{chip:>6}{cells}  {row['reason'] or case.method}", flush=True)
    if arguments.json:
        arguments.json.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def measure(name: str, case: Case, command: list[str]) -> dict[str, Any]:
    """Makes the row of the program that `command` compiles."""
    chip, (cycles, reason) = CHIPS[name], count(case.method, command)
    return case.fields | {
        "method": case.method,
        "chip": name,
        "cycles": cycles,
        "cycles_microseconds": None if cycles is None else round(cycles / chip.gigahertz / 1e3, 2),
        "memory_microseconds": round(case.floor_bytes / chip.gigabytes / 1e3, 2),
        "compute_microseconds": round(case.operations / chip.teraflops / 1e6, 2),
        "reason": reason,
    }


def count(method: str, command: list[str]) -> Counted:
    """Counts cycles of the program that `command` compiles."""
    with tempfile.TemporaryDirectory() as folder:
        flags = (_PROFILE if method == STATIC_PROFILE else _BUNDLES).format(folder=folder)
        environment = os.environ | ENVIRONMENT | {"LIBTPU_INIT_ARGS": flags}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return None, f"does not compile: more than {SECONDS} seconds"
        if done.returncode:
            return None, f"does not compile: {done.stderr.strip().splitlines()[-1:] or done.returncode}"
        if method == STATIC_PROFILE:
            cycles = static_profile(pathlib.Path(folder))
            return cycles, None if cycles else "not modelled"
        sizes = by_product if method == PRODUCTS else by_loop
        return bundles(pathlib.Path(folder), json.loads(done.stdout.splitlines()[-1]), sizes)


def static_profile(folder: pathlib.Path) -> int | None:
    """Sums the cycles of the program's operations, without copies of arguments into other layouts."""
    total = 0
    for path in folder.glob("*.textproto"):
        for operation in path.read_text().split("hlo_op_estimate {")[1:]:
            name = re.search(r'hlo_op_name: "([^"]+)"', operation)
            cycles = re.search(r"estimated_cycles: (-?\d+)", operation)
            if name and cycles and not re.fullmatch(r"copy[.\d]*", name[1]):
                total += int(cycles[1])
    return total or None


def bundles(folder: pathlib.Path, trips: dict[str, list[int]], sizes: Callable[[str], list[int]]) -> Counted:
    """Sums `sizes` times trip counts over the custom calls with these names."""
    total = 0
    for name, times in trips.items():
        paths = [path for path in folder.glob(f"*{name}*-final_bundles.txt") if "schedule-analysis" not in path.name]
        found = [size for path in paths for size in sizes(path.read_text())]
        if len(found) != len(times):
            return None, f"pieces of code of {name}: got {found} bundles, expected {len(times)} pieces"
        total += sum(size * trip for size, trip in zip(found, times, strict=True))
    return total, None


def by_product(code: str) -> list[int]:
    """Counts bundles of each stretch of code with matrix products; loops and branch targets end a stretch."""
    stretches = re.split(r"^ *0x[0-9a-f]+ +(?=[A-Z]{2}:)", code, flags=re.MULTILINE)
    with_products = [stretch for stretch in stretches if "vmatmul" in stretch]
    return [1 + len(re.findall(r"^ *0x[0-9a-f]+ ", stretch, re.MULTILINE)) for stretch in with_products]


def by_loop(code: str) -> list[int]:
    """Counts bundles of each loop, without inner loops, in order of their beginnings (`LB`, `>` for each level)."""
    sizes: list[int] = []
    inside: list[int] = []  # the loops around a bundle, outermost first
    for label, depth in re.findall(r"^ *(?:0x)?[0-9a-f]+ +([A-Z]{2})?: *(>*) *\{", code, re.MULTILINE):
        del inside[len(depth) - (label == "LB") :]
        if label == "LB":
            inside.append(len(sizes))
            sizes.append(0)
        if inside:
            sizes[inside[-1]] += 1
    return sizes


def compile_case(chip: str, case: Case) -> None:
    """Compiles one program and prints its trips; runs in the child, where libtpu dumps its profile or its code."""
    place = NamedSharding(Mesh(topology_devices(CHIPS[chip].topology)[:1], ("model",)), PartitionSpec())
    with jax.sharding.use_abstract_mesh(place.mesh.abstract_mesh):
        arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in case.arguments]
        jax.jit(case.function, donate_argnums=case.donated).lower(*arguments).compile()
        print(json.dumps(case.trips()))


if __name__ == "__main__":
    main()
