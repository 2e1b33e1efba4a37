"""Tree attention in plain XLA operations: what runs where the Pallas kernel does not.

On a CPU pages are read one by one, with a running softmax over those in use (FlashAttention's): what a sequence does
not fill costs nothing. Elsewhere they are gathered into rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from eagle3_jax.kernels.cache_write import write

_LEAST = float(jnp.finfo(jnp.float32).min)


def attend_xla(
    queries: Float[Array, "b t n d"],
    new_keys: Array,
    new_values: Array,
    keys: Array,
    values: Array,
    lengths: Int[Array, " b"],
    tail_mask: Bool[Array, "b t m"] | None,
    page_table: Int[Array, "b pages"] | None,
    first: Int[Array, "b t"] | None,
    sinks: Float[Array, " n"] | None,
) -> tuple[Float[Array, "b t n d"], Array, Array]:
    """See `tree_attention`. New entries come as the cache holds them; `first` is the first slot of each query."""
    end = lengths + (queries.shape[1] if tail_mask is None else tail_mask.shape[-1])
    at = end - queries.shape[1]
    keys, values = write(keys, new_keys, at, page_table), write(values, new_values, at, page_table)
    if page_table is None:
        return _attended(queries, keys, values, lengths, tail_mask, first, sinks), keys, values

    def rows() -> Array:
        seen_keys, seen_values = (_gathered(cache, page_table, end) for cache in (keys, values))
        return _attended(queries, seen_keys, seen_values, lengths, tail_mask, first, sinks)

    def loop() -> Array:
        return _page_by_page(queries, keys, values, lengths, tail_mask, page_table, first, sinks)

    return jax.lax.platform_dependent(cpu=loop, default=rows), keys, values


def _gathered(
    pages: Num[Array, "p k s d"], page_table: Int[Array, "b n"], written: Int[Array, " b"]
) -> Num[Array, "b k slots d"]:
    """Each sequence's pages in a row, zeros where nothing was written."""
    found = jnp.take(pages, page_table, axis=0, mode="clip")  # [b, n, k, s, d]
    b, n, k, s, d = found.shape
    row = found.swapaxes(1, 2).reshape(b, k, n * s, d)
    slots = jnp.arange(n * s)[None, None, :, None]
    return jnp.where(slots < written[:, None, None, None], row, jnp.zeros((), row.dtype))


