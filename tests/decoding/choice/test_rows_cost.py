"""The tool that prices further rows: each number of them in each kind, and ratios to one row's."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[3] / "tools"))
import rows_cost

from eagle3_jax.decoding.measure import profile


@pytest.mark.slow
def test_every_kind_is_timed_with_its_own_rows(toy, monkeypatch):
    seen, run = set(), profile.run_stage

    def watched(models, state, found, *, stage, tier):
        if stage == "verify":
            seen.add((found.tokens.shape[1], tier.name))
        return run(models, state, found, stage=stage, tier=tier)

    monkeypatch.setattr(profile, "run_stage", watched)
    found = rows_cost.measure(toy.target, (1, 4), turns=2, length=32)
    assert set(found) == {("pass", 1), ("pass", 4), ("chain", 1), ("chain", 4), ("tree", 4)}
    assert seen == {(1, "vanilla"), (4, "chain 3"), (4, "tree 2, 2, 4")}
    assert all(0 < low <= median for low, median in found.values())


def test_ratios_are_to_one_row_of_the_same_turns():
    found = {("pass", 1): (0.010, 0.020), ("pass", 8): (0.012, 0.030)}
    found |= {("chain", 1): (0.020, 0.020), ("chain", 8): (0.022, 0.024), ("tree", 8): (0.025, 0.030)}
    ratios = [line.split()[-2:] for line in rows_cost.table(found).splitlines()[1:]]
    assert ratios == [["1.00", "1.00"], ["1.20", "1.50"], ["1.00", "1.00"], ["1.10", "1.20"], ["1.25", "1.50"]]
