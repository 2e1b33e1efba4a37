"""Training of block heads: anchors, the labels of their blocks, and the losses.

A block begins at an anchor, a token of an answer, and attends to the target's states before it, not to other blocks.
Draft d = 1, 2, ... is for position anchor + d, whose label is the target's prediction at anchor + d - 1 (DFlash, arXiv
2602.06036).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.kernels.contraction import contract
from eagle3_jax.kernels.ttt_attention.api import document_starts
from eagle3_jax.kernels.vocabulary.api import capped
from eagle3_jax.models.drafts.dflash import DFlash
from eagle3_jax.training.batch import Batch, Teacher
from eagle3_jax.training.fsdp import on_own_rows
from eagle3_jax.training.replay import replay
from eagle3_jax.training.ttt import REMAT_POLICY


@dataclasses.dataclass(frozen=True)
class BlockLossConfig:
    """Options of the block losses; the first three and the last are `TrainConfig`'s."""

    weights: Literal["d-pace", "decay"] = "d-pace"
    alpha: float = 0.5
    decay: float = 4.0
    soft: bool = False  # DFlash's cross entropy uses the target's distribution, not its best token
    on_path: bool = True  # drafts behind a token that is not the target's best are masked: the text leaves there
    block: int = 128  # blocks whose logits a data shard holds at a time; the backward pass recomputes them
    remat: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Anchors:
    """Blocks of packed rows."""

    at: Any  # int32 [B, A], positions in the row, ascending
    first: Any  # int32 [B, A], start of the anchor's document
    valid: Any  # bool [B, A], false for padding


def draw_anchors(key: Array, batch: Batch, count: int) -> Anchors:
    """Draws `count` distinct positions of each row whose own and next token belong to an answer."""
    follows = jnp.pad(batch.loss_mask[:, 1:], ((0, 0), (0, 1))) != 0
    segments = jnp.pad(batch.segment_ids[:, 1:], ((0, 0), (0, 1)))
    usable = (batch.loss_mask != 0) & follows & (batch.segment_ids == segments) & (batch.segment_ids > 0)
    drawn, at = jax.lax.top_k(jnp.where(usable, jax.random.uniform(key, usable.shape), -1.0), count)
    order = jnp.argsort(at, axis=1)
    at = jnp.take_along_axis(at, order, axis=1).astype(jnp.int32)
    valid = jnp.take_along_axis(drawn >= 0, order, axis=1)
    return Anchors(at, jnp.take_along_axis(document_starts(batch.segment_ids), at, axis=1), valid)


def block_states(
    head: DFlash, embed: Float[Array, "v h"], batch: Batch, anchors: Anchors, remat: bool = False
) -> Float[Array, "b a drafts h"]:
    """Computes the LM head's inputs for every draft of every block; `remat` is `BlockLossConfig`'s."""
    context = head.context(head.fuse(batch.aux.astype(embed.dtype)), batch.positions)
    tokens = jnp.take_along_axis(batch.token_ids, anchors.at, axis=1)
    positions = jnp.take_along_axis(batch.positions, anchors.at, axis=1)
    policy = REMAT_POLICY if remat else None
    return head.states(jax.lax.stop_gradient(embed), tokens, positions, context, anchors.first, anchors.at, policy)


def d_pace(
    probabilities: Float[Array, "*batch d"], mask: Bool[Array, "*batch d"], alpha: float
) -> Float[Array, "*batch d"]:
    """Weighs a block's drafts by D-PACE: the sum over drafts from d on of the labels' probabilities to be reached."""
    reached = jnp.cumprod(jnp.where(mask, (1 - alpha) * probabilities + alpha, 1.0), axis=-1)
    remaining = jnp.flip(jnp.cumsum(jnp.flip(jnp.where(mask, reached, 0.0), -1), axis=-1), -1)
    return jnp.where(mask, remaining, 0.0)