def _attended(
    queries: Float[Array, "b t n d"],
    keys: Array,
    values: Array,
    lengths: Int[Array, " b"],
    tail_mask: Bool[Array, "b t m"] | None,
    first: Int[Array, "b t"] | None,
    sinks: Float[Array, " n"] | None,
) -> Float[Array, "b t n d"]:
    b, t, n, d = queries.shape
    kv_heads, slots = keys.shape[1], keys.shape[2]
    keys, values = keys.astype(queries.dtype), values.astype(queries.dtype)
    tail = jnp.arange(slots)[None, :] - lengths[:, None]  # [b, s], index into the tail
    if tail_mask is None:
        visible = tail[:, None, :] <= jnp.arange(t)[None, :, None]
    else:
        m = tail_mask.shape[-1]
        inside = jnp.take_along_axis(tail_mask, jnp.clip(tail, 0, m - 1)[:, None, :], axis=-1)
        visible = (tail < 0)[:, None, :] | (inside & (tail >= 0)[:, None, :] & (tail < m)[:, None, :])
    if first is not None:
        visible &= jnp.arange(slots)[None, None, :] >= first[:, :, None]
    rows = queries.reshape(b, t, kv_heads, n // kv_heads, d).transpose(0, 2, 3, 1, 4).reshape(b, kv_heads, -1, d)
    scores = jnp.einsum(
        "bkrd,bksd->bkrs", rows, keys, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    scores = scores.reshape(b, kv_heads, -1, t, slots) * d**-0.5
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(kv_heads, -1, 1, 1), (*scores.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1]
    weights = weights.astype(values.dtype).reshape(b, kv_heads, -1, slots)
    attended = jnp.einsum("bkrs,bksd->bkrd", weights, values, precision=jax.lax.Precision.HIGHEST)
    return attended.reshape(b, kv_heads, -1, t, d).transpose(0, 3, 1, 2, 4).reshape(b, t, n, d)


def _page_by_page(
    queries: Float[Array, "b t n d"],
    keys: Num[Array, "p k s d"],
    values: Num[Array, "p k s d"],
    lengths: Int[Array, " b"],
    tail_mask: Bool[Array, "b t m"] | None,
    page_table: Int[Array, "b pages"],
    first: Int[Array, "b t"] | None,
    sinks: Float[Array, " n"] | None,
) -> Float[Array, "b t n d"]:
    b, t, n, d = queries.shape
    _, heads, size, _ = keys.shape
    group = n // heads
    rows = queries.reshape(b, t, heads, group, d).transpose(0, 2, 3, 1, 4).reshape(b, heads, -1, d)
    tail = t if tail_mask is None else tail_mask.shape[-1]
    slots = jnp.arange(size)

    def page_of(cache: Array, page: Array) -> Array:
        return jax.lax.dynamic_index_in_dim(cache, page, 0, keepdims=False).astype(queries.dtype)

    def sequence(i: Array, attended: Array) -> Array:
        query, length = rows[i], lengths[i]

        def visible(start: Array) -> Bool[Array, "t s"]:
            behind = start + slots - length  # index into the tail
            if tail_mask is None:
                seen = behind[None] <= jnp.arange(t)[:, None]
            else:
                inside = jnp.take(tail_mask[i], jnp.clip(behind, 0, tail - 1), axis=1)
                seen = (behind < 0)[None] | (inside & ((behind >= 0) & (behind < tail))[None])
            return seen if first is None else seen & (start + slots[None] >= first[i][:, None])

        def page(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            best, total, sums = carry
            number, start = page_table[i, j], j * size
            scores = jnp.einsum(
                "krd,ksd->krs",
                query,
                page_of(keys, number),
                precision=jax.lax.Precision.HIGHEST,
                preferred_element_type=jnp.float32,
            )
            scores = jnp.where(visible(start)[None, None], scores.reshape(heads, group, t, size) * d**-0.5, _LEAST)
            scores = scores.reshape(heads, -1, size)
            better = jnp.maximum(best, scores.max(axis=-1, keepdims=True))
            weights, shrink = jnp.exp(scores - better), jnp.exp(best - better)
            # Nothing was written behind the tail: what is there may be no number, and 0 times that is none either.
            written = jnp.where((start + slots < length + tail)[None, :, None], page_of(values, number), 0)
            gained = jnp.einsum(
                "krs,ksd->krd",
                weights.astype(queries.dtype),
                written,
                precision=jax.lax.Precision.HIGHEST,
                preferred_element_type=jnp.float32,
            )
            return better, total * shrink + weights.sum(axis=-1, keepdims=True), sums * shrink + gained

        zeros = jnp.zeros((heads, group * t, 1), jnp.float32)
        begin = zeros + _LEAST, zeros, jnp.zeros((heads, group * t, d), jnp.float32)
        if sinks is not None:
            begin = (
                jnp.repeat(sinks.astype(jnp.float32).reshape(heads, group), t, axis=1)[..., None],
                zeros + 1,
                begin[2],
            )
        _, total, sums = jax.lax.fori_loop(0, (length + tail + size - 1) // size, page, begin)
        return jax.lax.dynamic_update_index_in_dim(attended, (sums / total).astype(queries.dtype), i, 0)

    attended = jax.lax.fori_loop(0, b, sequence, jnp.zeros((b, heads, group * t, d), queries.dtype))
    return attended.reshape(b, heads, group, t, d).transpose(0, 3, 1, 2, 4).reshape(b, t, n, d)
