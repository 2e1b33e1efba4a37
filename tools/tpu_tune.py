"""Chooses the block sizes of tree attention for each chip, by static cycles, and writes them into the package's table.

    .venv/bin/python tools/tpu_tune.py [--chips v6e,v5e]

Every row of `VALUES` is compared with the one that the table has (the default, where it has none), which stays unless
another is better by more than 1 %: the geometric mean over `SHAPES` of the microseconds of tools/tpu_profile.py. Rows
that cut a shape's work alike are measured once: about twenty programs for a chip. What the simulator cannot model is no
evidence: a row is compared at the shapes where the present one was measured, and has to be measured there. It must fit
VMEM at every shape with float32 too.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import sys
from typing import Any

from tpu_kernels import Attention
from tpu_profile import CHIPS, ENVIRONMENT, compile_case, measure, mesh

TABLE = pathlib.Path(__file__).parents[1] / "eagle3_jax/kernels/tree_attention_blocks.json"
SHAPES = [
    Attention("tree_attention"),
    Attention("tree_attention", nodes=16),
    Attention("tree_attention", query_heads=8, kv_heads=1),
]
# A block that holds one key of a sequence is computed as a whole: what larger ones would cost short sequences, the full
# ones measured here do not show.
VALUES = {
    "keys_per_step": [4096, 8192, 16384],
    "keys_per_head": [512, 1024, 2048],
    "scores_per_item": [64 << 10, 128 << 10, 256 << 10, 512 << 10],
    "rows": [256, 512],
}
MOST = 0.99  # of the present row's time, for another to take its place

Row = dict[str, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chips", default=",".join(CHIPS), help="of " + ", ".join(CHIPS))
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    if arguments.child:
        chip, shape, row = arguments.child
        use(chip, json.loads(row))
        compile_case(CHIPS[chip], SHAPES[int(shape)])
        return
    chips = arguments.chips.split(",")
    if unknown := set(chips) - CHIPS.keys():
        parser.error(f"--chips: got {', '.join(sorted(unknown))}, expected some of {', '.join(CHIPS)}")
    for chip in chips:
        write(kind(chip), tune(chip))


def tune(chip: str) -> Row:
    table = json.loads(TABLE.read_text())
    measured: dict[Any, float | None] = {}

    def times(row: Row) -> list[float | None]:
        plans = [plan(chip, row, shape) for shape in SHAPES]
        for number, key in enumerate(plans):
            if key not in measured:
                child = [sys.executable, __file__, "--child", chip, str(number), json.dumps(row)]
                measured[key] = measure(chip, SHAPES[number], child)["microseconds"]
                report(chip, row, [measured[key]], SHAPES[number].sizes)
        return [measured[key] for key in plans]

    present = table.get(kind(chip), table["default"])
    before = times(present)
    rows = [dict(zip(VALUES, values, strict=True)) for values in itertools.product(*VALUES.values())]
    found = [(row, times(row)) for row in rows if fits(chip, row)]
    best, after = min(found, key=lambda pair: ratio(pair[1], before))
    better = ratio(after, before) < MOST
    report(chip, present, before, "present")
    report(chip, best, after, "best, taken" if better else "best, not taken")
    return best if better else present


def ratio(after: list[float | None], before: list[float | None]) -> float:
    """Geometric mean over the shapes that were measured before; infinite where one of them is not measured now."""
    ratios = [math.inf if new is None else new / old for new, old in zip(after, before, strict=True) if old is not None]
    return math.prod(ratios) ** (1 / len(ratios)) if ratios else math.inf


def fits(chip: str, row: Row) -> bool:
    try:
        return all(plan(chip, row, dataclasses.replace(shape, dtype="float32")) for shape in SHAPES)
    except ValueError:
        return False


def use(chip: str, row: Row) -> None:
    """The package's table in this process has this row."""
    from eagle3_jax.kernels import tree_attention

    tree_attention.BLOCKS[kind(chip)] = row


@functools.cache
def kind(chip: str) -> str:
    return mesh(CHIPS[chip]).devices.flat[0].device_kind


def plan(chip: str, row: Row, shape: Attention) -> Any:
    """How the kernel would cut its work."""
    import jax

    use(chip, row)
    with jax.sharding.use_abstract_mesh(mesh(CHIPS[chip]).abstract_mesh):
        return shape.plan()


def report(chip: str, row: Row, times: list[float | None], what: str) -> None:
    sizes = ", ".join(f"{name} {value}" for name, value in row.items())
    figures = "".join(f"{'-':>8}" if time is None else f"{time:8.1f}" for time in times)
    print(f"{chip:6}{sizes:80}{figures} us  {what}", flush=True)


def write(chip: str, row: Row) -> None:
    table = json.loads(TABLE.read_text()) | {chip: row}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(sizes)}" for name, sizes in table.items())
    partial = TABLE.with_suffix(".partial")
    partial.write_text(f"{{\n{lines}\n}}\n")
    partial.replace(TABLE)


if __name__ == "__main__":
    main()
