"""Training of block heads: side by side against one at a time, what a block is blind to, weights and losses."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_blocks import make_block_head

from eagle3_jax.models.drafts.dflash import SLIDING, DFlash
from eagle3_jax.models.drafts.dflash2 import DFlash2
from eagle3_jax.models.drafts.dspark import DSpark
from eagle3_jax.training.block import BlockLossConfig, block_loss, block_states, d_pace, draw_anchors, replay_blocks

TYPES = {"full": {}, "sliding": {"layer_types": (SLIDING, "full_attention"), "sliding_window": 3}}


@pytest.fixture(scope="module")
def packed(make_batch):
    batch = make_batch([[14, 9], [20]], row_length=24)
    return batch, draw_anchors(jax.random.key(0), batch, 8)


def test_anchors_are_answers_own(packed):
    batch, anchors = packed
    mask, segments, at = (np.asarray(x) for x in (batch.loss_mask, batch.segment_ids, anchors.at))
    for row in range(2):
        usable = [
            t for t in range(23) if mask[row, t] and mask[row, t + 1] and segments[row, t] == segments[row, t + 1] > 0
        ]
        chosen = at[row][np.asarray(anchors.valid)[row]]
        assert len(chosen) == min(8, len(usable)) == len(set(chosen)) and set(chosen) <= set(usable)
    # The second document of row 0 begins at 14.
    np.testing.assert_array_equal(np.asarray(anchors.first)[0], np.where(at[0] >= 14, 14, 0))


@jax.jit
def together(head, teacher, batch, anchors):
    return block_states(head, teacher.embed, batch, anchors)


@jax.jit
def alone(head, teacher, token, aux):
    """A block behind a prefix, which is all that a cache would hold."""
    length = jnp.full((1, 1), aux.shape[1])
    context = head.context(head.fuse(aux), jnp.arange(aux.shape[1])[None])
    return head.states(teacher.embed, token.reshape(1, 1), length, context, 0 * length, length)


@pytest.mark.slow
@pytest.mark.parametrize("kind, types", [(DFlash, "full"), (DFlash, "sliding"), (DSpark, "full"), (DFlash2, "full")])
def test_side_by_side_equals_a_block_behind_its_prefix(packed, teacher, kind, types):
    head = make_block_head(kind, **TYPES[types])
    batch, anchors = packed
    blocks = together(head, teacher, batch, anchors)
    for row, block in [(0, 1), (0, 7), (1, 3)]:
        at, first = int(anchors.at[row, block]), int(anchors.first[row, block])
        one = alone(head, teacher, batch.token_ids[row, at], batch.aux[row : row + 1, first:at])
        np.testing.assert_allclose(blocks[row, block], one[0, 0], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind, types", [(DFlash, "full"), (DFlash, "sliding"), (DSpark, "full"), (DFlash2, "full")])
def test_a_block_is_blind_to_what_lies_behind_its_anchor(packed, teacher, kind, types):
    head = make_block_head(kind, **TYPES[types])
    batch, anchors = packed
    at = int(anchors.at[1, 3])
    other = dataclasses.replace(
        batch,
        aux=batch.aux.at[1, at:].add(1.0),
        token_ids=batch.token_ids.at[1, at + 1 :].set(5),
        argmax=batch.argmax.at[1, at:].set(6),
    )
    before, after = (together(head, teacher, x, anchors) for x in (batch, other))
    np.testing.assert_array_equal(before[1, :4], after[1, :4])
    assert not np.allclose(before[1, -1], after[1, -1])


@pytest.mark.long
def test_rematerialisation_keeps_fewer_residuals_and_changes_no_gradient(packed, teacher):
    batch, anchors = packed
    head = make_block_head(DFlash, **TYPES["sliding"])

    def total(head, remat):
        return block_loss(head, teacher, batch, anchors, BlockLossConfig(remat=remat))[0]

    with jax.default_matmul_precision("float32"):
        plain, remat = (
            jax.jit(jax.value_and_grad(total), static_argnums=1).lower(head, x).compile() for x in (False, True)
        )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), plain(head), remat(head))
    kept = [len(jax.tree.leaves(jax.vjp(lambda head, x=x: total(head, x), head)[1])) for x in (False, True)]
    assert kept[1] < kept[0]


def test_d_pace_counts_the_drafts_that_are_reached():
    q, mask = np.array([0.5, 0.2, 0.9, 0.4], np.float32), np.array([True, False, True, True])
    s = np.where(mask, 0.5 * q + 0.5, 1)
    expected = [mask[d] * sum(mask[k] * np.prod(s[: k + 1]) for k in range(d, 4)) for d in range(4)]
    np.testing.assert_allclose(d_pace(jnp.asarray(q), jnp.asarray(mask), 0.5), expected, rtol=1e-6)


def log_softmax(x):
    return x - np.log(np.exp(x - x.max()).sum()) - x.max()


def reference(head, states, teacher, batch, anchors, config):
    """The loss, block by block and draft by draft; all of it numpy."""
    weighted, divisor, accepted = 0.0, 0.0, np.zeros(head.drafts, int)
    for row, block in np.ndindex(anchors.at.shape):
        at, run = anchors.at[row, block], bool(anchors.valid[row, block])
        q, losses, mask, right = [], [], [], run
        for d in range(1, head.drafts + 1):
            place = at + d
            run = run and place < 24 and batch.segment_ids[row, place] == batch.segment_ids[row, at]
            run = run and batch.loss_mask[row, place] != 0
            label = teacher.draft_ids[batch.argmax[row, place - 1]] if run else -1
            mask.append(label >= 0)
            hit = False
            if label >= 0:
                state, before = states[row, block, d - 1], batch.token_ids[row, place - 1]
                raw = logits = state @ head.lm_head[...].T
                if isinstance(head, DSpark):
                    logits = raw + head.markov_out[...] @ head.markov_in[...][before]
                log_q, p = log_softmax(logits), np.exp(log_softmax(teacher.rows @ batch.last_hidden[row, place - 1]))
                loss = -p @ log_q if config.soft else -log_q[label]
                hit = np.argmax(logits) == label
                if isinstance(head, DSpark):
                    taken = 1 - np.abs(p - np.exp(log_q)).sum() / 2
                    read = np.concatenate([state, head.markov_in[...][before]])
                    sure = 1 / (1 + np.exp(-(read @ head.confidence[...][:, 0] + head.confidence_bias[...][0])))
                    loss = 0.1 * loss + 1.8 * (1 - taken) - taken * np.log(sure) - (1 - taken) * np.log(1 - sure)
                if isinstance(head, DFlash2):
                    best = list(np.argsort(-raw)[:5])
                    found = label in best
                    best = best if found else [*best[:-1], label]
                    read = head.predecessors[...][before] * (state @ head.selector[...])
                    scores = raw[best] + head.successors[...][best] @ read
                    loss -= log_softmax(scores)[best.index(label)]
                    hit = found and best[np.argmax(scores)] == label
                q.append(np.exp(log_q[label]))
                losses.append(loss)
            else:
                q.append(1.0)
                losses.append(0.0)
            right = right and hit
            accepted[d - 1] += right
            if config.on_path and run:
                run = batch.token_ids[row, place] == batch.argmax[row, place - 1]
        if config.weights == "d-pace":
            weights = np.asarray(d_pace(jnp.asarray(q, jnp.float32), jnp.asarray(mask), config.alpha))
        else:
            weights = np.exp(-np.arange(head.drafts) / config.decay) * mask
        weighted += weights @ losses
        divisor += weights.sum() if isinstance(head, DSpark) else sum(mask)
    return weighted / max(divisor, 1.0), accepted


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, config",
    [
        (DFlash, BlockLossConfig(block=4)),
        (DFlash, BlockLossConfig(weights="decay", soft=True, on_path=False, block=16)),
        (DSpark, BlockLossConfig(on_path=False, block=8)),
        (DFlash2, BlockLossConfig(on_path=False, block=8)),
    ],
)
def test_loss_is_the_definitions(packed, teacher, kind, config):
    head = make_block_head(kind)
    batch, anchors = packed
    on_path = jnp.roll(batch.token_ids, -1, axis=1)  # what the text says is mostly the target's best
    some = jnp.arange(24)[None] % 5 > 0
    batch = dataclasses.replace(batch, argmax=jnp.where(some, on_path, batch.argmax))
    states = together(head, teacher, batch, anchors)
    loss, sums = jax.jit(block_loss, static_argnums=4)(head, teacher, batch, anchors, config)
    arguments: list[Any] = [jax.tree.map(np.asarray, x) for x in (head, states, teacher, batch, anchors)]
    expected, accepted = reference(*arguments, config=config)
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    np.testing.assert_array_equal(sums["accepted"], accepted)
    assert sums["compared"].sum() >= 10 and sums["compared"][1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DFlash, DSpark])
def test_replay_reads_every_root(packed, teacher, kind):
    """An answer that is what the head drafts is accepted whole, block by block."""
    head = make_block_head(kind)
    batch, _ = packed
    batch = dataclasses.replace(batch, loss_mask=jnp.asarray((np.asarray(batch.positions) >= 3) * 1))
    token_ids = jnp.asarray(np.flatnonzero(np.asarray(teacher.draft_ids) >= 0))

    @jax.jit
    def draft(token, row, first, root):
        aux, positions = batch.aux[row][None], batch.positions[row][None]
        context = head.context(head.fuse(aux), positions)
        one = root.reshape(1, 1)
        states = head.states(teacher.embed, token.reshape(1, 1), one - first, context, first + 0 * one, one)
        return head.walk(states, head.lm_head[...], token_ids, token.reshape(1, 1))[0, 0]

    text, argmax = np.array(batch.token_ids), np.array(batch.argmax)
    rounds = 0
    for row, first, end in [(0, 0, 14), (0, 14, 23), (1, 0, 20)]:
        root = first + 3
        while root + 1 < end:
            rounds += 1
            drafts = draft(jnp.asarray(text[row, root]), row, first, jnp.asarray(root))
            for i, token in enumerate(np.asarray(token_ids)[np.asarray(drafts)]):
                if root + 1 + i < end:
                    argmax[row, root + i] = text[row, root + 1 + i] = token
            root += head.drafts + 1
    batch = dataclasses.replace(batch, token_ids=jnp.asarray(text), argmax=jnp.asarray(argmax))
    got = jax.jit(replay_blocks, static_argnums=4)(head, teacher, token_ids, batch, 8)
    assert int(got["rounds"]) == rounds
    drafts = [
        min(head.drafts, end - root - 1)
        for end, start in ((14, 3), (9, 3), (20, 3))
        for root in range(start, end - 1, head.drafts + 1)
    ]
    np.testing.assert_array_equal(got["accepted"], [sum(n > i for n in drafts) for i in range(head.drafts)])
