"""Target models: embeddings, layers, a final norm and an LM head; aux hidden states are collected on the way.

One forward serves prefill, one-token decode and tree verification. The layers are unrolled: on a CPU a scan would copy
each layer's weights out of the stack (about twice the time per step). Layers that are alike are traced once. A family's
file defines its layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.linear.layouts import Padded, Panels, Quantised
from eagle3_jax.kernels.vocabulary.api import vocabulary_logits
from eagle3_jax.models.cache import BorrowedCache, Cache, KVCache, LayerCache, LayerPass, Pass, slots_of
from eagle3_jax.models.layers import embeddings, normal, ones, rms_norm, scaled_rope_table, whole_states
from eagle3_jax.models.target_config import ModelConfig, final_boundary

# Cosines and sines, see `rope_table`.
Rope = tuple[Float[Array, "b t 1 half"], Float[Array, "b t 1 half"]]
# (q [b t n d], k [b t k d], v [b t k d], *, window, chunk, sinks) -> [b t n d], see `LayerPass`.
Attend = Callable[..., Array]


class TargetModel(nnx.Module):
    """A target. Parameters: `embed` [V, H], `blocks`, `norm` [H], and `lm_head` [V, H] unless tied.

    One of a mapped file has panels for matrices, and the `packed_rows` of its LM head, which `for_inference` takes.

    A block maps the residual stream [b, t, H], given `Rope` and `Attend`, to the stream after it.
    """

    block: ClassVar[Callable[..., Any]]  # (config, layer, *, dtype, rngs) -> one decoder layer of the family

    def __init__(self, config: ModelConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = normal((config.vocab_size, config.hidden_size), dtype, rngs)
        self.blocks = nnx.List(
            [self.block(config, layer, dtype=dtype, rngs=rngs) for layer in range(config.num_hidden_layers)]
        )
        self.norm = ones(config.hidden_size, dtype)
        if not config.tie_word_embeddings:
            self.lm_head = normal((config.vocab_size, config.hidden_size), dtype, rngs)

    def __call__(
        self, tokens: Int[Array, "b t"], this: Pass, cache: Cache
    ) -> tuple[Float[Array, "b t h"], Float[Array, "b t aux"], Cache]:
        """Runs t new tokens of each sequence behind its committed prefix; `row` and `preceding` are not read.

        Returns the last hidden state after the final norm (the LM head's input), the aux hidden states concatenated in
        ascending order of boundary, and the cache.
        """
        c = self.config
        rope, x, this = self.rotary(this.positions), self.embedded(tokens), this.with_tail_positions()
        beside = self.beside(tokens, x)
        aux, entries = [], {}
        for layer, block in enumerate(self.blocks):
            if layer in c.aux_layers:
                # The barrier keeps XLA from summing the layers' outputs again at the end, which would keep all of them.
                x = jax.lax.optimization_barrier(x)
                aux.append(x)
            own = cache.layers[layer]
            place = own.layer if isinstance(own, BorrowedCache) else layer
            given = rope if beside is None else (rope, beside[layer])
            left = entries.get(c.chooser(place))
            x, own, entries[place] = _decoder_layer(block, x, given, this, cache.layers[place], left)
            cache = cache.with_layer(place, own)
        if c.num_hidden_layers in c.aux_layers:
            aux.append(x)
        hidden = self.final_norm(x)
        if final_boundary(c.num_hidden_layers) in c.aux_layers:
            aux.append(hidden)
        outputs = whole_states((hidden, jnp.concatenate(aux or [hidden[..., :0]], axis=-1)))
        return *outputs, cache

    def observed_at(self, aux_layers: tuple[int, ...]) -> TargetModel:
        """Returns the same model (its arrays are shared) with the states at these boundaries."""
        twin = jax.tree.map(lambda x: x, self)
        twin.config = dataclasses.replace(self.config, aux_layers=aux_layers)
        return twin

    def embedded(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t h"]:
        """Returns the residual stream that enters the first layer."""
        return embeddings(self.embed[...], tokens)

    def rotary(self, positions: Int[Array, "b t"]) -> Any:
        """Returns the blocks' argument `Rope`."""
        return rotary(self.config, positions)

    def beside(self, tokens: Int[Array, "b t"], x: Float[Array, "b t h"]) -> list[Any] | None:
        """Returns what each block takes, in a pair with `Rope`, of the tokens and their embeddings; None is nothing."""
        return None

    def final_norm(self, x: Float[Array, "b t h"]) -> Float[Array, "b t h"]:
        return rms_norm(x, self.norm[...], self.config.rms_norm_eps)

    @property
    def output_rows(self) -> Float[Array, "v h"] | Panels | Padded | Quantised:
        """Rows of the LM head, one per token of the vocabulary."""
        return self.lm_head[...] if hasattr(self, "lm_head") else self.embed[...]

    def logits(self, hidden: Float[Array, "*batch h"]) -> Float[Array, "*batch v"]:
        """Computes float32 logits of final-normed hidden states."""
        return vocabulary_logits(hidden, self.output_rows)

    def empty_cache(self, batch: int, slots: int, tail: int = 1) -> Cache:
        """Allocates at least `slots` entries per sequence; `tail`: see `empty_pages`."""
        return self.empty_pages(batch, slots_of(slots), states=batch, tail=tail)

    def empty_pages(
        self, pages: int, page_size: int, dtype: Any = None, *, states: int | None = None, tail: int = 1
    ) -> Cache:
        """Allocates free pages, and free slots of recurrent state.

        Args:
            dtype: dtype of keys and values; None is the weights' own.
            states: sequences with a state of their own; None is one for each page.
            tail: most tokens of a pass that a state waits for (see `Pass.counts`).
        """
        own, states = self.embed[...].dtype, pages if states is None else states
        layers = range(self.config.num_hidden_layers)
        return Cache(tuple(self.layer_cache(i, pages, page_size, dtype or own, states, tail) for i in layers))

    def layer_cache(self, layer: int, pages: int, page_size: int, dtype: Any, states: int, tail: int) -> LayerCache:
        """Allocates one layer's cache, see `empty_pages`."""
        return layer_pages(self.config, layer, pages, page_size, dtype)


def layer_pages(config: ModelConfig, layer: int, pages: int, page_size: int, dtype: Any) -> KVCache:
    """Allocates free pages of one layer's keys and values, or latents and its indexer's keys."""
    c = config
    kinds = {"latent": c.latent_cache, "index": c.index_width(layer)}
    return KVCache.pages(pages, c.num_key_value_heads, page_size, c.head_dim, dtype, **kinds)


def rotary(config: ModelConfig, positions: Int[Array, "b t"]) -> Rope:
    """Computes the RoPE tables of a config."""
    c = config
    return scaled_rope_table(positions, c.rope_dim, c.rope_theta, c.rope_scaling)


@jax.jit
def _decoder_layer(
    block: Callable[..., Array],
    x: Float[Array, "b t h"],
    rope: Any,
    this: Pass,
    cache: LayerCache,
    entries: Any,
) -> tuple[Float[Array, "b t h"], LayerCache, Any]:
    """Runs one layer on its own cache, or that of the layer which made the entries; alike layers are traced once."""
    own = LayerPass(this, cache, entries)
    return block(x, rope, own), own.cache, own.entries
