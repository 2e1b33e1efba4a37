"""The cache of a sequence's past, a layer's own kind for each layer: keys and values, or a recurrent state.

A cache is passed in and returned, never mutated; callers donate it. A layer asks the `Pass` and its own cache. Keys and
values are contiguous, each sequence owning `slots` slots per layer, or paged: each pass names the page of each
page_size slots of a sequence. A recurrent layer has one slot of state per sequence. The cache has no lengths: the
caller keeps them, and counts committed tokens only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.kernels.cache.api import commit
from eagle3_jax.kernels.gated_delta.solve import Tokens
from eagle3_jax.kernels.tree_attention.api import append, tree_attention
from eagle3_jax.kernels.tree_attention.chosen import Index, attend_chosen, best_slots
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
        states: each sequence's slot of recurrent state; None: its own row.
        counts: how many of the new tokens a recurrent layer commits at once, those of a prompt; None: `Cache.commit`
            follows, and the pass's inputs wait for it.
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
    states: Int[Array, " b"] | None = None
    counts: Int[Array, " b"] | None = None
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
    """Keys and values of one layer: [batch, kv_heads, slots, head_dim], or [pages, kv_heads, page_size, head_dim].

    On a TPU a row may hold several heads (`kernels/tree_attention/packed_heads.py`). Without values the keys are
    latents, of which the layer makes both; `index` then has the keys of an indexer, if the layer has one.
    """

    keys: Array
    values: Array | None = None
    index: Array | None = None

    @classmethod
    def pages(
        cls, pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: Any, latent: bool = False, index: int = 0
    ) -> KVCache:
        """Allocates free pages, for the current mesh; `latent` ones without values; `index`: width of its keys."""

        def free(heads: int, width: int) -> Array:
            rows, width = cache_rows(heads, width)
            return jnp.zeros((pages, rows, page_size, width), dtype)

        values, own = None if latent else free(kv_heads, head_dim), free(1, index) if index else None
        return cls(free(kv_heads, head_dim), values, own)

    def append_and_attend(
        self,
        queries: Float[Array, "b t n d"],
        keys: Float[Array, "b t k d"],
        values: Float[Array, "b t k d"] | None,
        this: Pass,
        first: Int[Array, "b t"] | None = None,
        sinks: Float[Array, " n"] | None = None,
        chosen: Int[Array, "b t c"] | None = None,
    ) -> tuple[Float[Array, "b t n d"], KVCache]:
        """Writes t new entries at the tail's end, and attends from them; `first` and `sinks`: see `tree_attention`.

        Of latents each token may see those slots alone that `choose` returned.
        """
        if chosen is not None:
            written = self._written(self.keys, keys, this)
            return attend_chosen(queries, written, chosen, this.pages), dataclasses.replace(self, keys=written)
        attended, keys, values = tree_attention(
            queries,
            keys,
            values,
            self.keys,
            self.values,
            this.lengths,
            this.tail_mask,
            page_table=this.pages,
            continued=this.continued,
            first=first,
            sinks=sinks,
        )
        return attended, dataclasses.replace(self, keys=keys, values=values)

    def choose(self, new: Index, this: Pass, count: int) -> tuple[Int[Array, "b t c"] | None, KVCache]:
        """Writes the indexer's t new keys, and chooses `count` slots for each token; None: there are no more."""
        index = self._written(self.index, new.keys, this)
        own, seen = dataclasses.replace(self, index=index), (this.lengths, this.tail_mask, this.pages, this.starts)
        slots = index.shape[2] * (1 if this.pages is None else this.pages.shape[1])
        return None if slots <= count else best_slots(new, index, *seen, count), own

    def _written(self, cache: Any, new: Array, this: Pass) -> Array:
        at = this.lengths if this.tail_mask is None else this.lengths + this.tail_mask.shape[-1] - new.shape[1]
        return append(new, None, cache, None, at, page_table=this.pages, continued=this.continued)[0]

    def append(self, keys: Float[Array, "b t k d"], values: Float[Array, "b t k d"], this: Pass) -> KVCache:
        """Writes t new entries behind `lengths`, without attention."""
        table = {"page_table": this.pages, "continued": this.continued}
        return KVCache(*append(keys, values, self.keys, self.values, this.lengths, **table))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BorrowedCache:
    """Stands for the cache of a layer that reads an earlier layer's keys and values, and has none of its own."""

    layer: int = dataclasses.field(metadata={"static": True})

    def commit(self, this: Pass, path: Int[Array, "b p"], counts: Int[Array, " b"]) -> BorrowedCache:
        return self


