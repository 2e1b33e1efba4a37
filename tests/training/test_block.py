"""Training of block heads: side by side against one at a time, what a block is blind to, weights and losses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_blocks import DRAFT_VOCAB, make_block_head

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


@pytest.mark.parametrize("kind, types", [(DFlash, "full"), (DFlash, "sliding"), (DSpark, "full"), (DFlash2, "full")])
def test_side_by_side_equals_a_block_behind_its_prefix(packed, teacher, kind, types):
    head = make_block_head(kind, **TYPES[types])
    batch, anchors = packed
    together = block_states(head, teacher.embed, batch, anchors)
    for row, block in [(0, 1), (0, 7), (1, 3)]:
        at, first = int(anchors.at[row, block]), int(anchors.first[row, block])
        aux = batch.aux[row : row + 1, first:at]
        length = at - first  # of the prefix, which is all that a cache would hold
        context = head.context(head.fuse(aux), jnp.arange(length)[None])
        one = jnp.full((1, 1), length)
        alone = head.states(teacher.embed, batch.token_ids[row, at].reshape(1, 1), one, context, 0 * one, one)
        np.testing.assert_allclose(together[row, block], alone[0, 0], rtol=2e-4, atol=2e-4)


def test_a_block_is_blind_to_what_lies_behind_its_anchor(packed, teacher):
    head = make_block_head(DFlash2)
    batch, anchors = packed
    at = int(anchors.at[1, 3])
    other = dataclasses.replace(
        batch,
        aux=batch.aux.at[1, at:].add(1.0),
        token_ids=batch.token_ids.at[1, at + 1 :].set(5),
        argmax=batch.argmax.at[1, at:].set(6),
    )
    before, after = (block_states(head, teacher.embed, x, anchors) for x in (batch, other))
    np.testing.assert_array_equal(before[1, :4], after[1, :4])
    assert not np.allclose(before[1, -1], after[1, -1])


def test_d_pace_counts_the_drafts_that_are_reached():
    q, mask = np.array([0.5, 0.2, 0.9, 0.4], np.float32), np.array([True, False, True, True])
    s = np.where(mask, 0.5 * q + 0.5, 1)
    expected = [mask[d] * sum(mask[k] * np.prod(s[: k + 1]) for k in range(d, 4)) for d in range(4)]
    np.testing.assert_allclose(d_pace(jnp.asarray(q), jnp.asarray(mask), 0.5), expected, rtol=1e-6)


def reference(head, states, rows, teacher, token_ids, batch, anchors, config):
    """The loss, block by block and draft by draft."""
    weighted, divisor, accepted = 0.0, 0.0, np.zeros(head.drafts, int)
    softmax = jax.nn.softmax
    for row, block in np.ndindex(anchors.at.shape):
        at = int(anchors.at[row, block])
        q, losses, mask, run = [], [], [], bool(anchors.valid[row, block])
        right = run
        for d in range(1, head.drafts + 1):
            place = at + d
            inside = (
                place < 24
                and batch.loss_mask[row, place]
                and batch.segment_ids[row, place] == batch.segment_ids[row, at]
            )
            run = bool(run and inside)
            label = int(teacher.draft_ids[batch.argmax[row, place - 1]]) if run else -1
            mask.append(label >= 0)
            if label < 0:
                q.append(1.0), losses.append(0.0)
                right = False
            else:
                before = int(batch.token_ids[row, place - 1])
                x = states[row, block, d - 1]
                raw = logits = x @ rows.T
                if isinstance(head, DSpark):
                    logits = raw + head.markov_out[...] @ head.markov_in[...][before]
                log_q = jax.nn.log_softmax(logits)
                ce = -float(log_q[label])
                p = softmax(teacher.rows @ batch.last_hidden[row, place - 1])
                loss = -float(p @ log_q) if config.soft else ce
                if isinstance(head, DSpark):
                    l1 = float(jnp.abs(p - jnp.exp(log_q)).sum())
                    read = jnp.concatenate([x, head.markov_in[...][before]])
                    sure = float(read @ head.confidence[...][:, 0] + head.confidence_bias[...][0])
                    c, taken = 1 / (1 + np.exp(-sure)), 1 - l1 / 2
                    loss = 0.1 * ce + 0.9 * l1 - taken * np.log(c) - (1 - taken) * np.log(1 - c)
                if isinstance(head, DFlash2):
                    best = np.argsort(-np.asarray(raw))[:5]
                    if label not in best:
                        best[-1] = label
                    read = head.predecessors[...][before] * (x @ head.selector[...])
                    scores = raw[best] + head.successors[...][best] @ read
                    loss -= float(jax.nn.log_softmax(scores)[list(best).index(label)])
                    logits = jnp.full(DRAFT_VOCAB, -jnp.inf).at[best].set(scores)
                    if label == best[-1] and label not in np.argsort(-np.asarray(raw))[:5]:
                        logits = logits.at[label].set(-jnp.inf)
                right = right and int(jnp.argmax(logits)) == label
                accepted[d - 1] += right
                q.append(np.exp(-ce)), losses.append(loss)
            if config.on_path and run:
                run = int(batch.token_ids[row, place]) == int(batch.argmax[row, place - 1])
        if config.weights == "d-pace":
            weights = np.asarray(d_pace(jnp.asarray(q, jnp.float32), jnp.asarray(mask), config.alpha))
        else:
            weights = np.exp(-np.arange(head.drafts) / config.decay) * mask
        weighted += float(np.dot(weights, losses))
        divisor += weights.sum() if isinstance(head, DSpark) else sum(mask)
    return weighted / max(divisor, 1.0), accepted


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
    token_ids = jnp.asarray(np.flatnonzero(np.asarray(teacher.draft_ids) >= 0))
    states = block_states(head, teacher.embed, batch, anchors)
    rows = head.output_rows(teacher.rows)
    loss, sums = jax.jit(block_loss, static_argnums=5)(head, teacher, token_ids, batch, anchors, config)
    expected, accepted = reference(head, states, rows, teacher, token_ids, batch, anchors, config)
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    np.testing.assert_array_equal(sums["accepted"], accepted)
    assert sums["compared"].sum() > 10


@pytest.mark.parametrize("kind", [DFlash, DSpark])
def test_replay_reads_every_root(packed, teacher, kind):
    """An answer that is what the head drafts is accepted whole, block by block."""
    head = make_block_head(kind)
    batch, _ = packed
    batch = dataclasses.replace(batch, loss_mask=jnp.asarray((np.asarray(batch.positions) >= 3) * 1))
    token_ids = jnp.asarray(np.flatnonzero(np.asarray(teacher.draft_ids) >= 0))
    context = head.context(head.fuse(batch.aux), batch.positions)
    rows = head.output_rows(teacher.rows)
    text, argmax = np.array(batch.token_ids), np.array(batch.argmax)
    rounds = 0
    for row, first, end in [(0, 0, 14), (0, 14, 23), (1, 0, 20)]:
        root = first + 3
        while root + 1 < end:
            rounds += 1
            one = jnp.asarray([[root]])
            own = [tuple(x[row : row + 1] for x in layer) for layer in context]
            states = head.states(
                teacher.embed, jnp.asarray([[text[row, root]]]), one - first, own, 0 * one + first, one
            )
            for i, draft in enumerate(np.asarray(head.walk(states, rows, token_ids, one * 0 + text[row, root]))[0, 0]):
                if root + 1 + i < end:
                    argmax[row, root + i] = text[row, root + 1 + i] = token_ids[draft]
            root += head.drafts + 1
            if root < end:
                argmax[row, root - 1] = text[row, root]
    batch = dataclasses.replace(batch, token_ids=jnp.asarray(text), argmax=jnp.asarray(argmax))
    got = jax.jit(replay_blocks, static_argnums=4)(head, teacher, token_ids, batch, 8)
    assert int(got["rounds"]) == rounds
    drafts = [
        min(head.drafts, end - root - 1)
        for end, start in ((14, 3), (9, 3), (20, 3))
        for root in range(start, end - 1, head.drafts + 1)
    ]
    np.testing.assert_array_equal(got["accepted"], [sum(n > i for n in drafts) for i in range(head.drafts)])
