"""tools/gpu_sweep.py: the product that it measures, and its table at toy sizes on a CPU."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

sys.path.insert(0, str(tiny.REPOSITORY / "tools"))

import gpu_sweep
from gpu.stream_product import stream_product
from tpu.first_run import sizes

from eagle3_jax.config import DraftTree
from eagle3_jax.kernels.linear.api import quantise


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize("tiling", [gpu_sweep.TILINGS[0], gpu_sweep.TILINGS[3]], ids=str)
def test_a_streamed_product_is_the_product(kind, tiling):
    """Whatever the rows; over one stretch of k and over several. It lowers for GPUs."""
    rng = np.random.default_rng(0)
    matrix = jnp.asarray(0.1 * rng.normal(size=(1024, 128)), jnp.bfloat16)
    exact = np.asarray(matrix, np.float64)
    if kind == "int8":
        matrix = quantise(matrix, "int8")
        exact = np.asarray(matrix.values, np.float64) * np.asarray(matrix.scale, np.float64)
    for rows in (1, 4, 16):
        x = jnp.asarray(rng.normal(size=(rows, 1024)), jnp.bfloat16)
        got = stream_product(x, matrix, **tiling, interpret=True)
        assert got.dtype == x.dtype
        np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(x, np.float64) @ exact, rtol=1e-2, atol=1e-2)
    card = jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("model",), abstract_device=card)):
        traced = jax.jit(lambda x, matrix: stream_product(x, matrix, **tiling)).trace(x, matrix)
        assert "stream_product" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_a_failure_s_last_words_name_its_cause():
    fatal = "F0101 00:00:00.000000 7 parse_flags.cc:1] Unknown flag in XLA_FLAGS: --xla_none"
    assert gpu_sweep.last_words(f"start\n{fatal}\n*** Check failure stack trace: ***\n  @ 0x1\n") == fatal
    assert gpu_sweep.last_words("  File x\nValueError: seconds\n\n") == "ValueError: seconds"
    assert gpu_sweep.last_words("") == "no word"


# A round takes 3 ms, with a flag 2, and 5 with drafts; XLA itself refuses flags that it does not know.
CHILD = """
import json, os, sys
if "none" in os.environ["XLA_FLAGS"]:
    import jax
    jax.devices()
ms = 2 if "better" in os.environ["XLA_FLAGS"] else 3
for what, ms in (("vanilla", ms), ("tree", 5)):
    print(json.dumps({"what": what, "ms": ms, "share": 0.5, "against": ms / 3}))
"""


@pytest.mark.parametrize("seconds", [1e-3, 300])
def test_a_failing_case_is_a_row_and_the_best_flags_are_tried_with_all_layers(seconds, tmp_path, monkeypatch, capsys):
    """Without time each case says so."""
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(gpu_sweep, "__file__", str(tmp_path / "child.py"))
    monkeypatch.setattr(gpu_sweep, "FLAGS", ("--xla_none=1", "better"))
    monkeypatch.setenv("XLA_FLAGS", "")
    gpu_sweep.sweep(seconds, [])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:]]
    assert {len(row) for row in rows} == {6}
    found = {(row[0], row[1]): row[2:] for row in rows}
    if seconds < 1:
        assert len(rows) == 6 and {row[1] for row in rows} <= {"failed", "left out"} and all(row[5] for row in rows)
        return
    assert found["--xla_none=1, 8 layers", "failed"][-1].endswith("Unknown flag in XLA_FLAGS: --xla_none=1")
    assert found["no flags, 32 layers", "vanilla"] == ["3.000", "50%", "1.00", ""]
    assert found["better, 32 layers", "tree"] == ["5.000", "50%", "1.67", ""]
    assert len(rows) == 2 * 5 + 1


@pytest.mark.slow
def test_rounds_and_products_are_measured_at_toy_sizes(monkeypatch):
    monkeypatch.setattr(sizes, "TREES", (DraftTree(num_steps=2, topk=2, num_draft_tokens=4),))
    monkeypatch.setattr(gpu_sweep, "TILINGS", gpu_sweep.TILINGS[2:4])
    vanilla, tree = gpu_sweep.rounds(32, True)
    assert (vanilla["what"], tree["what"]) == ("vanilla", "tree 2, 2, 4")
    assert tree["against"] == pytest.approx(tree["ms"] / vanilla["ms"])
    products = list(gpu_sweep.products(True))
    assert len(products) == 2 * (1 + len(gpu_sweep.TILINGS) + 2 + 2) and all(row["ms"] > 0 for row in products)
