"""Cycles of the TPU kernels, without a TPU: compiled ahead of time, counted in what libtpu's compiler writes down.

    .venv/bin/python tools/tpu_profile.py [--chips v6e,v5e] [--peers] [--json FILE] [--baseline FILE]

Each row is one program of tools/tpu_kernels.py, the one that the engine or the trainer runs, compiled in a process of
its own. Its cycles are one of these:

- "static profile": libtpu's simulation of the program, waits for copies included, for programs whose loops and copies
  do not depend on data: top-k of a vocabulary, and plain XLA. It ends the process where it has no model, as of a loop
  over a bound that is known at run time (attention). Its memory is optimistic: reads and writes do not contend, and a
  copy may run above the chip's bandwidth.
- "bundles x trips": instruction bundles times how often each runs, with trips from the case. No wait is in it, neither
  for memory nor for a unit that is busy: a lower bound of the cycles, good for comparing a kernel with itself. With
  "matrix products" only stretches of code that have some count, once for the blocks without a mask and once for those
  with: copies, the merging of new rows and the pipeline of queries are left out. With "loops" all code counts, a branch
  as taken.

Three times stand side by side, none of which is a measurement: cycles over the assumed clock, the bytes that must move
over the chip's bandwidth, the operations over its peak. A TPU takes at least the largest of them. Nothing was ever
compared with a real TPU.

With --baseline, rows are compared with those of an earlier --json: one that takes 3 % more cycles is an error, and so
is one that the baseline does not have, or that it has (of these chips and kernels) and nobody measured.
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
# What a row measures; the rest of it says what of.
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
    """One row, of what `command` compiles; without cycles it has a reason."""
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
    """What the baseline does not allow: more cycles, no cycles, programs that only one of the two has."""

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
        sizes = by_product if method == PRODUCTS else by_loop
        return bundles(pathlib.Path(folder), json.loads(done.stdout.splitlines()[-1]), sizes)


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


def bundles(
    folder: pathlib.Path, trips: dict[str, list[int]], sizes: Callable[[str], list[int]]
) -> tuple[int | None, str | None]:
    """Of the custom calls with such names, each of their `sizes` times how often it runs."""
    total = 0
    for name, times in trips.items():
        paths = [path for path in folder.glob(f"*{name}*-final_bundles.txt") if "schedule-analysis" not in path.name]
        found = [size for path in paths for size in sizes(path.read_text())]
        if len(found) != len(times):
            return None, f"pieces of code of {name}: got {found} bundles, expected {len(times)} pieces"
        total += sum(size * trip for size, trip in zip(found, times, strict=True))
    return total, None


def by_product(code: str) -> list[int]:
    """Bundles of each stretch of code with matrix products; one ends where a loop begins or a branch may land."""
    stretches = re.split(r"^ *0x[0-9a-f]+ +(?=[A-Z]{2}:)", code, flags=re.MULTILINE)
    return [
        1 + len(re.findall(r"^ *0x[0-9a-f]+ ", stretch, re.MULTILINE)) for stretch in stretches if "vmatmul" in stretch
    ]


def by_loop(code: str) -> list[int]:
    """Bundles of each loop, without the loops in it, in the order in which they begin (`LB`, `>` for each level)."""
    sizes: list[int] = []
    inside: list[int] = []  # the loops that a bundle is in, outermost first
    for label, depth in re.findall(r"^ *(?:0x)?[0-9a-f]+ +([A-Z]{2})?: *(>*) *\{", code, re.MULTILINE):
        del inside[len(depth) - (label == "LB") :]
        if label == "LB":
            inside.append(len(sizes))
            sizes.append(0)
        if inside:
            sizes[inside[-1]] += 1
    return sizes


def compile_case(chip: Chip, case: Case) -> None:
    """Compiles one program and prints its trips; runs in the child, where libtpu leaves its profile or its code."""
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
