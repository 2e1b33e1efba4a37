"""The training-time test: K drafting steps from every position at once (EAGLE3_SPEC sections 2.1 and 2.2).

At step i the pair at index t is (token t+1+i, the head's own output of step i-1 at the same t), just as when drafting
from a prefix that ends at t. It attends the true features (step 0) up to t, and behind them one key of each later step
at t itself. Tokens are the document's, so that all positions run in parallel.

On a TPU the steps are one loop, so that a program holds one of them whatever their number.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from eagle3_jax.kernels.dispatch import default_implementation
from eagle3_jax.kernels.ttt_attention import ttt_attention
from eagle3_jax.models.draft import DraftHead
from eagle3_jax.training.batch import Batch

# What all steps share: embeddings of the tokens, positions, documents.
_Inputs = tuple[Array, Array, Array]


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
    inputs = jnp.pad(embeds, ((0, 0), (0, steps), (0, 0))), batch.positions, batch.segment_ids
    run: Any = _run_again_backwards if remat else _run
    states = run(steps, head, head.fuse(batch.aux.astype(embed.dtype)), inputs)[0]
    return head.output_hidden(states)


def _run(steps: int, head: Any, state: Array, inputs: _Inputs) -> tuple[Array, Array, Array]:
    """States after each step [steps, b, t, h], and keys and values of all steps [steps, b, t, k, d]."""
    c = head.config
    cache = jnp.zeros((steps, *state.shape[:2], c.num_key_value_heads, c.head_dim), state.dtype)

    def body(carry: tuple[Array, Array, Array], i: Array) -> tuple[tuple[Array, Array, Array], Array]:
        state, keys, values = carry
        state, key, value = _step(head, state, keys, values, inputs, i)
        return (state, keys.at[i].set(key), values.at[i].set(value)), state

    (_, keys, values), states = jax.lax.scan(body, (state, cache, cache), jnp.arange(steps), unroll=_unroll(steps))
    return states, keys, values


def _unroll(steps: int) -> int:
    """On a CPU programs compile fast, and steps whose number is known do not compute what they would mask."""
    return steps if default_implementation() == "xla" else 1


def _step(
    head: DraftHead, state: Array, keys: Array, values: Array, inputs: _Inputs, i: Array
) -> tuple[Array, Array, Array]:
    """The state after step i, and the step's keys and values [b, t, k, d]; those in `keys`, `values` end before it."""
    embeds, positions, segment_ids = inputs
    added: list[Array] = []

    def attend(q: Array, k: Array, v: Array) -> Array:
        added.extend((k, v))
        return ttt_attention(q, keys.at[i].set(k), values.at[i].set(v), segment_ids, i)

    following = jax.lax.dynamic_slice_in_dim(embeds, 1 + i, state.shape[1], axis=1)
    state = head(following, state, positions + i, attend)
    return state, added[0], added[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_again_backwards(steps: int, head: Any, state: Array, inputs: _Inputs) -> tuple[Array, Array, Array]:
    """`_run`, of which the backward pass keeps states, keys and values and computes the rest again, step by step."""
    return _run(steps, head, state, inputs)


def _forward(steps: int, head: Any, state: Array, inputs: _Inputs) -> tuple[tuple[Array, Array, Array], Any]:
    outputs = _run(steps, head, state, inputs)
    return outputs, (head, state, inputs, outputs)


def _backward(steps: int, saved: Any, cotangents: tuple[Array, Array, Array]) -> tuple[Any, Array, None]:
    head, state, inputs, (states, keys, values) = saved
    before = jnp.concatenate([state[None], states[:-1]])

    def body(carry: Any, step: tuple[Array, Array, Array]) -> tuple[Any, None]:
        d_head, d_state, d_keys, d_values = carry
        i, state, d_output = step
        _, pull = jax.vjp(lambda head, x, k, v: _step(head, x, k, v, inputs, i), head, state, keys, values)
        own = d_keys[i].astype(keys.dtype), d_values[i].astype(values.dtype)
        more_head, d_state, more_keys, more_values = pull((d_state + d_output, *own))
        d_head = jax.tree.map(jnp.add, d_head, more_head)
        return (d_head, d_state, d_keys + more_keys, d_values + more_values), None

    d_states, d_keys, d_values = cotangents
    start = (
        jax.tree.map(jnp.zeros_like, head),
        jnp.zeros_like(state),
        *(x.astype(jnp.float32) for x in (d_keys, d_values)),
    )
    (d_head, d_state, *_), _ = jax.lax.scan(body, start, (jnp.arange(steps), before, d_states), reverse=True)
    return d_head, d_state, None


_run_again_backwards.defvjp(_forward, _backward)
