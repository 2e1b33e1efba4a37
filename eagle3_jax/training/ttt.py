"""The training-time test: K drafting steps from every position at once (EAGLE-3, arXiv 2503.01840, section 3.2).

At step i the pair at index t is (token t+1+i, the head's own output of step i-1 at the same t), just as when drafting
from a prefix that ends at t. It attends the true features (step 0) up to t, and behind them one key of each later step
at t itself. Tokens are the document's, so that all positions run in parallel.

On a TPU the steps are one loop, so that a program holds one of them whatever their number.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from eagle3_jax.kernels.dispatch import default_implementation
from eagle3_jax.kernels.ttt_attention.api import KEPT, ttt_attention
from eagle3_jax.models.drafts.eagle3 import DraftHead
from eagle3_jax.models.layers import embeddings
from eagle3_jax.training.batch import Batch

# What all steps share: embeddings of the tokens, positions, documents.
_Inputs = tuple[Array, Array, Array]
# What `remat` keeps of a step: the products with weights, and attention.
_POLICY = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable, jax.checkpoint_policies.save_only_these_names(KEPT)
)


def training_time_test(
    head: DraftHead, embed: Float[Array, "v h"], batch: Batch, steps: int, remat: bool = False
) -> Float[Array, "steps b t h"]:
    """The LM head's inputs at every step and position.

    Args:
        embed: the target's embedding table (frozen); its dtype is the compute dtype.
        remat: keep of each step its matrix products and attention, and compute the rest again in the backward pass.

    Returns:
        `states[i, :, t]` predicts token t+2+i of the document. Where t+1+i is beyond the document's end, or padding,
        it holds garbage that no other position ever reads.
    """
    embeds = embeddings(jax.lax.stop_gradient(embed), batch.token_ids)
    inputs = jnp.pad(embeds, ((0, 0), (0, steps), (0, 0))), batch.positions, batch.segment_ids
    state, c = head.fuse(batch.aux.astype(embed.dtype)), head.config
    cache = jnp.zeros((steps, *state.shape[:2], c.num_key_value_heads, c.head_dim), state.dtype)
    # Unrolled steps would be merged with what the backward pass computes again; those of a loop cannot be.
    step = jax.checkpoint(_step, policy=_POLICY, prevent_cse=_unroll(steps) > 1) if remat else _step

    def body(carry: tuple[Array, Array, Array], i: Array) -> tuple[tuple[Array, Array, Array], Array]:
        state, keys, values = step(head, *carry, inputs, i)
        return (state, keys, values), state

    _, states = jax.lax.scan(body, (state, cache, cache), jnp.arange(steps), unroll=_unroll(steps))
    return head.output_hidden(states)


def _unroll(steps: int) -> int:
    """On a CPU programs compile fast, and steps whose number is known do not compute what they would mask."""
    return steps if default_implementation() == "xla" else 1


def _step(
    head: DraftHead, state: Array, keys: Array, values: Array, inputs: _Inputs, i: Array
) -> tuple[Array, Array, Array]:
    """The state after step i, and the keys and values [steps, b, t, k, d] with its own among them."""
    embeds, positions, segment_ids = inputs

    def attend(q: Array, k: Array, v: Array) -> Array:
        nonlocal keys, values
        keys, values = keys.at[i].set(k), values.at[i].set(v)
        return ttt_attention(q, keys, values, segment_ids, i)

    following = jax.lax.dynamic_slice_in_dim(embeds, 1 + i, state.shape[1], axis=1)
    return head(following, state, positions + i, attend), keys, values
