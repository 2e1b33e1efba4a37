"""Attention of new tokens to a committed prefix and to their own tail under an ancestor mask.

One function serves prefill (empty prefix, causal tail), one-token decode (a tail of one), drafting a tree and verifying
it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.kernels.cache.xla import write
from eagle3_jax.kernels.dispatch import Implementation, choose
from eagle3_jax.kernels.tree_attention import cpu
from eagle3_jax.kernels.tree_attention.cpu import attend_cpu
from eagle3_jax.kernels.tree_attention.xla import Operands, attend_xla


def tree_attention(
    queries: Float[Array, "b t n d"],
    new_keys: Float[Array, "b t k d"],
    new_values: Float[Array, "b t k d"] | None,
    keys: Array,
    values: Array | None,
    lengths: Int[Array, " b"],
    tail_mask: Bool[Array, "b t m"] | None = None,
    *,
    page_table: Int[Array, "b pages"] | None = None,
    continued: bool = False,
    first: Int[Array, "b t"] | None = None,
    sinks: Float[Array, " n"] | None = None,
    implementation: Implementation | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "b t n d"], Array, Array | None]:
    """Writes the new tokens' keys and values at the tail's end, then attends.

    Computes softmax(q k^T / sqrt(d)) v over the slots [0, length) and the visible slots of the tail [length, length +
    m). The last t slots of the tail hold the new tokens.

    Args:
        queries: n = group * k query heads, grouped by KV head.
        new_keys, new_values: those of the new tokens; the cache stores them in its dtype, those beyond the range of
            float8 clipped. No values: the keys are the values too, and so in the cache.
        keys, values: the cache, contiguous [b, k, slots, d], or with a page table [pages, k, page_size, d]. On a TPU a
            row may hold several heads and padding (`packed_heads.cache_rows`). Any float dtype, float8 included; read
            in the queries' dtype. Donated caches are written in place. Sequences must not share a page that is written,
            unless `continued`.
        lengths: int32, committed tokens of each sequence; length + m must not exceed the slots.
        tail_mask: which of the m >= t tail slots each query sees, at least one. None is causal, with m = t.
        page_table: int32, the page of each page_size slots; entries beyond the tail may hold anything.
        continued: sequences may be consecutive stretches of one prompt, on the same pages. All entries are written
            before any query attends.
        first: int32, the first slot that each query sees (start of its window or chunk). A tree node's slot is not its
            position, so the mask must hide tail slots that are too far back.
        sinks: a logit per query head that joins the softmax and has no value (gpt-oss).
        implementation: the default is "pallas" on a TPU, "cpu" on a CPU where the kernel supports the arguments
            (`cpu.supports`), and "xla" elsewhere.
        interpret: runs the Pallas kernel without a TPU; `pltpu.InterpretParams` included.

    Returns:
        The attended values in the queries' dtype, and the keys and values with the new entries. Scores, softmax and
        sums are float32; all other slots are unchanged.

    Raises:
        ValueError: a tail shorter than the new tokens; on a TPU, slots or pages that the kernel cannot read, or that do
            not fit into VMEM (with the numbers).
    """
    t = queries.shape[1]
    if tail_mask is not None and tail_mask.shape[-1] < t:
        raise ValueError(f"tail_mask: got {tail_mask.shape[-1]} slots, expected at least {t}, one per new token")
    new_keys, new_values = jax.tree.map(lambda x: _stored(x, keys.dtype), (new_keys, new_values))
    operands = Operands(queries, new_keys, new_values, keys, values, lengths, tail_mask, page_table, first, sinks)
    on_cpu = first is None and sinks is None and cpu.supports(queries.dtype, keys.dtype, queries.shape[3])
    chosen = choose(implementation, pallas=True, cpu=on_cpu)
    if chosen == "pallas":
        from eagle3_jax.kernels.tree_attention.tpu import attend_tpu

        return attend_tpu(operands, continued=continued, interpret=interpret)
    return attend_cpu(operands) if chosen == "cpu" else attend_xla(operands)


def append(
    new_keys: Float[Array, "b t k d"],
    new_values: Float[Array, "b t k d"] | None,
    keys: Array,
    values: Array | None,
    lengths: Int[Array, " b"],
    *,
    page_table: Int[Array, "b pages"] | None = None,
    continued: bool = False,
    implementation: Implementation | None = None,
    interpret: Any = False,
) -> tuple[Array, Array | None]:
    """Writes the new tokens' keys and values behind `lengths`, as `tree_attention` does, without attention.

    On a TPU its kernel does so: each query, of zeros, sees its own slot alone, and no other block is read. A scatter
    would have the cache in another layout, and each program would copy all of it.
    """
    new_keys, new_values = jax.tree.map(lambda x: _stored(x, keys.dtype), (new_keys, new_values))
    if choose(implementation, pallas=True) == "pallas":
        from eagle3_jax.kernels.tree_attention.tpu import attend_tpu

        b, kv_heads, t, d = new_keys.shape
        first = lengths[:, None] + jnp.arange(t, dtype=lengths.dtype)[None]
        queries = jnp.zeros((b, t, kv_heads, d), keys.dtype)
        operands = Operands(queries, new_keys, new_values, keys, values, lengths, None, page_table, first, None)
        return attend_tpu(operands, continued=continued, interpret=interpret)[1:]
    new, caches = (new_keys, new_values), (keys, values)
    return jax.tree.map(lambda cache, x: write(cache, x, lengths, page_table), caches, new)


def _stored(new: Float[Array, "b t k d"], dtype: Any) -> Float[Array, "b k t d"]:
    """Converts new entries to the cache's dtype and order of axes."""
    new, limits = new.swapaxes(1, 2), jnp.finfo(dtype)
    return (jnp.clip(new, float(limits.min), float(limits.max)) if limits.bits == 8 else new).astype(dtype)
