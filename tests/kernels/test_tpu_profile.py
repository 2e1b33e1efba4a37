"""tools/tpu_profile.py: what it counts, and that the kernels' counts on TPU chips do not rise."""

import importlib
import importlib.metadata
import json
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("libtpu")

ROOT = pathlib.Path(__file__).parents[2]
BASELINE = ROOT / "tests/kernels/tpu_cycles.json"
LIBTPU = "0.0.50.1"  # that the stored cycles are from; another one schedules in its own way


@pytest.fixture
def profile(monkeypatch):
    """The tool as a module."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("tpu_profile")


def measured(path, *arguments):
    """Rows, measured now."""
    command = [sys.executable, ROOT / "tools/tpu_profile.py", "--json", path, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text())


@pytest.mark.long
@pytest.mark.skipif(importlib.metadata.version("libtpu") != LIBTPU, reason=f"cycles are known for libtpu {LIBTPU}")
@pytest.mark.parametrize("chip", ["v6e"])  # whose counts are stored
def test_no_kernel_takes_more_cycles_than_it_did(chip, tmp_path):
    """Compiled and counted now, against the stored counts; and a tree costs hardly more than a chain."""
    rows = measured(tmp_path / "rows.json", "--chips", chip, "--baseline", BASELINE)
    tree, causal = (
        next(row["cycles"] for row in rows if row["kernel"] == kernel and (row["nodes"], row["batch"]) == (64, 4))
        for kernel in ("tree_attention", "tree_attention causal")
    )
    assert tree <= 1.03 * causal


@pytest.mark.long
@pytest.mark.skipif(importlib.metadata.version("libtpu") != LIBTPU, reason=f"cycles are known for libtpu {LIBTPU}")
def test_commit_takes_no_more_cycles_than_it_did(tmp_path):
    measured(tmp_path / "rows.json", "--chips", "v6e", "--kernels", "commit", "--baseline", BASELINE)


def row(**changes):
    return {"kernel": "commit", "nodes": 8, "chip": "v6e", "cycles": 100, "reason": None} | changes


@pytest.mark.parametrize(
    ("rows", "baseline", "expected"),
    [
        ([row(cycles=103)], [row()], None),
        ([row(cycles=90)], [row()], None),
        ([row(cycles=104)], [row()], "got 104 cycles, expected 100"),
        ([row(cycles=None)], [row()], "got None cycles, expected 100"),
        ([row(nodes=16)], [row(nodes=16), row()], "'nodes': 8}: in the baseline, expected to be measured"),
        ([row(), row(nodes=16)], [row()], "'nodes': 16}: measured, expected in the baseline"),
        ([], [row()], "in the baseline, expected to be measured"),
    ],
)
def test_a_row_is_compared_or_an_error(profile, rows, baseline, expected):
    found = profile.regressions(rows, baseline)
    assert len(found) == (expected is not None)
    assert all(expected in message for message in found)


CODE = """\
     0   :  { %s0 = inlined }
   0x1   :  { %s1 = sadd }
   0x2 LB: > { %1 = vmatmul.bf16 }
   0x3   : > { %2 = vadd }
   0x4   : > { %3 = sbr.rel (%p1) target = $region9 }
   0x5 LB: >> { %4 = vadd }
   0x6   : >> { %5 = vst }
   0x7 PF: > { %6 = vmatmul.bf16 }
   0x8   : > { %7 = vst }
   0x9 LB: >> { %8 = vst }
   0xa PF:  { %9 = vst }
"""


@pytest.mark.parametrize(
    ("sizes", "trips", "expected"),
    [("by_product", [10, 1], 3 * 10 + 2), ("by_loop", [10, 100, 7], 5 * 10 + 2 * 100 + 7)],
)
def test_bundles_of_each_piece_of_code_count_as_often_as_it_runs(profile, tmp_path, sizes, trips, expected):
    """Two stretches with products, of three bundles and two; or three loops, of which the first holds the others."""
    (tmp_path / "1-attend.1-03-final_bundles.txt").write_text(CODE)
    (tmp_path / "1-attend.1-02-schedule-analysis_final_bundles.txt").write_text(CODE)
    (tmp_path / "2-other.1-03-final_bundles.txt").write_text(CODE)
    count = getattr(profile, sizes)
    assert profile.bundles(tmp_path, {"attend.": trips}, count) == (expected, None)
    cycles, reason = profile.bundles(tmp_path, {"attend.": [1] * 9}, count)
    assert cycles is None
    assert f"got {count(CODE)} bundles, expected 9 pieces" in reason
