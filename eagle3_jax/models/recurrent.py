"""Caches of recurrent layers: a slot of state for each sequence, which a pass over a prompt moves on at once.

A round's nodes wait: the pass keeps their inputs behind the state, and `commit` moves it on along the accepted path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.kernels.gated_delta import api as gated_delta
from eagle3_jax.kernels.gated_delta.solve import Tokens
from eagle3_jax.models.cache import Pass


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ConvolutionCache:
    """Inputs of a layer's causal convolution: of each slot the last `history` committed ones, then those of the tail,
    which wait for `commit`.
    """

    inputs: Float[Array, "s rows c"]
    history: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def empty(cls, slots: int, history: int, tail: int, channels: int, dtype: Any) -> ConvolutionCache:
        return cls(jnp.zeros((slots, history + tail, channels), dtype), history)

    def convolve(
        self, inputs: Float[Array, "b t c"], kernel: Float[Array, "w c"], this: Pass
    ) -> tuple[Float[Array, "b t c"], ConvolutionCache]:
        """Convolves each token's own path, see `convolved`; zeros stand before a text, and before a document."""
        slots, t, h = _slots(this), inputs.shape[1], self.history
        if this.counts is None:
            return self._convolve_tail(inputs, kernel, this)
        before = self._of(slots)[:, :h]
        if this.continued:  # the row before may hold the stretch before, a whole one
            before = jnp.where(_follows(this, t)[:, None, None], jnp.roll(inputs, 1, axis=0)[:, t - h :], before)
        last = jax.vmap(lambda x, at: jax.lax.dynamic_slice_in_dim(x, at, h, 0))(
            jnp.concatenate([before, inputs], axis=1), this.counts
        )
        at = jnp.where(_is_last(this), slots, len(self.inputs))
        kept = self.inputs.at[at, :h].set(last.astype(self.inputs.dtype), mode="drop")
        return convolved(before, inputs, kernel, this.positions), dataclasses.replace(self, inputs=kept)

    def commit(self, this: Pass, path: Int[Array, "b p"], counts: Int[Array, " b"]) -> ConvolutionCache:
        """Moves on by the first `counts` tokens of the path, indices into the tail; by none where it is 0."""
        slots, h = _slots(this), self.history
        place = counts[:, None] + jnp.arange(h)[None]
        along = h + jnp.take_along_axis(path, jnp.maximum(place - h, 0), axis=1)
        rows = jnp.take_along_axis(self._of(slots), jnp.where(place < h, place, along)[:, :, None], axis=1)
        at = jnp.where(counts > 0, slots, len(self.inputs))
        return dataclasses.replace(self, inputs=self.inputs.at[at, :h].set(rows, mode="drop"))

    def _convolve_tail(
        self, inputs: Float[Array, "b t c"], kernel: Float[Array, "w c"], this: Pass
    ) -> tuple[Float[Array, "b t c"], ConvolutionCache]:
        (b, t, _), h, slots, mask = inputs.shape, self.history, _slots(this), this.tail_mask
        if mask is None:
            mask = jnp.broadcast_to(jnp.tril(jnp.ones((t, t), bool)), (b, t, t))
        m = mask.shape[-1]
        if h + m > self.inputs.shape[1]:
            raise ValueError(f"tail: got {m} tokens, expected at most {self.inputs.shape[1] - h}, see `empty_pages`")
        tail = slots[:, None], h + m - t + jnp.arange(t)[None]
        kept = dataclasses.replace(self, inputs=self.inputs.at[tail].set(inputs.astype(self.inputs.dtype), mode="drop"))
        rows, seen = kept._of(slots), jnp.cumsum(mask, axis=-1)
        depth, behind = seen[..., -1], seen[..., -1:] - seen  # of each node, itself included; of the slots it sees

        def ancestor(back: int) -> Array:
            inside = h + jnp.argmax(mask & (behind == back), axis=-1)
            place = jnp.where(back < depth, inside, h - 1 - (back - depth))
            return jnp.take_along_axis(rows, place[:, :, None], axis=1)

        return _summed(ancestor, kernel, this.positions, inputs.dtype), kept

    def _of(self, slots: Int[Array, " b"]) -> Float[Array, "b rows c"]:
        return jnp.take(self.inputs, slots, axis=0, mode="clip")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaCache:
    """The state of a Gated DeltaNet layer, and what the tail's nodes would add to it.

    Attributes:
        convolution: of the layer's queries, keys and values, before heads are split.
        states: [slots, value heads, d_k, d_v], float32.
        tail_keys: [slots, tail, key heads, d_k]. tail_updates: [slots, tail, value heads, d_v]. tail_decays: [slots,
            tail, value heads]. See `kernels/gated_delta/api.py`; all float32.
    """

    convolution: ConvolutionCache
    states: Float[Array, "s n d_k d_v"]
    tail_keys: Float[Array, "s m k d_k"]
    tail_updates: Float[Array, "s m n d_v"]
    tail_decays: Float[Array, "s m n"]

    @classmethod
    def empty(
        cls, convolution: ConvolutionCache, key_heads: int, value_heads: int, key_dim: int, value_dim: int
    ) -> DeltaCache:
        slots, rows, _ = convolution.inputs.shape
        tail = slots, rows - convolution.history
        shapes = (slots, value_heads, key_dim, value_dim), (*tail, key_heads, key_dim), (*tail, value_heads, value_dim)
        return cls(convolution, *(jnp.zeros(shape) for shape in (*shapes, (*tail, value_heads))))

    def convolve(
        self, inputs: Float[Array, "b t c"], kernel: Float[Array, "w c"], this: Pass
    ) -> tuple[Float[Array, "b t c"], DeltaCache]:
        convolved, convolution = self.convolution.convolve(inputs, kernel, this)
        return convolved, dataclasses.replace(self, convolution=convolution)

    def advance(self, tokens: Tokens, this: Pass) -> tuple[Float[Array, "b t n d_v"], DeltaCache]:
        """Reads each token's own path, see `kernels/gated_delta/api.py`; a text and a document begin with zeros."""
        t = tokens.betas.shape[1]
        if this.counts is None:
            outputs, updates = gated_delta.tree(tokens, self.states, this.states, this.tail_mask)
            tail = {"tail_keys": tokens.keys, "tail_updates": updates, "tail_decays": tokens.decays}
            kept = {name: getattr(self, name).at[_slots(this), :t].set(x, mode="drop") for name, x in tail.items()}
            return outputs, dataclasses.replace(self, **kept)
        read = (jnp.arange(t)[None] < this.counts[:, None])[:, :, None]
        # Padding neither decays nor writes.
        tokens = tokens._replace(decays=jnp.where(read, tokens.decays, 0), betas=jnp.where(read, tokens.betas, 0))
        follows = _follows(this, t) if this.continued else None
        begins, last = this.positions == 0, _is_last(this)
        outputs, states = gated_delta.chain(tokens, self.states, this.states, begins, last, follows=follows)
        return outputs, dataclasses.replace(self, states=states)

    def commit(self, this: Pass, path: Int[Array, "b p"], counts: Int[Array, " b"]) -> DeltaCache:
        """See `ConvolutionCache.commit`."""
        slots = _slots(this)

        def along(tail: Array) -> Array:
            return jax.vmap(lambda rows, nodes: rows[nodes])(jnp.take(tail, slots, axis=0, mode="clip"), path)

        keys, updates, decays = (along(x) for x in (self.tail_keys, self.tail_updates, self.tail_decays))
        states = gated_delta.fold(self.states, this.states, keys, updates, decays, counts)
        return dataclasses.replace(self, convolution=self.convolution.commit(this, path, counts), states=states)


