"""The target's forward pass as a teacher: the states that a draft head is trained on."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, BFloat16, Bool, Float, Int32

from eagle3_jax.kernels.ttt_attention.api import document_starts
from eagle3_jax.kernels.vocabulary.api import argmax
from eagle3_jax.mesh import constrain
from eagle3_jax.models.cache import BorrowedCache, Cache, Pass
from eagle3_jax.models.split_rows import SplitRows
from eagle3_jax.models.target import TargetModel
from eagle3_jax.sequence import WHOLE, Split

STATES_SHARDING_RULES = ((r"", P("data")),)
# Positions whose logits over the whole vocabulary a device holds at a time.
_LOGITS_BLOCK = 256


@functools.partial(jax.jit, static_argnames="split")
def target_states(
    model: TargetModel,
    token_ids: Int32[Array, "b t"],
    segment_ids: Int32[Array, "b t"] | None = None,
    split: Split = WHOLE,
) -> tuple[BFloat16[Array, "b t aux"], BFloat16[Array, "b t h"], Int32[Array, "b t"], Bool[Array, "b t"]]:
    """Runs the target once over rows of tokens, padded on the right.

    Args:
        segment_ids: 1, 2, ... for the documents of a row, 0 for padding; a token attends within its document, and
            positions start at 0 in each. None: each row is one document.
        split: whether the rows are pieces of longer ones.

    Returns:
        Aux hidden states, the last hidden state after the final norm, the most likely next token, and whether all
        values of a position are finite. Of equally likely tokens it is the lowest id.
    """
    b, t = token_ids.shape
    rows, length = b // split.pieces, t * split.pieces
    index = split.cut(jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length)))
    starts = None if segment_ids is None else split.cut(document_starts(split.joined(segment_ids)))
    positions = index if starts is None else index - starts
    cache = model.empty_cache(b, t)
    if split.pieces > 1:
        cache = Cache(tuple(x if isinstance(x, BorrowedCache) else SplitRows(split) for x in cache.layers))
    this = Pass(positions, jnp.zeros(b, jnp.int32), starts=starts, counts=jnp.full(b, t, jnp.int32))
    hidden, aux, _ = model(token_ids, this, cache)
    predicted = _best_tokens(model, hidden)
    aux, hidden = aux.astype(jnp.bfloat16), hidden.astype(jnp.bfloat16)
    finite = jnp.isfinite(aux).all(-1) & jnp.isfinite(hidden).all(-1)
    return constrain((aux, hidden, predicted, finite), STATES_SHARDING_RULES)


def _best_tokens(model: TargetModel, hidden: Float[Array, "b t h"]) -> Int32[Array, "b t"]:
    """Returns the most likely next tokens. The loop is over positions: rows are split over the data axis."""
    b, t, h = hidden.shape
    shards = jax.sharding.get_abstract_mesh().shape.get("data", 1)
    length = math.gcd(t, max(1, _LOGITS_BLOCK * shards // b))
    blocks = jnp.swapaxes(hidden.reshape(b, t // length, length, h), 0, 1)
    best = jax.lax.map(lambda positions: argmax(model.logits(positions)), blocks)
    return jnp.swapaxes(best, 0, 1).reshape(b, t)
