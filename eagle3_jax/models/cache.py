"""The key-value cache: append and attend, commit.

A cache is passed in and returned, never mutated; callers donate it. Contiguous: each sequence owns `slots` slots per
layer. Paged: a `PageTable`, an argument of each pass, names the page of each page_size slots of a sequence. The cache
has no lengths: the caller keeps them, and counts committed tokens only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.kernels.cache.api import commit
from eagle3_jax.kernels.tree_attention.api import append, tree_attention
from eagle3_jax.kernels.tree_attention.packed_heads import SLOTS, cache_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageTable:
    """Locates a pass's sequences in paged caches.

    Attributes:
        pages: the page of each page_size slots of each sequence.
        continued: whether a sequence may continue the one before it in the batch, on the same pages.
    """

    pages: Int[Array, "b pages"]
    continued: bool = dataclasses.field(default=False, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer.

    Attributes:
        keys, values: one array per layer: [batch, kv_heads, slots, head_dim], or [pages, kv_heads, page_size,
            head_dim]; on a TPU a row may hold several heads (`kernels/tree_attention/packed_heads.py`).
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]

    @classmethod
    def empty(cls, layers: int, batch: int, kv_heads: int, slots: int, head_dim: int, dtype: Any) -> KVCache:
        """Allocates at least `slots` entries per sequence, in a multiple of what the attention kernel for TPU reads."""
        return cls.pages(layers, batch, kv_heads, -(-slots // SLOTS) * SLOTS, head_dim, dtype)

    @classmethod
    def pages(cls, layers: int, pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: Any) -> KVCache:
        """Allocates free pages, for the current mesh."""
        rows, width = cache_rows(kv_heads, head_dim)

        def zeros() -> tuple[Array, ...]:
            return tuple(jnp.zeros((pages, rows, page_size, width), dtype) for _ in range(layers))

        return cls(zeros(), zeros())

    def layer(self, index: int) -> KVCache:
        """Returns the cache of one layer."""
        return dataclasses.replace(self, keys=self.keys[index : index + 1], values=self.values[index : index + 1])

    def with_layer(self, index: int, own: KVCache) -> KVCache:
        """Returns the cache with `layer(index)` replaced."""
        keys, values = _replace(self.keys, index, own.keys[0]), _replace(self.values, index, own.values[0])
        return dataclasses.replace(self, keys=keys, values=values)

    def append_and_attend(
        self,
        queries: Float[Array, "b t n d"],
        keys: Float[Array, "b t k d"],
        values: Float[Array, "b t k d"],
        lengths: Int[Array, " b"],
        tail_mask: Bool[Array, "b t m"] | None,
        page_table: PageTable | None = None,
        **options: Any,
    ) -> tuple[Float[Array, "b t n d"], KVCache]:
        """Writes t new entries at the tail's end, and attends from them; for a cache of one layer (see `layer`).

        Args:
            page_table: None where the cache is contiguous.
            options: `first` and `sinks` of `tree_attention`.
        """
        attended, keys, values = tree_attention(
            queries,
            keys,
            values,
            self.keys[0],
            self.values[0],
            lengths,
            tail_mask,
            page_table=None if page_table is None else page_table.pages,
            continued=page_table is not None and page_table.continued,
            **options,
        )
        return attended, dataclasses.replace(self, keys=(keys,), values=(values,))

    def append(
        self,
        keys: Float[Array, "b t k d"],
        values: Float[Array, "b t k d"],
        lengths: Int[Array, " b"],
        page_table: PageTable | None = None,
    ) -> KVCache:
        """Writes t new entries behind `lengths`, without attention. Of a cache of one layer (see `layer`)."""
        kept, stored = append(
            keys,
            values,
            self.keys[0],
            self.values[0],
            lengths,
            page_table=None if page_table is None else page_table.pages,
            continued=page_table is not None and page_table.continued,
        )
        return dataclasses.replace(self, keys=(kept,), values=(stored,))

    def commit(
        self, lengths: Int[Array, " b"], path: Int[Array, "b p"], page_table: PageTable | None = None
    ) -> KVCache:
        """Moves the accepted path to the front of the tail: slot length + path[j] goes to length + j.

        Args:
            path: int32 indices into the tail, ascending; after the accepted ones the last may be repeated.
        """
        pages = None if page_table is None else page_table.pages
        kept = commit((*self.keys, *self.values), lengths, path, page_table=pages)
        return dataclasses.replace(self, keys=kept[: len(self.keys)], values=kept[len(self.keys) :])


def _replace(arrays: tuple[Array, ...], index: int, new: Array) -> tuple[Array, ...]:
    return (*arrays[:index], new, *arrays[index + 1 :])