LayerCache = (
    Any  # KVCache, BorrowedCache, a kind of `models/recurrent.py`, or what stands for one in a pass over parts of rows
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """The caches of all layers, in their order."""

    layers: tuple[LayerCache, ...]

    def with_layer(self, index: int, own: LayerCache) -> Cache:
        return Cache((*self.layers[:index], own, *self.layers[index + 1 :]))

    @property
    def of_keys(self) -> KVCache:
        """The first layer of keys and values: all have one number of pages, of one size."""
        return next(layer for layer in self.layers if isinstance(layer, KVCache))

    def copied(self, source: Int[Array, ""], target: Int[Array, ""]) -> Cache:
        """Copies the recurrent state of one slot to another."""

        def copy(layer: LayerCache) -> LayerCache:
            if isinstance(layer, KVCache):
                return layer
            return jax.tree.map(lambda leaf: leaf.at[target].set(leaf[source]), layer)

        return Cache(tuple(copy(layer) for layer in self.layers))

    def commit(self, this: Pass, path: Int[Array, "b p"], counts: Int[Array, " b"], *, moves: bool = True) -> Cache:
        """Commits the first `counts` tokens of the accepted path: slot length + path[j] goes to length + j.

        Args:
            path: int32 indices into the tail, ascending; after the accepted ones the last may be repeated.
            counts: 0 leaves a recurrent state as it is.
            moves: False where the path is the tail's beginning: keys and values are in their places.
        """
        layers = [x if isinstance(x, KVCache) else x.commit(this, path, counts) for x in self.layers]
        kept, structure = jax.tree.flatten([x if isinstance(x, KVCache) else None for x in layers])
        alike: dict[Any, list[int]] = {}
        for index, array in enumerate(kept if moves else ()):
            alike.setdefault((array.shape, array.dtype), []).append(index)
        for group in alike.values():  # one kernel for all of a shape
            moved = commit([kept[index] for index in group], this.lengths, path, page_table=this.pages)
            for index, array in zip(group, moved, strict=True):
                kept[index] = array
        return Cache(tuple(x or y for x, y in zip(jax.tree.unflatten(structure, kept), layers, strict=True)))


def slots_of(tokens: int) -> int:
    """Returns the slots of a contiguous cache for so many tokens: a multiple of what the TPU's kernel reads."""
    return -(-tokens // SLOTS) * SLOTS


class LayerPass:
    """A pass through one layer, while a program is traced: what the layer asks of the pass and of its own cache.

    Attributes:
        cache: the layer's own, with the new entries once the layer has used it.
        entries: the new keys and values, once the layer has attended, or what its indexer chose; before, those of the
            layer that it reads.
    """

    def __init__(self, this: Pass, cache: LayerCache, entries: Any = None) -> None:
        self._this, self.cache, self.entries = this, cache, entries

    def __call__(
        self,
        queries: Float[Array, "b t n d"],
        keys: Float[Array, "b t k d"],
        values: Float[Array, "b t k d"] | None = None,
        *,
        window: int | None = None,
        chunk: int | None = None,
        sinks: Float[Array, " n"] | None = None,
        chosen: Int[Array, "b t c"] | None = None,
    ) -> Float[Array, "b t n d"]:
        """Writes the layer's cache, and attends; `sinks`: see `tree_attention`. Latents have no values.

        A token sees the last `window` positions, or its own chunk of `chunk` positions, or of latents those `chosen`.
        """
        this = self._this
        first, begin = this.starts, 0 if this.starts is None else this.starts
        if window is not None:
            first = begin + jnp.maximum(this.positions - window + 1, 0)
        if chunk is not None:
            first = begin + this.positions // chunk * chunk
        if this.tail_mask is not None and this.tail_positions is not None and first is not None:
            this = dataclasses.replace(this, tail_mask=this.tail_mask & (this.tail_positions >= first[:, :, None]))
        if values is not None:
            self.entries = keys, values
        given = queries, keys, values, this, first, sinks, chosen
        attended, self.cache = self.cache.append_and_attend(*given)
        return attended

    def choose(self, new: Index, count: int) -> None:
        """See `KVCache.choose`; the choice is then `entries`."""
        self.entries, self.cache = self.cache.choose(new, self._this, count)

    def convolve(self, inputs: Float[Array, "b t c"], kernel: Float[Array, "w c"]) -> Float[Array, "b t c"]:
        """See `ConvolutionCache.convolve` in `models/recurrent.py`."""
        convolved, self.cache = self.cache.convolve(inputs, kernel, self._this)
        return convolved

    def advance(self, tokens: Tokens) -> Float[Array, "b t n d_v"]:
        """See `DeltaCache.advance` in `models/recurrent.py`."""
        outputs, self.cache = self.cache.advance(tokens, self._this)
        return outputs
