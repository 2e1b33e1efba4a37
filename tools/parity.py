"""Checks training parity: loss and gradients against SpecForge's and speculators' own code, for each kind of head.

    .venv/bin/pip install --no-deps --require-hashes --requirement tools/peers.txt --target runs/peers
    .venv/bin/python tools/parity.py runs/peers

A random head and random features go through both, on a CPU in float32. Each control makes one mistake in the peer's
computation, to show that the comparison detects it by a wide margin.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import sys

from peers import blocks, eagle3
from peers.common import PACKAGES, make_importable

TOLERANCE = 1e-5  # relative, float32
SEEN = 50 * TOLERANCE  # smallest difference of a control
# Name -> differences by mistake, "" without one. The name begins with the peer's.
CASES = eagle3.CASES | blocks.CASES


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="where the peers are installed")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    if missing := [peer for peer in PACKAGES if not (arguments.folder / peer).is_dir()]:
        parser.error(f"folder: got {arguments.folder}, expected one that holds the packages {' and '.join(missing)}")
    make_importable(arguments.folder)
    worst = 0.0
    print(f"{'peer and head':34}{'seed':6}{'mistake':38}{'loss':>8}{'steps':>9}{'gradients':>11}")
    for (case, compare), seed in itertools.product(CASES.items(), range(arguments.seeds)):
        for mistake, found in compare(seed).items():
            steps = f"{found['steps']:9.1e}" if "steps" in found else " " * 9
            print(f"{case:34}{seed:<6}{mistake:38}{found['loss']:8.1e}{steps}{found['gradients']:11.1e}", flush=True)
            most = max(found.values())
            if not mistake:
                worst = max(worst, most)
            elif most < SEEN:
                sys.exit(f"{case}: {mistake}: got differences of {most:.1e}, expected at least {SEEN:.1e}")
    if worst > TOLERANCE:
        sys.exit(f"differences: got {worst:.1e}, expected at most {TOLERANCE:.0e}")


if __name__ == "__main__":
    main()
