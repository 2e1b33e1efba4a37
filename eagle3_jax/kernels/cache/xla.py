"""Writes and moves entries of a key or value cache in XLA's operations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Num


def write(
    cache: Num[Array, "p k s d"],
    new: Num[Array, "b k t d"],
    at: Int[Array, " b"],
    page_table: Int[Array, "b pages"] | None = None,
) -> Num[Array, "p k s d"]:
    """Writes t new entries of each sequence from slot `at` on; see `cache.api.commit`. `at + t` must fit the slots."""
    new = new.astype(cache.dtype)
    if page_table is not None:
        slots = at[:, None] + jnp.arange(new.shape[2])[None]
        pages = jnp.take_along_axis(page_table, slots // cache.shape[2], axis=1)
        return cache.at[pages, :, slots % cache.shape[2]].set(new.swapaxes(1, 2), unique_indices=True)
    if cache.shape[0] == 1 and new.shape[2] == 1:
        # XLA for CPU fuses a slice update of one token into the next reader of the cache and runs it twice, each time
        # on a copy of the cache. A scatter stays in place.
        heads = jnp.arange(cache.shape[1])
        return cache.at[jnp.zeros_like(heads), heads, at].set(new[0, :, 0], unique_indices=True)
    if cache.shape[0] == 1:  # a batched start index lowers to a scatter; one sequence does not need it
        return jax.lax.dynamic_update_slice(cache, new, (0, 0, at[0], 0))
    return jax.vmap(lambda c, x, i: jax.lax.dynamic_update_slice(c, x, (0, i, 0)))(cache, new, at)


def commit(
    cache: Num[Array, "rows k s d"],
    lengths: Int[Array, " b"],
    path: Int[Array, "b p"],
    page_table: Int[Array, "b pages"] | None,
) -> Num[Array, "rows k s d"]:
    """Commits in one cache; see `cache.api.commit`."""
    source = lengths[:, None] + path
    if page_table is None:
        moved = jnp.take_along_axis(cache, source[:, None, :, None], axis=2, mode="clip")
    else:
        pages = jnp.take_along_axis(page_table, source // cache.shape[2], axis=1, mode="clip")
        moved = cache[pages, :, source % cache.shape[2]].swapaxes(1, 2)
    return write(cache, moved, lengths, page_table)
