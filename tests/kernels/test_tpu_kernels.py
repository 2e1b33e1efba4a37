"""tools/tpu_kernels.py: what it counts, and that the kernels' counts on TPU chips do not rise."""

import importlib
import importlib.metadata
import json
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("libtpu")

ROOT = pathlib.Path(__file__).parents[2]
STORED = ROOT / "tests/kernels/tpu_cycles.json"
LIBTPU = "0.0.50.1"  # that the stored cycles are from; another one schedules in its own way
FIGURES = {"cycles", "cycles_microseconds"}  # the other columns identify the program


@pytest.mark.long
@pytest.mark.skipif(importlib.metadata.version("libtpu") != LIBTPU, reason=f"cycles are known for libtpu {LIBTPU}")
def test_no_kernel_takes_more_cycles_than_it_did(tmp_path):
    """Compiled and counted now, beside the stored counts; and a tree costs hardly more than a chain."""
    command = [sys.executable, ROOT / "tools/tpu_kernels.py", "--chips", "v6e", "--json", tmp_path / "rows.json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    now, before = (
        {frozenset((x, row[x]) for x in row.keys() - FIGURES): row["cycles"] for row in json.loads(path.read_text())}
        for path in (tmp_path / "rows.json", STORED)
    )
    assert now.keys() == before.keys()
    assert {dict(row)["kernel"]: cycles for row, cycles in now.items() if (cycles or 1e9) > 1.03 * before[row]} == {}
    tree, causal = (
        cycles
        for kernel in ("tree_attention", "tree_attention causal")
        for row, cycles in now.items()
        if {("kernel", kernel), ("nodes", 64), ("batch", 4), ("kv_heads", 8)} <= row
    )
    assert tree <= 1.03 * causal


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
def test_bundles_of_each_piece_of_code_count_as_often_as_it_runs(tmp_path, sizes, trips, expected, monkeypatch):
    """Two stretches with products, of three bundles and two; or three loops, of which the first holds the others."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    tool = importlib.import_module("tpu_kernels")
    (tmp_path / "1-attend.1-03-final_bundles.txt").write_text(CODE)
    (tmp_path / "1-attend.1-02-schedule-analysis_final_bundles.txt").write_text(CODE)
    (tmp_path / "2-other.1-03-final_bundles.txt").write_text(CODE)
    count = getattr(tool, sizes)
    assert tool.bundles(tmp_path, {"attend.": trips}, count) == (expected, None)
    cycles, reason = tool.bundles(tmp_path, {"attend.": [1] * 9}, count)
    assert cycles is None
    assert f"got {count(CODE)} bundles, expected 9 pieces" in reason
