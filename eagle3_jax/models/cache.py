"""The key-value cache: append, attend, commit.

Passed in and returned, never mutated; callers donate it. Contiguous: every sequence owns `slots` slots a layer. The
cache does not know its lengths: they are the caller's, and count committed tokens only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.kernels.tree_attention import tree_attention
from eagle3_jax.kernels.tree_attention_tpu import LANES


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer.

    Attributes:
        keys, values: one array [batch, kv_heads, slots, head_dim] a layer.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]

    @classmethod
    def empty(cls, layers: int, batch: int, kv_heads: int, slots: int, head_dim: int, dtype: Any) -> KVCache:
        """Room for `slots` entries a sequence at least, in a multiple of what the attention kernel for TPU reads."""
        slots = -(-slots // LANES) * LANES

        def zeros() -> tuple[Array, ...]:
            return tuple(jnp.zeros((batch, kv_heads, slots, head_dim), dtype) for _ in range(layers))

        return cls(zeros(), zeros())

    def append(
        self, layer: int, keys: Float[Array, "b t k d"], values: Float[Array, "b t k d"], at: Int[Array, " b"]
    ) -> KVCache:
        """Writes t new entries of one layer from slot `at` of each sequence on; `at + t` must not exceed the slots."""
        return KVCache(
            _replace(self.keys, layer, _write(self.keys[layer], keys.swapaxes(1, 2), at)),
            _replace(self.values, layer, _write(self.values[layer], values.swapaxes(1, 2), at)),
        )

    def attend(
        self,
        layer: int,
        queries: Float[Array, "b t n d"],
        lengths: Int[Array, " b"],
        tail_mask: Bool[Array, "b t m"] | None,
    ) -> Float[Array, "b t n d"]:
        """Attention of new tokens over the committed prefix and the tail behind it (see `tree_attention`)."""
        return tree_attention(queries, self.keys[layer], self.values[layer], lengths, tail_mask)

    def commit(self, lengths: Int[Array, " b"], path: Int[Array, "b p"]) -> KVCache:
        """Moves the accepted path to the front of the tail: slot length + path[j] goes to length + j.

        Args:
            path: int32 indices into the tail, ascending; what lies behind the accepted ones may hold anything.
        """

        def compact(cache: Array) -> Array:
            source = (lengths[:, None] + path)[:, None, :, None]
            return _write(cache, jnp.take_along_axis(cache, source, axis=2, mode="clip"), lengths)

        return jax.tree.map(compact, self)


def _replace(arrays: tuple[Array, ...], index: int, new: Array) -> tuple[Array, ...]:
    return (*arrays[:index], new, *arrays[index + 1 :])


def _write(cache: Array, new: Array, at: Array) -> Array:
    """cache[b, :, at[b] : at[b] + t] = new[b]."""
    new = new.astype(cache.dtype)
    if cache.shape[0] == 1 and new.shape[2] == 1:
        # As a slice update, one token's write is fused into what reads the cache next and done twice, each time on a
        # copy of the cache (XLA for CPU). A scatter stays in place.
        heads = jnp.arange(cache.shape[1])
        return cache.at[jnp.zeros_like(heads), heads, at].set(new[0, :, 0], unique_indices=True)
    if cache.shape[0] == 1:  # a batched start index lowers to a scatter; one sequence does not need it
        return jax.lax.dynamic_update_slice(cache, new, (0, 0, at[0], 0))
    return jax.vmap(lambda c, x, i: jax.lax.dynamic_update_slice(c, x, (0, i, 0)))(cache, new, at)
