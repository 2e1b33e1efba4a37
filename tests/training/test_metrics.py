"""Sums of batches as numbers, against what is counted by hand."""

import sys
import types

import numpy as np
import pytest

from eagle3_jax.training import metrics
from eagle3_jax.training.metrics import NotFinite, summarise


def batch(loss, hits, compared, counted, cross_entropy, divergence, tokens, acceptance=(0.0, 0.0)):
    sums = {"hits": hits, "compared": compared, "counted": counted, "acceptance": acceptance}
    sums |= {"cross_entropy": cross_entropy, "divergence": divergence}
    return {name: np.asarray(value) for name, value in sums.items()} | {
        "loss": np.float32(loss),
        "tokens": np.int32(tokens),
    }


def test_means_are_over_positions_not_over_batches():
    small = batch(1.0, [2, 1], [4, 2], [5, 4], [8.0, 6.0], [2.0, 1.0], 10, [1.0, 0.5])
    large = batch(3.0, [10, 4], [16, 8], [20, 16], [16.0, 8.0], [8.0, 4.0], 90, [9.0, 2.0])
    got = summarise([small, large])
    assert got == {
        "loss": 2.0,
        "accuracy": [12 / 25, 5 / 20],
        "cross_entropy": [24 / 20, 14 / 10],
        "divergence": [10 / 20, 5 / 10],
        "acceptance": [10 / 20, 2.5 / 10],
        "positions": 20,
        "tokens": 100,
    }


def test_acceptance_is_counted_as_the_decoder_counts_it():
    """7 rounds: 4 accept the first draft, 1 of them the second too. 7 + 5 tokens in 7 rounds."""
    sums = batch(1.0, [1, 1], [1, 1], [1, 1], [1.0, 1.0], [1.0, 1.0], 1)
    parts = [sums | {"rounds": np.int32(3), "accepted": np.array([1, 0])}]
    parts += [sums | {"rounds": np.int32(4), "accepted": np.array([3, 1])}]
    got = summarise(parts)
    assert (got["rounds"], got["tau"]) == (7, 1 + 5 / 7)
    np.testing.assert_allclose(got["alpha"], [4 / 7, 1 / 4])


@pytest.mark.parametrize(("name", "value"), [("loss", np.nan), ("gradient_norm", np.inf)])
def test_the_first_batch_that_is_not_finite_is_named(name, value):
    sound = batch(1.0, [1, 1], [1, 1], [1, 1], [1.0, 1.0], [1.0, 1.0], 1) | {"gradient_norm": np.float32(1)}
    with pytest.raises(NotFinite, match=f"{name} {value}") as caught:
        summarise([sound, sound | {name: np.float32(value)}, sound | {name: np.float32(value)}])
    assert caught.value.index == 1


def test_weights_and_biases_gets_the_curves_of_process_0(tmp_path, monkeypatch):
    class Run:
        def __init__(self):
            self.logged, self.ended = [], None

        def define_metric(self, *_, **__):
            pass

        def log(self, values):
            self.logged.append(values)

        def finish(self, exit_code):
            self.ended = exit_code

    runs, opened = [Run(), Run()], []
    fake = types.SimpleNamespace(init=lambda **given: opened.append(given) or runs[len(opened) - 1])
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for _ in range(2):
        with metrics.MetricWriter(tmp_path, None, "heads") as writer:
            writer.write(3, "train", {"loss": 1.5, "alpha": [0.5, 0.25]})
    curves = {"train/loss": 1.5, "train/alpha_0": 0.5, "train/alpha_1": 0.25, "step": 3}
    assert [run.logged for run in runs] == [[curves]] * 2 and [run.ended for run in runs] == [0, 0]
    assert opened[0]["project"] == "heads" and opened[0] == opened[1], "a resumed run is the same one"
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="train.wandb: got 'heads', expected the package: pip install wandb"):
        metrics.MetricWriter(tmp_path, None, "heads")
