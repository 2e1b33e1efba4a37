"""The loss against the shift form, in NumPy for one document: each step moves tokens and teacher by one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.config import TrainConfig
from eagle3_jax.training.losses import states_loss, teacher_mask
from eagle3_jax.training.ttt import training_time_test

CONFIG = TrainConfig(ttt_steps=3, row_length=24, loss_block=8)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def shift_left(x):
    return np.concatenate([x[1:], np.zeros_like(x[:1])])


def shift_form(head, teacher, batch, config):
    """One document: targets and mask are shifted left once before the first step, and again after each step."""
    states = np.asarray(training_time_test(head, teacher.embed, batch, config.ttt_steps))[:, 0].astype(np.float64)
    teacher_probabilities = softmax(np.asarray(batch.last_hidden[0], np.float64) @ np.asarray(teacher.rows).T)
    draft_ids = np.asarray(teacher.draft_ids)[np.asarray(batch.argmax[0])]
    mask = np.asarray(batch.loss_mask[0]).copy()
    if config.mask_offset < 2:  # with 2 the entry of the last token says that this token is to be predicted
        mask[-1] = 0
    for _ in range(config.mask_offset):
        mask = shift_left(mask)
    target, label = shift_left(teacher_probabilities), np.append(draft_ids[1:], -1)
    total, hits, counts = 0.0, [], []
    for i in range(config.ttt_steps):
        logits = states[i] @ np.asarray(head.lm_head[...], np.float64).T
        ce = -np.sum(target * np.log(softmax(logits)), axis=-1)
        position_mask = mask * (label >= 0) if config.argmax_mask else mask
        divisor = len(mask) if config.loss_reduction == "all" else max(mask.sum(), 1)
        total += config.step_decay**i * np.sum(position_mask * ce) / divisor
        hits.append(np.sum(mask * (logits.argmax(-1) == label)))
        counts.append(mask.sum())
        target, label, mask = shift_left(target), np.append(label[1:], -1), shift_left(mask)
    return total, hits, counts


def ttt_loss(head, teacher, batch, config):
    states = training_time_test(head, teacher.embed, batch, config.ttt_steps)
    return states_loss(head.lm_head[...], states, teacher, batch, config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mask_offset", "loss_reduction", "argmax_mask"),
    [(0, "all", True), (1, "mask", True), (2, "all", False), (0, "mask", False)],
)
def test_one_document_equals_the_shift_form(head, teacher, make_batch, mask_offset, loss_reduction, argmax_mask):
    config = dataclasses.replace(
        CONFIG, mask_offset=mask_offset, loss_reduction=loss_reduction, argmax_mask=argmax_mask
    )
    batch = make_batch([[24]], 24, seed=5)
    loss, sums = jax.jit(ttt_loss, static_argnums=3)(head, teacher, batch, config)
    expected, hits, counts = shift_form(head, teacher, batch, config)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    np.testing.assert_array_equal(sums["hits"], hits)
    np.testing.assert_array_equal(sums["counted"], counts)
    assert sums["tokens"] == 24


@pytest.mark.slow
def test_packing_and_padding_change_nothing(head, teacher, make_batch):
    """Rows, order and padding are bookkeeping: the sums over all documents stay, and so do the gradients."""
    run = jax.jit(jax.value_and_grad(ttt_loss, has_aux=True), static_argnums=3)
    packed = run(head, teacher, make_batch([[6, 13], [11], []], 24), CONFIG)
    alone = run(head, teacher, make_batch([[6], [13], [11]], 16), CONFIG)
    for name, value in packed[0][1].items():
        np.testing.assert_allclose(value, alone[0][1][name], rtol=1e-4, err_msg=name)
    for one, other in zip(jax.tree.leaves(packed), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def test_masks_stay_inside_their_document():
    segments = jnp.asarray([[1, 1, 1, 1, 2, 2, 2, 0]])
    ones = jnp.ones_like(segments)
    expected = {  # mask[u - 1 + offset]; the last entry of each document counts with an offset of 2 alone
        0: [0, 1, 1, 1, 0, 1, 1, 0],
        1: [1, 1, 1, 0, 1, 1, 0, 0],
        2: [1, 1, 1, 0, 1, 1, 0, 0],
    }
    for offset, mask in expected.items():
        np.testing.assert_array_equal(teacher_mask(ones, segments, offset)[0], np.asarray(mask, bool), str(offset))
