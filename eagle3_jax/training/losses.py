"""The loss of the training-time test (EAGLE-3, arXiv 2503.01840, section 3.2).

Arrays are aligned by the teacher's position u. The state of step i at t = u - 1 - i predicts the teacher's distribution
at u, which is computed once for all steps.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.config import TrainConfig
from eagle3_jax.kernels.soft_cross_entropy import Comparison, soft_cross_entropy
from eagle3_jax.training.batch import Batch, Teacher
from eagle3_jax.training.fsdp import on_own_rows

Sums = dict[str, Array]
Loss = tuple[Float[Array, ""], Sums]
Divisors = Int[Array, " steps"] | None


def states_loss(
    rows: Float[Array, "dv h"] | None,
    states: Float[Array, "steps b t h"],
    teacher: Teacher,
    batch: Batch,
    config: TrainConfig,
    lk_decay: Float[Array, ""] | None = None,
    divisors: Divisors = None,
) -> Loss:
    """Sums over steps step_decay ** i times the soft cross entropy on the draft vocabulary, or the LK loss.

    `rows` are the LM head, None is the target's; `states` its inputs, from `training_time_test`. `lk_decay`: see
    `soft_cross_entropy`, None is cross entropy. `divisors`: `loss_divisors` of the batch of which this is a part.

    Returns the loss, and sums for metrics: `cross_entropy`, `divergence` (KL), `acceptance`, `hits` and `compared`
    [steps] (trained positions), `counted` [steps] (positions in the mask, those with the teacher's argmax outside the
    draft vocabulary included), and `tokens` (without padding).
    """
    steps = jnp.arange(config.ttt_steps)
    counted = _counted(batch, config)
    labels = teacher.draft_ids[batch.argmax]
    trained = counted & (labels >= 0) if config.argmax_mask else counted
    # Trained positions come first in each row, so that later blocks are skipped.
    order = jnp.argsort(~(trained & (batch.positions >= 1)), axis=1, stable=True)

    def ordered(x: Array) -> Array:
        return jnp.take_along_axis(x, order.reshape(order.shape + (1,) * (x.ndim - 2)), axis=1)

    # The state at t = u - 1 - i must lie in the same document.
    inside = batch.positions[None] >= 1 + steps[:, None, None]
    compared = jax.vmap(ordered)(trained[None] & inside)
    source = order[None] - 1 - steps[:, None, None]
    if batch.split.pieces > 1:  # the first teachers of a piece judge states of the piece before it
        beyond = config.ttt_steps
        ends = jax.vmap(batch.split.before)(states[:, :, -beyond:])
        states, source = jnp.concatenate([ends, states], axis=2), source + beyond
    source = jnp.maximum(source, 0)
    hidden = jnp.take_along_axis(states, source[..., None], axis=2)
    tokens, counts = _counts(counted, inside, batch)
    divisor = _divisors(tokens, counts, config) if divisors is None else divisors
    decay = jnp.float32(config.step_decay) ** steps.astype(jnp.float32)
    weights = (decay / jnp.maximum(divisor, 1).astype(jnp.float32))[:, None, None] * compared.astype(jnp.float32)
    loss, comparison = _compared(
        rows,
        (hidden, ordered(batch.last_hidden.astype(hidden.dtype))[None], ordered(labels)[None], weights),
        (jax.lax.stop_gradient(teacher.rows), lk_decay),
        {"block": config.loss_block, "cap": teacher.cap},
    )
    positions = (1, 2)
    divergence = comparison.cross_entropy - comparison.entropy[None]
    return loss, {
        "cross_entropy": jnp.sum(jnp.where(compared, comparison.cross_entropy, 0), positions),
        "divergence": jnp.sum(jnp.where(compared, divergence, 0), positions),
        "acceptance": jnp.sum(jnp.where(compared, comparison.acceptance, 0), positions),
        "hits": jnp.sum(comparison.hits & compared, positions),
        "compared": jnp.sum(compared, positions),
        "counted": counts,
        "tokens": tokens,
    }


def _compared(
    rows: Array | None, given: tuple[Array, ...], frozen: Any, options: dict[str, Any]
) -> tuple[Array, Comparison]:
    """Computes `soft_cross_entropy` on each data shard's rows. Arrays given are [..., b, t] or [..., b, t, h]."""

    def local(table: dict[str, Array], given: tuple[Array, ...], frozen: Any) -> tuple[Array, ...]:
        (hidden, (last_hidden,), (labels,), weights), (teacher_rows, decay) = given, frozen
        student = table.get("lm_head", teacher_rows)
        operands = hidden, student, last_hidden, teacher_rows, labels, weights
        loss, made = soft_cross_entropy(*operands, lk_decay=decay, **options)
        return loss[None, None], made.cross_entropy, made.entropy[None], made.hits, made.acceptance

    table = {} if rows is None else {"lm_head": rows}
    losses, cross_entropy, entropy, hits, acceptance = on_own_rows(
        local, table, given, given[0].dtype, frozen=frozen, axis=1
    )
    return jnp.sum(losses), Comparison(cross_entropy, entropy[0], hits, acceptance)


def loss_divisors(batch: Batch, config: TrainConfig) -> Int[Array, " steps"]:
    """Counts by which the loss of each step is divided, of a whole batch."""
    counted = _counted(batch, config)
    inside = batch.positions[None] >= 1 + jnp.arange(config.ttt_steps)[:, None, None]
    return _divisors(*_counts(counted, inside, batch), config)


def _counted(batch: Batch, config: TrainConfig) -> Array:
    mask, segments = map(batch.split.joined, (batch.loss_mask, batch.segment_ids))
    return batch.split.cut(teacher_mask(mask, segments, config.mask_offset))


def _counts(counted: Array, inside: Array, batch: Batch) -> tuple[Array, Array]:
    return jnp.sum(batch.segment_ids > 0), jnp.sum(counted[None] & inside, axis=(1, 2))


def _divisors(tokens: Array, counts: Array, config: TrainConfig) -> Array:
    return jnp.broadcast_to(tokens, counts.shape) if config.loss_reduction == "all" else counts


def teacher_mask(loss_mask: Int[Array, "b t"], segment_ids: Int[Array, "b t"], offset: int) -> Bool[Array, "b t"]:
    """Masks teacher positions u by mask[u - 1 + offset], as where the mask is shifted with the targets at every step.

    Each document's last entry counts only with an offset of 2, where it is the predicted token.
    """
    follows = jnp.pad(segment_ids[:, 1:], ((0, 0), (0, 1)))  # 0 after the row's end
    inner = (loss_mask != 0) & (segment_ids > 0)
    inner &= (segment_ids == follows) | (offset == 2)
    by = offset - 1
    shifted = jnp.roll(inner, -by, axis=1)
    same = jnp.roll(segment_ids, -by, axis=1) == segment_ids
    t = jnp.arange(segment_ids.shape[1])[None]
    return shifted & same & (t + by >= 0) & (t + by < segment_ids.shape[1])
