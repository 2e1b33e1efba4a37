"""Estimates cycles of the TPU kernels without a TPU: compiles ahead of time and reads libtpu's dumps.

    .venv/bin/python tools/tpu_profile.py [--chips v6e,v5e] [--peers] [--json FILE] [--baseline FILE]

Each row is one program of tools/tpu_kernels.py, as the engine or the trainer runs it, compiled in a separate process.
Its cycles are counted by one of two methods:

- "static profile": libtpu's simulation of the program, waits for copies included, for programs whose loops and copies
  do not depend on data: top-k of a vocabulary, and plain XLA. The simulator ends the process for code without a model,
  such as a loop over a bound known at run time (attention). Its memory model is optimistic: reads and writes do not
  contend, and a copy may exceed the chip's bandwidth.
- "bundles x trips": instruction bundles times their trip counts from the case, without waits for memory or busy units.
  The result is a lower bound of the cycles, good for comparing a kernel with itself. With "matrix products" only
  stretches of code with such products count, once for blocks without a mask and once for blocks with one. Copies, the
  merging of new rows and the pipeline of queries are left out. With "loops" all code counts, branches as taken.

Each row has three times, none of them measured: cycles over the assumed clock, least bytes over the chip's bandwidth,
operations over its peak. A TPU takes at least the largest of them. No figure was compared with a real TPU.

--baseline compares rows with those of an earlier --json. Errors are a row with 3 % more cycles, a row missing from the
baseline, and a baseline's row (of these chips and kernels) that was not measured.
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
from collections.abc import Callable
from typing import Any

from tpu_cases import LOOPS, PRODUCTS, STATIC_PROFILE, Case
from tpu_kernels import CASES, PEERS, program
from tpu_topology import CHIPS, ENVIRONMENT, Chip, mesh

_BUNDLES = "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final_bundles.*"
FLAGS = {
    STATIC_PROFILE: "--xla_jf_dump_static_llo_profile_to={folder}",
    PRODUCTS: _BUNDLES,
    LOOPS: _BUNDLES,
}
SECONDS = 600  # for one program
MOST_MORE = 1.03
# Columns with figures; the other columns identify the program.
FIGURES = {"cycles", "cycles_microseconds", "memory_microseconds", "compute_microseconds", "reason"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chips", default=",".join(CHIPS), help="of " + ", ".join(CHIPS))
    parser.add_argument("--kernels", default="", help="only kernels whose name begins so")
    parser.add_argument("--peers", action="store_true", help="others that do the same work, too")
    parser.add_argument("--json", type=pathlib.Path, help="file for the rows")
    parser.add_argument("--baseline", type=pathlib.Path, help="rows to compare with")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cases = CASES + (PEERS if arguments.peers or arguments.child else [])
    if arguments.child:
        compile_case(CHIPS[arguments.child[0]], cases[int(arguments.child[1])])
        return
    chips = arguments.chips.split(",")
    if unknown := set(chips) - CHIPS.keys():
        parser.error(f"--chips: got {', '.join(sorted(unknown))}, expected some of {', '.join(CHIPS)}")
    if not any(case.kernel.startswith(arguments.kernels) for case in cases):
        parser.error(
            f"--kernels: got {arguments.kernels}, expected a beginning of {', '.join(c.kernel for c in cases)}"
        )
    rows = []
    print(f"{'kernel':34}{'sizes':24}{'chip':>6}{'cycles':>9}{'us':>8}{'memory':>8}{'compute':>8}  method")
    for chip in chips:
        for number, case in enumerate(cases):
            if case.kernel.startswith(arguments.kernels):
                rows.append(row := measure(chip, case, [sys.executable, __file__, "--child", chip, str(number)]))
                print(line(case, row), flush=True)
    if arguments.json:
        partial = arguments.json.with_suffix(".partial")
        partial.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
        partial.replace(arguments.json)
    if arguments.baseline:
        baseline = json.loads(arguments.baseline.read_text())
        baseline = [row for row in baseline if row["chip"] in chips and row["kernel"].startswith(arguments.kernels)]
        found = regressions(rows, baseline)
        sys.exit("\n".join(found) if found else 0)


def measure(name: str, case: Case, command: list[str]) -> dict[str, Any]:
    """Makes the row of the program that `command` compiles; a row without cycles has a reason."""
    chip, (cycles, reason) = CHIPS[name], count(case.method, command)
    return dataclasses.asdict(case) | {
        "chip": name,
        "cycles": cycles,
        "cycles_microseconds": None if cycles is None else round(cycles / chip.gigahertz / 1e3, 2),
        "memory_microseconds": round(case.floor_bytes / chip.gigabytes / 1e3, 2),
        "compute_microseconds": round(case.operations / chip.teraflops / 1e6, 2),
        "reason": reason,
    }


def line(case: Case, row: dict[str, Any]) -> str:
    begin = f"{case.kernel:34}{case.sizes:24}{row['chip']:>6}"
    cycles = f"{'-':>9}{'-':>8}" if row["cycles"] is None else f"{row['cycles']:9}{row['cycles_microseconds']:8.1f}"
    floors = f"{row['memory_microseconds']:8.1f}{row['compute_microseconds']:8.1f}"
    return f"{begin}{cycles}{floors}  {row['reason'] or case.method}"


def regressions(rows: list[dict[str, Any]], baseline: list[dict[str, Any]]) -> list[str]:
    """Lists regressions from the baseline: more cycles, no cycles, programs in only one of the two."""

    def program(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(sorted((key, value) for key, value in row.items() if key not in FIGURES))

    before, now = ({program(row): row["cycles"] for row in some} for some in (baseline, rows))
    found = [f"{dict(key)}: measured, expected in the baseline" for key in now.keys() - before.keys()]
    found += [f"{dict(key)}: in the baseline, expected to be measured" for key in before.keys() - now.keys()]
    for key in before.keys() & now.keys():
        was, got = before[key], now[key]
        if was is not None and (got is None or got > MOST_MORE * was):
            found.append(f"{dict(key)}: got {got} cycles, expected {was}")
    return sorted(found)


def count(method: str, command: list[str]) -> tuple[int | None, str | None]:
    """Counts cycles of the program that `command` compiles, or returns the reason for none."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | ENVIRONMENT | {"LIBTPU_INIT_ARGS": FLAGS[method].format(folder=folder)}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return None, f"does not compile: more than {SECONDS} seconds"
        if done.returncode > 0:
            errors = re.findall(r"^[\w.]+(?:Error|Exception)\b.*", done.stderr, re.MULTILINE)
            return None, f"does not compile: {errors[-1] if errors else done.stderr[-200:]}"
        if method == STATIC_PROFILE:  # fails by signals
            cycles = static_profile(pathlib.Path(folder)) if done.returncode == 0 else None
            return cycles, None if cycles else "not modelled"
        if done.returncode < 0:
            return None, f"does not compile: signal {-done.returncode}"
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


def bundles(
    folder: pathlib.Path, trips: dict[str, list[int]], sizes: Callable[[str], list[int]]
) -> tuple[int | None, str | None]:
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
    return [
        1 + len(re.findall(r"^ *0x[0-9a-f]+ ", stretch, re.MULTILINE)) for stretch in stretches if "vmatmul" in stretch
    ]


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


def compile_case(chip: Chip, case: Case) -> None:
    """Compiles one program and prints its trips; runs in the child, where libtpu dumps its profile or its code."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    place = NamedSharding(mesh(chip), PartitionSpec())
    with jax.sharding.use_abstract_mesh(place.mesh.abstract_mesh):
        compiled = program(case)
        arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in compiled.arguments]
        jax.jit(compiled.function, donate_argnums=compiled.donated).lower(*arguments).compile()
    print(json.dumps(compiled.trips))


if __name__ == "__main__":
    main()
