"""Medusa, which the package does not have: k layers, each by itself, over the target's last hidden state."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from eagle3_jax.kernels.linear.api import linear
from eagle3_jax.models.drafts.one_pass import OnePassHead
from eagle3_jax.models.layers import at_row, normal
from eagle3_jax.models.target_config import final_boundary


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
    vocab_size: int
    hidden_size: int
    target_layers: int
    num_heads: int
    max_position_embeddings: int
    num_key_value_heads: int = 1
    head_dim: int = 1
    num_aux_layers: int = 1

    draft_vocab_size = property(lambda self: self.vocab_size)
    target_hidden_size = property(lambda self: self.hidden_size)
    aux_layers = property(lambda self: (final_boundary(self.target_layers),))


class Medusa(OnePassHead):
    def __init__(self, config: MedusaConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
        self.config, size = config, (config.hidden_size, config.hidden_size)
        self.layers = nnx.List([normal(size, dtype, rngs) for _ in range(config.num_heads)])

    drafts = property(lambda self: self.config.num_heads)
    dtype = property(lambda self: self.layers[0][...].dtype)

    def fuse(self, aux):
        return aux

    def feed(self, embed, tokens, features, this, cache):
        return at_row(features, this.row), cache  # nothing of the past but the last state is read

    def rows(self, embed, root, state, this, cache, drafts):
        return jnp.stack([x[:, 0] for x in self.states(state[:, None])[:drafts]], axis=1), cache

    def states(self, hidden):
        """The LM head's inputs [b, t, h] of each layer."""
        return [hidden + jax.nn.silu(linear(hidden, layer[...])) for layer in self.layers]

    def output_hidden(self, state):
        return state
