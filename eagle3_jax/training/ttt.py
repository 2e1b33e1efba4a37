"""The training-time test: K drafting steps from every position at once (EAGLE3_SPEC sections 2.1 and 2.2).

At step i the pair at index t is (token t+1+i, the head's own output of step i-1 at the same t), just as when drafting
from a prefix that ends at t. It attends the true features (step 0) up to t, and behind them one key of each later step
at t itself. Tokens are the document's, so that all positions run in parallel.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.models.draft import DraftHead
from eagle3_jax.training.batch import Batch

_HIGHEST = jax.lax.Precision.HIGHEST
# Queries per block of the causal part: bounds the scores' memory, and skips what no query of the block may see.
_QUERIES = 256


def training_time_test(
    head: DraftHead, embed: Float[Array, "v h"], batch: Batch, steps: int, remat: bool = False
) -> Float[Array, "steps b t h"]:
    """The LM head's inputs at every step and position.

    Args:
        embed: the target's embedding table (frozen); its dtype is the compute dtype.
        remat: recompute each step in the backward pass.

    Returns:
        `states[i, :, t]` predicts token t+2+i of the document. Where t+1+i is beyond the document's end, or padding,
        it holds garbage that no other position ever reads.
    """
    embeds = jax.lax.stop_gradient(embed)[batch.token_ids]
    visible = _visible(batch.segment_ids)

    def step(
        head: DraftHead,
        state: Array,
        embeds: Array,
        positions: Array,
        keys: tuple[Array, ...],
        values: tuple[Array, ...],
    ) -> tuple[Array, Array, Array]:
        added: list[Array] = []

        def attend(q: Array, k: Array, v: Array) -> Array:
            added.extend((k, v))
            return ttt_attention(q, (*keys, k), (*values, v), visible)

        state = head(embeds, state, positions, attend)
        return state, added[0], added[1]

    if remat:
        step = jax.checkpoint(step)
    state = head.fuse(batch.aux.astype(embed.dtype))
    keys: tuple[Array, ...] = ()
    values: tuple[Array, ...] = ()
    outputs = []
    for i in range(steps):
        with jax.named_scope(f"ttt_step_{i}"):
            state, k, v = step(head, state, _shift_left(embeds, 1 + i), batch.positions + i, keys, values)
        keys, values = (*keys, k), (*values, v)
        outputs.append(head.output_hidden(state))
    return jnp.stack(outputs)


def ttt_attention(
    queries: Float[Array, "b t n d"],
    keys: tuple[Float[Array, "b t k d"], ...],
    values: tuple[Float[Array, "b t k d"], ...],
    visible: Bool[Array, "b t t"],
) -> Float[Array, "b t n d"]:
    """softmax over the visible keys of step 0 and the key at the same index of each later step, in float32.

    Args:
        keys, values: of steps 0..i, the newest last. `visible` is a mask over those of step 0, nothing beyond the
            diagonal, and must show every query its own.
    """
    block = jax.checkpoint(_attend_block)  # scores are cheaper to compute again than to keep
    outputs = []
    for start in range(0, queries.shape[1], _QUERIES):
        rows, seen = slice(start, start + _QUERIES), slice(0, start + _QUERIES)
        outputs.append(
            block(
                queries[:, rows],
                keys[0][:, seen],
                values[0][:, seen],
                [k[:, rows] for k in keys[1:]],
                [v[:, rows] for v in values[1:]],
                visible[:, rows, seen],
            )
        )
    return jnp.concatenate(outputs, axis=1)


def _attend_block(
    queries: Array,
    keys: Array,
    values: Array,
    own_keys: list[Array],
    own_values: list[Array],
    visible: Array,
) -> Array:
    """Queries [b, t, n, d] against the causal keys [b, s, k, d] and their own of later steps, [b, t, k, d] each."""
    b, t, n, d = queries.shape
    s, kv_heads = keys.shape[1], keys.shape[2]
    group = n // kv_heads
    scale = d**-0.5
    q = queries.reshape(b, t, kv_heads, group, d).transpose(0, 2, 3, 1, 4)  # [b, k, g, t, d]
    flat = q.reshape(b, kv_heads, group * t, d)
    scores = jnp.einsum("bkrd,bskd->bkrs", flat, keys, precision=_HIGHEST, preferred_element_type=jnp.float32)
    scores = scores.reshape(b, kv_heads, group, t, s) * scale
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    q32 = q.astype(jnp.float32)
    own = [jnp.sum(q32 * _heads_first(k), axis=-1) * scale for k in own_keys]  # [b, k, g, t] each
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1))
    for score in own:
        top = jnp.maximum(top, jax.lax.stop_gradient(score))
    unnormed = jnp.exp(scores - top[..., None])
    total = jnp.sum(unnormed, axis=-1)
    attended = jnp.einsum(
        "bkrs,bskd->bkrd",
        unnormed.reshape(b, kv_heads, group * t, s).astype(values.dtype),
        values,
        precision=_HIGHEST,
        preferred_element_type=jnp.float32,
    ).reshape(q.shape)
    for score, value in zip(own, own_values, strict=True):
        weight = jnp.exp(score - top)
        total += weight
        attended += weight[..., None] * _heads_first(value)
    attended /= total[..., None]
    return attended.transpose(0, 3, 1, 2, 4).reshape(b, t, n, d).astype(queries.dtype)


def _heads_first(x: Array) -> Array:
    """[b, t, k, d] -> float32 [b, k, 1, t, d]."""
    return x.astype(jnp.float32).transpose(0, 2, 1, 3)[:, :, None]


def _shift_left(x: Float[Array, "b t h"], by: int) -> Float[Array, "b t h"]:
    """x[:, t + by] at t; zeros behind the row's end."""
    by = min(by, x.shape[1])
    return jnp.pad(x[:, by:], ((0, 0), (0, by), (0, 0)))


def _visible(segment_ids: Int[Array, "b t"]) -> Bool[Array, "b t t"]:
    """Which keys of step 0 a query sees: those before it in its own document, and its own."""
    t = jnp.arange(segment_ids.shape[1])
    return (segment_ids[:, :, None] == segment_ids[:, None, :]) & (t[:, None] >= t[None, :])