def block_loss(
    head: DFlash, teacher: Teacher, batch: Batch, anchors: Anchors, config: BlockLossConfig
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Computes the loss for the kind of head.

    DFlash: cross entropy. DSpark: 0.1 cross entropy + 0.9 L1 distance of the distributions + binary cross entropy of
    the confidence. DFlash2: cross entropy before the selector + cross entropy over the selector's candidates, where a
    missing label replaces the last candidate. Returns the loss, and sums for metrics: `cross_entropy`, `hits` and
    `compared` [drafts] (trained drafts), `accepted` [drafts] (hits after hits only), `rounds` (blocks) and `tokens`.
    """
    own = functools.partial(_own_sums, config=config)
    frozen = jax.lax.stop_gradient(teacher)
    parts = on_own_rows(own, head, (batch, anchors), teacher.embed.dtype, frozen=frozen)
    total = jax.tree.map(lambda x: jnp.sum(x, axis=(0, 1)), parts)
    loss = total.pop("weighted") / jnp.maximum(total.pop("divisor"), 1.0)
    total["tokens"] = jnp.sum(batch.segment_ids > 0)
    return loss, jax.tree.map(jax.lax.stop_gradient, total)


def _own_sums(head: DFlash, rows: tuple[Batch, Anchors], teacher: Teacher, config: BlockLossConfig) -> dict[str, Array]:
    batch, anchors = rows
    states = block_states(head, teacher.embed, batch, anchors, config.remat)
    drafts = _Drafts.of(batch, teacher, anchors, head.drafts, config.on_path)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (states, drafts))
    count = len(flat[0])
    size = math.gcd(count, config.block) if count > config.block else count
    lm_head = head.rows_of(teacher.rows)

    @jax.checkpoint
    def chunk(head: DFlash, lm_head: Array, part: tuple[Array, _Drafts]) -> dict[str, Array]:
        return _sums(head, lm_head, teacher, *part, config)

    def body(total: dict[str, Array], part: tuple[Array, _Drafts]) -> tuple[dict[str, Array], None]:
        return jax.tree.map(jnp.add, total, chunk(head, lm_head, part)), None

    parts = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), flat)
    shapes = jax.eval_shape(chunk, head, lm_head, jax.tree.map(lambda x: x[0], parts))
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    total, _ = jax.lax.scan(body, zero, parts)
    return jax.tree.map(lambda x: x[None, None], total)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Drafts:
    """Labels of the blocks, each [B, A, drafts]."""

    hidden: Any  # the target's last hidden state that predicts the draft
    labels: Any  # the target's best token, a draft id
    before: Any  # the text's preceding token
    mask: Any  # whether the draft is trained

    @classmethod
    def of(cls, batch: Batch, teacher: Teacher, anchors: Anchors, count: int, on_path: bool) -> _Drafts:
        t = batch.token_ids.shape[1]
        places = anchors.at[..., None] + jnp.arange(count, dtype=jnp.int32)[None, None]  # positions that predict
        here, ahead = jnp.minimum(places, t - 1), jnp.minimum(places + 1, t - 1)

        def at(x: Array, index: Array) -> Array:
            return jax.vmap(lambda row, i: row[i])(x, index)

        answered = (at(batch.loss_mask, ahead) != 0) & (places + 1 < t)
        answered &= at(batch.segment_ids, ahead) == at(batch.segment_ids, anchors.at)[..., None]
        best = at(batch.argmax, here)
        if on_path:  # depends on the preceding drafts
            kept = best == at(batch.token_ids, ahead)
            answered &= jnp.pad(kept[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=True)
        reached = jnp.cumprod(answered, axis=-1) > 0
        labels = teacher.draft_ids[best]
        mask = reached & (labels >= 0) & anchors.valid[..., None]
        return cls(at(batch.last_hidden, here), labels, at(batch.token_ids, here), mask)


def _sums(
    head: Any, rows: Array, teacher: Teacher, states: Array, drafts: _Drafts, config: BlockLossConfig
) -> dict[str, Array]:
    """Sums over n blocks, states [n, drafts, H]; the loss is `weighted` / `divisor`."""
    raw = _logits(states, rows)
    labels, mask = jnp.maximum(drafts.labels, 0), drafts.mask
    logits = head.adjusted(raw, states, drafts.before) if head.corrector == "markov" else raw
    hard = _cross_entropy(logits, labels)
    if config.weights == "d-pace":
        weights = d_pace(jnp.exp(-jax.lax.stop_gradient(hard)), mask, config.alpha)
    else:
        weights = jnp.where(mask, jnp.exp(-jnp.arange(mask.shape[-1], dtype=jnp.float32) / config.decay)[None], 0.0)

    def weighed(x: Array) -> Array:
        return jnp.sum(jnp.where(mask, weights * x, 0.0))

    def wanted() -> Array:  # the target's distribution over the draft vocabulary
        logits = _logits(drafts.hidden.astype(states.dtype), jax.lax.stop_gradient(teacher.rows))
        return jax.nn.softmax(capped(logits, teacher.cap))

    divisor = jnp.sum(mask, dtype=jnp.float32)
    if head.corrector == "markov":
        distance = jnp.sum(jnp.abs(jax.nn.softmax(logits) - wanted()), axis=-1)
        weighted, divisor = weighed(0.1 * hard + 0.9 * distance), jnp.sum(weights)
        if head.config.confidence:
            accepted = jax.lax.stop_gradient(1 - 0.5 * distance)
            sure = head.confidence_logits(states, drafts.before)
            weighted += weighed(jax.nn.softplus(sure) - accepted * sure)
    else:
        soft = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(wanted() * logits, axis=-1) if config.soft else hard
        weighted = weighed(soft)
    if head.corrector == "selector":
        best, candidates = head.best_of(jax.lax.stop_gradient(raw))
        order = jnp.argmax(head.candidate_scores(best, candidates, states, drafts.before), axis=-1)
        best_ids = jnp.take_along_axis(candidates, order[..., None], axis=-1)[..., 0]
        there = candidates == labels[..., None]
        place = jnp.where(jnp.any(there, axis=-1), jnp.argmax(there, axis=-1), best.shape[-1] - 1)
        chosen = jnp.arange(best.shape[-1])[None, None] == place[..., None]
        candidates = jnp.where(chosen, labels[..., None], candidates)
        scores = jnp.take_along_axis(raw, candidates, axis=-1)
        weighted += weighed(_cross_entropy(head.candidate_scores(scores, candidates, states, drafts.before), place))
    else:
        best_ids = jnp.argmax(jax.lax.stop_gradient(logits), axis=-1)
    hits = (best_ids == drafts.labels) & mask
    return {
        "weighted": weighted,
        "divisor": divisor,
        "cross_entropy": jnp.sum(jnp.where(mask, hard, 0.0), axis=0),
        "hits": jnp.sum(hits, axis=0),
        "accepted": jnp.sum(jnp.cumprod(hits, axis=-1), axis=0),
        "compared": jnp.sum(mask, axis=0),
        "rounds": jnp.sum(mask[:, 0]),
    }


def _logits(states: Array, rows: Array) -> Array:
    flat = contract("mk,nk->mn", states.reshape(-1, states.shape[-1]), rows)
    return flat.reshape(*states.shape[:-1], -1)


def _cross_entropy(logits: Array, labels: Array) -> Array:
    own = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - own


def replay_blocks(
    head: DFlash, teacher: Teacher, token_ids: Int[Array, " dv"], batch: Batch, block: int
) -> dict[str, Array]:
    """Replays rounds of a block head (see `replay_rounds`): a chain as long as its blocks, each draft given the last.

    The blocks of `block` anchors of a row are computed at a time: a divisor of t, or more than t.
    """
    own = functools.partial(_own_drafts, block=block)
    drafts = on_own_rows(own, head, batch, teacher.embed.dtype, frozen=(teacher, token_ids))
    return replay(jnp.pad(drafts[:, :, 1:], ((0, 0), (0, 0), (0, 1))), teacher, batch)  # root t + 1 is the anchor


def _own_drafts(head: DFlash, batch: Batch, frozen: tuple[Teacher, Array], block: int) -> Int[Array, "drafts b t"]:
    (teacher, token_ids), t = frozen, batch.token_ids.shape[1]
    size = min(block, t)
    first = document_starts(batch.segment_ids)
    context = head.context(head.fuse(batch.aux.astype(teacher.embed.dtype)), batch.positions)
    rows = head.rows_of(teacher.rows)

    def drafted(start: Array) -> Array:
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size, axis=1)
        tokens = cut(batch.token_ids)
        at = jnp.broadcast_to(start + jnp.arange(size, dtype=jnp.int32)[None], tokens.shape)
        states = head.states(teacher.embed, tokens, cut(batch.positions), context, cut(first), at)
        return head.walk(states, rows, token_ids, tokens)

    drafts = jax.lax.map(drafted, jnp.arange(0, t, size, dtype=jnp.int32))  # [t / size, b, size, drafts]
    return drafts.transpose(3, 1, 0, 2).reshape(head.drafts, *batch.token_ids.shape)
