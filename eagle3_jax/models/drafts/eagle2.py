"""The draft head of EAGLE and EAGLE-2 (SafeAILab/EAGLE, model/cnets1.py; vLLM's llama_eagle.py).

A Llama decoder layer without its first norm, over fc([embedding of token t+1, feature t]). The first feature is the
target's last hidden state after the final norm; later ones are the layer's outputs. Embeddings and LM head are the
target's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from eagle3_jax.kernels.linear.api import linear
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.drafts.head import Head, HeadConfig
from eagle3_jax.models.layers import (
    Attention,
    SwiGLU,
    apply_rope,
    at_row,
    normal,
    ones,
    rms_norm,
    scaled_rope_table,
    zeros,
)
from eagle3_jax.models.target_config import final_boundary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle2Config(HeadConfig):
    """Shape of the head, whose draft vocabulary FR-Spec cuts; `target_layers` is the number of the target's layers."""

    target_layers: int
    fc_bias: bool = False

    aux_layers = property(lambda self: (final_boundary(self.target_layers),))
    num_aux_layers = property(lambda self: 1)
    target_hidden_size = property(lambda self: self.hidden_size)


class Eagle2Head(Head):
    """The EAGLE-2 head; `lm_head` [draft vocabulary, H] holds rows of the target's."""

    config: Eagle2Config

    def __init__(self, config: Eagle2Config, *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
        c = config
        self.config = c
        heads = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.fc = normal((2 * c.hidden_size, c.hidden_size), dtype, rngs)
        if c.fc_bias:
            self.fc_bias = zeros(c.hidden_size, dtype)
        self.attention = Attention(c.hidden_size, c.hidden_size, *heads, dtype=dtype, rngs=rngs)
        self.post_norm = ones(c.hidden_size, dtype)
        self.mlp = SwiGLU(c.hidden_size, c.intermediate_size, dtype=dtype, rngs=rngs)
        self.lm_head = normal((c.draft_vocab_size, c.hidden_size), dtype, rngs)

    def __call__(
        self,
        embeds: Float[Array, "b t h"],
        features: Float[Array, "b t h"],
        this: Pass,
        attend: Callable[[Array, Array, Array], Array],
    ) -> Float[Array, "b r h"]:
        c = self.config
        rope = scaled_rope_table(this.positions, c.head_dim, c.rope_theta, c.rope_scaling)
        x = linear(jnp.concatenate([embeds, features], axis=-1), self.fc[...])
        if c.fc_bias:
            x = x + self.fc_bias[...][None, None]
        q, k, v = self.attention.heads(self.attention.fused(x))
        attended = attend(apply_rope(q, rope), apply_rope(k, rope), v)
        x = at_row(x, this.row) + self.attention.output(at_row(attended, this.row))
        return x + self.mlp(rms_norm(x, self.post_norm[...], c.rms_norm_eps))
