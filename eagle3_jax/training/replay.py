"""Acceptance of a head in decoding, replayed on held-out answers: the rounds of greedy chain drafting.

The mean accuracy over all positions overestimates acceptance: a round begins after a token that the head got wrong, and
the tokens after such a token are harder. The replay walks every answer round by round instead.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.kernels.vocabulary.api import argmax, vocabulary_logits
from eagle3_jax.training.batch import Batch, Teacher
from eagle3_jax.training.fsdp import on_own_rows


def replay_rounds(
    rows: Float[Array, "dv h"] | None, states: Float[Array, "steps b t h"], teacher: Teacher, batch: Batch, block: int
) -> dict[str, Array]:
    """Counts rounds and accepted drafts of a chain with one draft per step; equal to the decoder's on greedy answers.

    A draft is accepted if it is the teacher's argmax. Rounds of a sampled answer continue with its own tokens. `rows`
    and `states` as in `states_loss`. Logits of `block` positions of a row, a divisor of t or more, are held at a time.
    """

    def best(table: dict[str, Array], states: Array, teacher_rows: Array) -> Array:
        steps, b, t, h = states.shape
        size, head = min(block, t), table.get("lm_head", teacher_rows)
        blocks = jnp.moveaxis(states.reshape(steps, b, t // size, size, h), 2, 1).reshape(-1, b, size, h)
        drafts = jax.lax.map(lambda x: argmax(vocabulary_logits(x, head)), blocks)
        return jnp.moveaxis(drafts.reshape(steps, t // size, b, size), 1, 2).reshape(steps, b, t)

    table = {} if rows is None else {"lm_head": rows}
    drafted = on_own_rows(best, table, states, states.dtype, frozen=teacher.rows, axis=1)
    split, integers = batch.split, (batch.argmax, batch.loss_mask, batch.segment_ids)
    argmaxes, mask, segments = (split.joined(x) for x in integers)
    whole = dataclasses.replace(batch, argmax=argmaxes, loss_mask=mask, segment_ids=segments)
    return replay(jax.vmap(split.joined)(drafted), teacher, whole)


def replay(drafted: Int[Array, "steps b t"], teacher: Teacher, batch: Batch) -> dict[str, Array]:
    """Counts rounds and accepted drafts of whole rows; draft i after a root at t + 1 is for token t + 2 + i.

    Returns `rounds`, int32; `accepted`, int32 [steps]: the rounds that accepted the draft at depth 1, 2, ...
    """
    steps = len(drafted)
    labels, segments = teacher.draft_ids[batch.argmax], batch.segment_ids
    answer = (batch.loss_mask != 0) & (segments > 0)

    def ahead(x: Array, by: int) -> Array:  # x at t + by, 0 beyond the row
        return jnp.pad(x[:, by:], ((0, 0), (0, by)))

    def answered(by: int) -> Bool[Array, "b t"]:  # token t + by is an answer's, in the document of t
        return ahead(answer, by) & (ahead(segments, by) == segments)

    hits = jnp.stack([(drafted[i] == ahead(labels, 1 + i)) & answered(2 + i) for i in range(steps)])
    accepted = jnp.cumprod(hits.astype(jnp.int32), axis=0)
    # An answer opens where its first token is the root, t + 1; a round follows a root while the answer has more tokens.
    opens, going = answered(1) & ~answer, answered(1) & answered(2)
    begins = _round_starts(opens, going, accepted.sum(axis=0))
    return {"rounds": begins.sum(), "accepted": jnp.where(begins[None], accepted, 0).sum(axis=(1, 2))}


def _round_starts(opens: Array, going: Array, accepted: Array) -> Array:
    def step(following: Array, now: tuple[Array, ...]) -> tuple[Array, Array]:
        place, opening, more, drafts = now
        begins = more & (opening | (following == place))
        return jnp.where(begins, place + drafts + 1, following), begins

    places = jnp.arange(opens.shape[1], dtype=jnp.int32)
    none = jnp.full(opens.shape[0], -1, jnp.int32)
    _, begins = jax.lax.scan(step, none, (places, opens.T, going.T, accepted.T))
    return begins.T
