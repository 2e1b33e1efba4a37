"""Attention of the training-time test (EAGLE-3, arXiv 2503.01840, section 3.2).

At step i a position attends to the keys of step 0 up to itself, in its own document, and to its own key of each later
step. This is the part of a causal attention over i + 1 times as many tokens that drafting sees.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.dispatch import Implementation, choose
from eagle3_jax.kernels.ttt_attention.xla import attend_xla


def ttt_attention(
    queries: Float[Array, "b t n d"],
    keys: Float[Array, "s b t k d"],
    values: Float[Array, "s b t k d"],
    segment_ids: Int[Array, "b row"],
    newest: Int[Array, ""] | int,
    *,
    window: int | None = None,
    row: tuple[Float[Array, "b row k d"], Float[Array, "b row k d"]] | None = None,
    begin: Int[Array, ""] | int = 0,
    implementation: Implementation | None = None,
    interpret: Any = False,
) -> Float[Array, "b t n d"]:
    """Attends to the visible keys of step 0 and to the position's own key of each later step, under one softmax.

    Memory is O(t), in the backward pass too.

    Args:
        queries: queries of step `newest`, n = group * k query heads, grouped by KV head.
        keys, values: keys and values of all steps; those beyond `newest` may hold anything and get no gradient.
        segment_ids: document of each token of the rows; a document is one contiguous stretch of its row.
        window: positions that a query sees, its own (the index plus `newest`) included: at least the number of steps,
            so that each query sees its own key of every step. None is no limit.
        row: keys and values of step 0 in whole rows, where the queries are a stretch of these; step 0 of `keys` and
            `values` is not read then. None: the queries are whole rows.
        begin: index in their rows of the first queries.
        implementation: the default is "pallas" on a TPU and "xla" elsewhere.
        interpret: runs the Pallas kernels without a TPU; `pltpu.InterpretParams` included.

    Returns:
        In the queries' dtype; scores, softmax and sums are float32.

    Raises:
        ValueError: heads too large for the kernels' VMEM; with the numbers.
    """
    newest, begin = jnp.asarray(newest, jnp.int32), jnp.asarray(begin, jnp.int32)
    starts = jax.lax.dynamic_slice_in_dim(document_starts(segment_ids), begin, queries.shape[1], axis=1)
    if window is not None:  # a query stands `newest` positions behind its index
        own = begin + jnp.arange(queries.shape[1], dtype=jnp.int32)[None]
        starts = jnp.maximum(starts, own + newest - window + 1)
    first_keys, first_values = (keys[0], values[0]) if row is None else row
    operands = queries, first_keys, first_values, keys[1:], values[1:], starts, begin, newest
    if choose(implementation, pallas=True) == "pallas":
        from eagle3_jax.kernels.ttt_attention.tpu import attend_tpu

        return attend_tpu(interpret, *operands)
    return attend_xla(*operands)


def document_starts(segment_ids: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """Returns the first index of each position's document."""
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
