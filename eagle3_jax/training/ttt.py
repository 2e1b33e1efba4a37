"""The training-time test: K drafting steps from every position at once (EAGLE-3, arXiv 2503.01840, section 3.2).

At step i the pair at index t is token t+1+i and the head's own output of step i-1 at the same t, as in drafting from a
prefix that ends at t. It attends to the true features (step 0) up to t, then to one key of each later step at t. Tokens
are the document's, so that all positions run in parallel. On TPUs the steps are one loop. Where rows are split along
their length, a device gathers the keys of step 0 of its rows, by KV head; later steps attend to their position alone.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, Float

from eagle3_jax.kernels.contraction import KEPT
from eagle3_jax.kernels.dispatch import default_implementation, over_mesh
from eagle3_jax.kernels.ttt_attention.api import ttt_attention
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.drafts.head import Head
from eagle3_jax.models.layers import embeddings, whole_states
from eagle3_jax.sequence import Split
from eagle3_jax.training.batch import Batch
from eagle3_jax.training.fsdp import on_own_rows

# Inputs shared by all steps: embeddings of the tokens, positions, segment ids of whole rows, and where rows are split
# `ttt_attention`'s `row` and `begin`.
_Inputs = tuple[Array, Array, Array, dict[str, Any]]
# Residuals that `train.remat` keeps: products with weights, and attention.
REMAT_POLICY = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable, jax.checkpoint_policies.save_only_these_names(KEPT)
)


def training_time_test(
    head: Head, embed: Float[Array, "v h"], batch: Batch, steps: int, remat: bool = False
) -> Float[Array, "steps b t h"]:
    """Computes the LM head's inputs at every step and position, in the dtype of `embed`, the target's frozen table.

    `states[i, :, t]` predicts token t+2+i of the document. It is undefined, and read by no other position, where t+1+i
    is beyond the document's end or padding. `remat`: see `TrainConfig`.
    """
    split = batch.split
    tokens = split.cut(split.joined(batch.token_ids), beyond=steps)
    rows = tokens, batch.positions, batch.segment_ids, batch.aux.astype(embed.dtype)
    run = functools.partial(_steps, steps=steps, remat=remat, split=split)
    frozen = jax.lax.stop_gradient(embed)
    return on_own_rows(run, head, rows, embed.dtype, frozen=frozen, tables=False)


def _steps(head: Head, rows: tuple[Array, ...], embed: Array, steps: int, remat: bool, split: Split) -> Array:
    tokens, positions, segment_ids, aux = rows
    (embeds, state), c = whole_states((embeddings(embed, tokens), head.fuse(aux))), head.config
    inputs: _Inputs = embeds, positions, segment_ids, {}
    if split.pieces > 1:
        row = {"row": _first_keys(head, state, embeds, positions, split), "begin": split.begin(state.shape[1])}
        inputs = embeds, positions, split.gathered(segment_ids), row
    unrolled = default_implementation() != "pallas"
    # CSE would merge unrolled steps with their recomputation in the backward pass; steps of a loop are safe.
    static = (5,) if unrolled else ()  # i
    step = jax.checkpoint(_step, policy=REMAT_POLICY, prevent_cse=unrolled, static_argnums=static) if remat else _step
    cache = jnp.zeros((0 if unrolled else steps, *state.shape[:2], c.num_key_value_heads, c.head_dim), state.dtype)
    carry = state, cache, cache

    def body(carry: tuple[Array, Array, Array], i: Array | int) -> tuple[tuple[Array, Array, Array], Array]:
        carry = step(head, *carry, inputs, i)
        return carry, carry[0]

    if unrolled:  # programs compile fast on CPUs, and a step holds the keys of those before it alone
        states = []
        for i in range(steps):
            carry, state = body(carry, i)
            states.append(state)
        return head.output_hidden(jnp.stack(states))
    return head.output_hidden(jax.lax.scan(body, carry, jnp.arange(steps))[1])


def _step(
    head: Head, state: Array, keys: Array, values: Array, inputs: _Inputs, i: Array | int
) -> tuple[Array, Array, Array]:
    """Runs step i. Returns its state, and the keys and values [steps, b, t, k, d], of all steps or up to this one."""
    embeds, positions, segment_ids, row = inputs

    def attend(q: Array, k: Array, v: Array | None = None, window: int | None = None) -> Array:
        nonlocal keys, values
        v = k if v is None else v
        if isinstance(i, int):
            keys, values = jnp.concatenate([keys, k[None]]), jnp.concatenate([values, v[None]])
        else:
            keys, values = keys.at[i].set(k), values.at[i].set(v)
        return ttt_attention(q, keys, values, segment_ids, i, window=window, **row)

    following = jax.lax.dynamic_slice_in_dim(embeds, 1 + i, state.shape[1], axis=1)
    return whole_states(head(following, state, _pass(positions + i), attend)), keys, values


def _pass(positions: Array) -> Pass:  # which reads no cache
    return Pass(positions, jnp.zeros(len(positions), jnp.int32))


def _first_keys(head: Head, state: Array, embeds: Array, positions: Array, split: Split) -> tuple[Array, Array]:
    """Computes the keys and values of step 0 in whole rows, once for all steps; of a step nothing else is computed."""
    own = []

    def keep(q: Array, k: Array, v: Array | None = None, window: int | None = None) -> Array:
        own.extend((k, k if v is None else v))
        return q

    head(embeds[:, 1 : 1 + state.shape[1]], state, _pass(positions), keep)

    def gather(*own: Array) -> tuple[Array, ...]:
        return tuple(map(split.gathered, own))

    # By KV head: the partitioner would not split what explicit collectives read.
    heads = (P(None, None, "model"),) * 2
    return over_mesh(gather, own, heads, heads, {"model": head.config.num_key_value_heads})
