"""The key-value cache: append and attend, commit.

A cache is passed in and returned, never mutated; callers donate it. Contiguous: each sequence owns `slots` slots per
layer. Paged: each `Pass` names the page of each page_size slots of a sequence. The cache has no lengths: the caller
keeps them, and counts committed tokens only.
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
class Pass:
    """Where the t new tokens of each sequence stand, and what they see: made once a pass, read by every layer.

    Attributes:
        positions: RoPE positions (committed length + depth in the tree).
        lengths: committed tokens in the cache; the new ones are written behind them.
        tail_mask: which of the m tail slots each new token sees: its ancestors and itself; None is causal. The new
            tokens take the last t slots; the earlier slots hold entries of earlier passes.
        tail_positions: positions of the tail slots that a token sees; None: what lies behind a slot counts.
        pages: the page of each page_size slots of each sequence; None where caches are contiguous.
        starts: the slot at which each token's document begins, if rows hold several; a token sees no earlier slot.
        row: index of each sequence's only pair whose state a head computes; None is every pair.
        preceding: the token before the pairs that a head reads, given at the start of a chunk of a prompt: a draft
            without features may not have read it. Others do not need it, since the first feature depends on it.
        continued: whether a sequence may continue the one before it in the batch, on the same pages.
    """

    positions: Int[Array, "b t"]
    lengths: Int[Array, " b"]
    tail_mask: Bool[Array, "b t m"] | None = None
    tail_positions: Int[Array, "b t m"] | None = None
    pages: Int[Array, "b pages"] | None = None
    starts: Int[Array, "b t"] | None = None
    row: Int[Array, " b"] | None = None
    preceding: Int[Array, "b 1"] | None = None
    continued: bool = dataclasses.field(default=False, metadata={"static": True})

    def with_tail_positions(self) -> Pass:
        """Fills `tail_positions`: an ancestor k levels above a node has k visible slots behind it."""
        if self.tail_mask is None or self.tail_positions is not None:
            return self
        seen = jnp.cumsum(self.tail_mask, axis=-1, dtype=jnp.int32)
        return dataclasses.replace(self, tail_positions=self.positions[:, :, None] - (seen[..., -1:] - seen))


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
        this: Pass,
        first: Int[Array, "b t"] | None = None,
        sinks: Float[Array, " n"] | None = None,
    ) -> tuple[Float[Array, "b t n d"], KVCache]:
        """Writes t new entries at the tail's end, and attends from them; for a cache of one layer (see `layer`).

        Args:
            first, sinks: see `tree_attention`.
        """
        attended, keys, values = tree_attention(
            queries,
            keys,
            values,
            self.keys[0],
            self.values[0],
            this.lengths,
            this.tail_mask,
            page_table=this.pages,
            continued=this.continued,
            first=first,
            sinks=sinks,
        )
        return attended, dataclasses.replace(self, keys=(keys,), values=(values,))

    def append(self, keys: Float[Array, "b t k d"], values: Float[Array, "b t k d"], this: Pass) -> KVCache:
        """Writes t new entries behind `lengths`, without attention. Of a cache of one layer (see `layer`)."""
        kept, stored = append(
            keys, values, self.keys[0], self.values[0], this.lengths, page_table=this.pages, continued=this.continued
        )
        return dataclasses.replace(self, keys=(kept,), values=(stored,))

    def commit(self, this: Pass, path: Int[Array, "b p"]) -> KVCache:
        """Moves the accepted path to the front of the tail: slot length + path[j] goes to length + j.

        Args:
            path: int32 indices into the tail, ascending; after the accepted ones the last may be repeated.
        """
        kept = commit((*self.keys, *self.values), this.lengths, path, page_table=this.pages)
        return dataclasses.replace(self, keys=kept[: len(self.keys)], values=kept[len(self.keys) :])


class CachedAttention:
    """The attention of one layer, while a program is traced.

    Attributes:
        cache: the layer's own, with the new entries once the layer has attended.
    """

    def __init__(self, this: Pass, cache: KVCache) -> None:
        self._this, self.cache = this, cache

    def __call__(
        self,
        queries: Float[Array, "b t n d"],
        keys: Float[Array, "b t k d"],
        values: Float[Array, "b t k d"],
        *,
        window: int | None = None,
        chunk: int | None = None,
        sinks: Float[Array, " n"] | None = None,
    ) -> Float[Array, "b t n d"]:
        """Writes the layer's cache, and attends.

        Args:
            window: a token sees the last `window` positions. chunk: it sees its own chunk of `chunk` positions.
            sinks: see `tree_attention`.
        """
        this = self._this
        first, begin = this.starts, 0 if this.starts is None else this.starts
        if window is not None:
            first = begin + jnp.maximum(this.positions - window + 1, 0)
        if chunk is not None:
            first = begin + this.positions // chunk * chunk
        if this.tail_mask is not None and this.tail_positions is not None and first is not None:
            this = dataclasses.replace(this, tail_mask=this.tail_mask & (this.tail_positions >= first[:, :, None]))
        attended, self.cache = self.cache.append_and_attend(queries, keys, values, this, first, sinks)
        return attended


def _replace(arrays: tuple[Array, ...], index: int, new: Array) -> tuple[Array, ...]:
    return (*arrays[:index], new, *arrays[index + 1 :])
