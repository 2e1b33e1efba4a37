"""Multi-token prediction layers (MTP) of a target's own checkpoint as draft heads; NEXTN in SGLang.

A decoder layer of the target's family over fc(normed embedding of token t+1 and normed feature t, in the family's
order), then a norm. The first feature is the target's last hidden state after the final norm; later ones are the normed
outputs. Embeddings and LM head are the target's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from eagle3_jax.kernels.linear.api import linear
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.drafts.head import Head, ShapeOfModel
from eagle3_jax.models.layers import at_row, normal, ones, rms_norm
from eagle3_jax.models.target import rotary
from eagle3_jax.models.target_config import ModelConfig, final_boundary


class MtpHead(Head):
    """An MTP layer as a head; `fc` [2H, H], the layer shaped as the target's."""

    block_type: ClassVar[Callable[..., Any]]  # as `TargetModel.block`
    config: ShapeOfModel

    def __init__(self, target: ModelConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
        h = target.hidden_size
        self.config = ShapeOfModel(target, aux_layers=(final_boundary(target.num_hidden_layers),))
        self.token_norm, self.hidden_norm = ones(h, dtype), ones(h, dtype)
        self.fc = normal((2 * h, h), dtype, rngs)
        self.block = self.block_type(target, target.num_hidden_layers, dtype=dtype, rngs=rngs)
        self.norm = ones(h, dtype)
        self.lm_head = normal((target.vocab_size, h), dtype, rngs)

    def fuse(self, aux: Float[Array, "b t aux"]) -> Float[Array, "b t h"]:
        """Returns the state, which is the feature."""
        return aux

    def joined(self, tokens: Float[Array, "b t h"], hidden: Float[Array, "b t h"]) -> Float[Array, "b t both"]:
        """Concatenates both in the order of `fc`'s input."""
        raise NotImplementedError

    def __call__(
        self,
        embeds: Float[Array, "b t h"],
        features: Float[Array, "b t h"],
        this: Pass,
        attend: Callable[[Array, Array, Array], Array],
    ) -> Float[Array, "b r h"]:
        """See `Head`."""
        c = self.config.model
        tokens = rms_norm(embeds, self.token_norm[...], c.rms_norm_eps)
        hidden = rms_norm(features, self.hidden_norm[...], c.rms_norm_eps)
        x = self.block(linear(self.joined(tokens, hidden), self.fc[...]), rotary(c, this.positions), attend)
        return rms_norm(at_row(x, this.row), self.norm[...], c.rms_norm_eps)

    def output_hidden(self, state: Float[Array, "*batch h"]) -> Float[Array, "*batch h"]:
        """Returns the state, which is normed already."""
        return state
