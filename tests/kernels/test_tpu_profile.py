"""The kernels' static cycles on TPU chips do not rise: those of the stored profile, at most 3 % more."""

import importlib.metadata
import json
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("libtpu")

ROOT = pathlib.Path(__file__).parents[2]
BASELINE = ROOT / "tests/kernels/tpu_cycles.json"
LIBTPU = "0.0.51"  # that the stored cycles are from; another one schedules in its own way


@pytest.mark.slow
@pytest.mark.skipif(importlib.metadata.version("libtpu") != LIBTPU, reason=f"cycles are known for libtpu {LIBTPU}")
def test_no_kernel_takes_more_cycles_than_it_did():
    profile = [sys.executable, ROOT / "tools/tpu_profile.py", "--chips", "v6e", "--kernels", "tree_attention"]
    done = subprocess.run([*profile, "--baseline", BASELINE], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_stored_profile_keeps_what_was_promised():
    """On v6e, 64 nodes, 4 sequences of 4,096 keys: 70 % of the memory roofline, and a tree costs as a chain."""
    rows = {
        row["kernel"]: row
        for row in json.loads(BASELINE.read_text())
        if row["chip"] == "v6e" and row["query_heads"] == 32 and row["nodes"] == 64
    }
    tree, causal = rows["tree_attention"], rows["tree_attention causal"]
    assert tree["microseconds"] <= 59
    assert tree["share"] >= 0.7
    assert tree["cycles"] <= 1.1 * causal["cycles"]
