"""Rows in pieces over several devices, and batches in parts: losses and gradients are those of the whole."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
import tiny

from eagle3_jax.config import ConfigError, DraftConfig, MeshConfig, RunConfig, TrainConfig
from eagle3_jax.mesh import batch_sharding, make_mesh, shardings
from eagle3_jax.sequence import Split
from eagle3_jax.training.batch import TEACHER_SHARDING_RULES, Batch
from eagle3_jax.training.kinds.eagle3 import Eagle3
from eagle3_jax.training.kinds.kind import kind_of
from eagle3_jax.training.state import _gradients, init_state, make_eval_step, make_optimizer

CONFIG = TrainConfig(ttt_steps=3, batch_size=4, row_length=64, loss_block=16)
# Documents within a piece, over the edge of two pieces, and over whole rows; padding within a piece and over several.
ROWS = [[5, 30, 20], [64], [16, 17, 31], [10, 3]]


@pytest.fixture(scope="module")
def run(head_config, teacher, make_batch):
    """Sums and gradients of a step, and the sums of an evaluation."""
    batch = make_batch(ROWS, 64)

    @functools.cache
    def compute(data: int, model: int, pieces: int, **changes):
        kind = Eagle3(head_config, dataclasses.replace(CONFIG, sequence=pieces, **changes))
        mesh = make_mesh(MeshConfig(data=data, model=model), jax.devices()[: data * model])
        split = Split.of(mesh, pieces)
        cut = Batch(**{name: split.cut(x) for name, x in vars(batch).items() if name != "split"}, split=split)
        cut = jax.device_put(cut, batch_sharding(mesh))
        placed = jax.device_put(teacher, shardings(teacher, mesh, TEACHER_SHARDING_RULES))
        state = init_state(functools.partial(kind.new, 0), placed.rows, make_optimizer(CONFIG, 10), mesh)
        with jax.set_mesh(mesh):
            step = jax.jit(functools.partial(_gradients, kind)).lower(state, placed, cut).compile()
            sums, gradients = step(state, placed, cut)
        evaluated = make_eval_step(kind, mesh)(state.head, placed, cut)
        return jax.device_get((sums, gradients, evaluated)), step.as_text()

    return compute


def same(got, expected):
    for one, other in zip(got, expected, strict=True):
        for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6 * np.abs(y).max(), err_msg=str(path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "model", "pieces", "changes"),
    [
        pytest.param(4, 1, 4, {}, marks=pytest.mark.long),
        pytest.param(4, 2, 2, {}, marks=pytest.mark.long),  # two rows on a device
        (4, 1, 2, {"accumulate": 2, "remat": True}),
    ],
)
def test_rows_in_pieces_train_as_whole_rows_do(run, data, model, pieces, changes):
    same(run(data, model, pieces, **changes)[0], run(1, 1, 1)[0])


@pytest.mark.slow
@pytest.mark.parametrize("reduction", [pytest.param("all", marks=pytest.mark.long), "mask"])
def test_parts_are_the_batch(run, reduction):
    """On a mesh too, where the weights of each part are gathered once."""
    whole, _, _ = run(1, 1, 1, loss_reduction=reduction)[0]
    for data, parts in ((1, 4), (2, 2)):
        added, _, _ = run(data, data, 1, loss_reduction=reduction, accumulate=parts)[0]
        same([added], [whole])


@pytest.mark.slow
def test_of_whole_rows_a_device_gathers_keys_and_values_alone(run):
    text = run(4, 1, 4)[1]
    gathered = [sorted(map(int, x.split(","))) for x in re.findall(r"= f32\[([\d,]+)\]\S* all-gather", text)]
    assert [x for x in gathered if 64 in x and len(x) > 2] == [[2, 4, 8, 64]] * 2  # four rows, two KV heads


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence": 3}, r"train.sequence: got 3, expected a divisor of train.row_length = 64, with more than"),
        ({"sequence": 16, "ttt_steps": 4}, "train.sequence: got 16, .* more than train.ttt_steps = 4 tokens for each"),
        ({"sequence": 4, "loss_block": 10}, "a divisor of train.row_length / train.sequence = 16"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_block_heads_take_whole_rows_alone():
    draft = DraftConfig(kind="dflash", mask_token_id=1)
    config = RunConfig(run_dir="unused", draft=draft, train=TrainConfig(sequence=2))
    with pytest.raises(ValueError, match="train.sequence: got 2, expected 1 for draft.kind 'dflash'"):
        kind_of(config, tiny.llama_config())