def convolved(
    before: Float[Array, "b h c"],
    inputs: Float[Array, "b t c"],
    kernel: Float[Array, "w c"],
    positions: Int[Array, "b t"],
) -> Float[Array, "b t c"]:
    """Computes sum_j kernel[w - 1 - j] * (the input j positions before) for tokens in order, summed in float32.

    Args:
        before: the h = w - 1 inputs before the first token.
        positions: in the text or document, before whose first token there are zeros.
    """
    rows, t, h = jnp.concatenate([before, inputs], axis=1), inputs.shape[1], before.shape[1]
    return _summed(lambda back: rows[:, h - back : h - back + t], kernel, positions, inputs.dtype)


def _summed(
    back: Callable[[int], Array], kernel: Float[Array, "w c"], positions: Int[Array, "b t"], dtype: Any
) -> Float[Array, "b t c"]:
    terms = []
    for j, tap in enumerate(kernel[::-1].astype(jnp.float32)):
        terms.append(jnp.where((positions >= j)[:, :, None], back(j).astype(jnp.float32) * tap[None, None], 0.0))
    return sum(terms[1:], terms[0]).astype(dtype)


def _slots(this: Pass) -> Int[Array, " b"]:
    return jnp.arange(len(this.lengths)) if this.states is None else this.states


def _follows(this: Pass, t: int) -> Bool[Array, " b"]:
    """Tells which rows of a pass go on where the row before them ends, which is then a whole stretch."""
    slots = _slots(this)
    return (slots == jnp.roll(slots, 1)) & (this.lengths == jnp.roll(this.lengths, 1) + t)


def _is_last(this: Pass) -> Bool[Array, " b"]:
    """Tells which rows of a prompt leave their state: of rows that are one prompt's, the last one."""
    assert this.counts is not None
    slots, read, row = _slots(this), this.counts > 0, jnp.arange(len(this.lengths))
    later = (slots[None] == slots[:, None]) & (row[None] > row[:, None]) & read[None]
    return read & ~later.any(axis=1)
