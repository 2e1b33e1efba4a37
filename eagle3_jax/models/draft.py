"""The EAGLE-3 draft head (EAGLE3_SPEC section 1.1).

One decoder layer whose attention reads [embedding of token t+1, feature t]; its residual is the un-normed fused
feature, and its pre-norm output recurs as the next step's feature; flags change both. The embedding table is the
target's own. What is attended is the caller's business: a cache when drafting, the training-time test when training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.config import DraftConfig
from eagle3_jax.kernels.vocabulary import vocabulary_logits, vocabulary_top_k
from eagle3_jax.models.cache import KVCache
from eagle3_jax.models.layers import (
    Attention,
    LinearScaling,
    RopeScaling,
    SwiGLU,
    linear,
    normal,
    ones,
    rms_norm,
    rope_frequencies,
    rope_table,
)
from eagle3_jax.models.target import ModelConfig


@dataclasses.dataclass(frozen=True)
class DraftHeadConfig:
    """Shape of a draft head, in the words of its config.json.

    Attributes:
        vocab_size: the target's vocabulary; draft_vocab_size: the head's own.
        aux_layers: boundaries of the target that feed it (their number is the width of `fc`'s input). None, of a head
            on disk alone: the three that every engine takes by default, of a target whose depth is not known.
        fc_norm: norm each aux feature before fc; norm_output: the post-norm output recurs. Both: EAGLE-3.1.
        norm_before_residual: the residual is the normed feature (vLLM, speculators).
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    aux_layers: tuple[int, ...] | None
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    rope_scaling: RopeScaling | LinearScaling | None = None

    @property
    def num_aux_layers(self) -> int:
        return 3 if self.aux_layers is None else len(self.aux_layers)

    @classmethod
    def for_target(cls, draft: DraftConfig, target: ModelConfig) -> DraftHeadConfig:
        """The head that `draft` describes, what it leaves open taken from the target. Raises ValueError."""
        heads = draft.num_attention_heads or target.num_attention_heads
        kv_heads = draft.num_key_value_heads or target.num_key_value_heads
        if heads % kv_heads:
            raise ValueError(f"draft.num_attention_heads: got {heads}, expected a multiple of {kv_heads} KV heads")
        if draft.vocab_size > target.vocab_size:
            raise ValueError(f"draft.vocab_size: got {draft.vocab_size}, expected at most {target.vocab_size}")
        return cls(
            vocab_size=target.vocab_size,
            draft_vocab_size=draft.vocab_size,
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            intermediate_size=draft.intermediate_size or target.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=draft.head_dim or target.head_dim,
            rms_norm_eps=target.rms_norm_eps,
            rope_theta=draft.rope_theta,
            max_position_embeddings=draft.max_position_embeddings or target.max_position_embeddings,
            aux_layers=target.aux_layers,
            fc_norm=draft.fc_norm,
            norm_output=draft.norm_output,
        )


class DraftHead(nnx.Module):
    """Parameters of the head; `lm_head` [draft vocabulary, H], one row per draft token."""

    def __init__(self, config: DraftHeadConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
        c = config
        self.config = c
        self.fc = normal((c.num_aux_layers * c.target_hidden_size, c.hidden_size), dtype, rngs)
        if c.fc_norm:
            self.fc_norm = nnx.List([ones(c.target_hidden_size, dtype) for _ in range(c.num_aux_layers)])
        self.input_norm = ones(c.hidden_size, dtype)
        self.hidden_norm = ones(c.hidden_size, dtype)
        self.attention = Attention(
            2 * c.hidden_size,
            c.hidden_size,
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
            dtype=dtype,
            rngs=rngs,
        )
        self.post_norm = ones(c.hidden_size, dtype)
        self.mlp = SwiGLU(c.hidden_size, c.intermediate_size, dtype=dtype, rngs=rngs)
        self.norm = ones(c.hidden_size, dtype)
        self.lm_head = normal((c.draft_vocab_size, c.hidden_size), dtype, rngs)

    def fuse(self, aux: Float[Array, "b t aux"]) -> Float[Array, "b t h"]:
        """Aux hidden states (concatenated, ascending boundaries) -> the feature of each position."""
        if self.config.fc_norm:
            chunks = jnp.split(aux, self.config.num_aux_layers, axis=-1)
            normed = [rms_norm(x, w[...], self.config.rms_norm_eps) for x, w in zip(chunks, self.fc_norm, strict=True)]
            aux = jnp.concatenate(normed, axis=-1)
        return linear(aux, self.fc[...])

    def __call__(
        self,
        embeds: Float[Array, "b t h"],
        features: Float[Array, "b t h"],
        positions: Int[Array, "b t"],
        attend: Callable[[Array, Array, Array], Array],
    ) -> Float[Array, "b t h"]:
        """One pass over pairs (token t+1, feature t).

        Args:
            embeds: the target's embeddings of the tokens.
            features: fused features, or the output of the pass before.
            positions: RoPE positions of the pairs (the feature's).
            attend: (q [b t n d], k [b t k d], v [b t k d]) -> [b t n d].

        Returns:
            The state that recurs, and that `logits` and `top_k` read.
        """
        c = self.config
        rope = rope_table(positions, rope_frequencies(c.head_dim, c.rope_theta, c.rope_scaling))
        tokens = rms_norm(embeds, self.input_norm[...], c.rms_norm_eps)
        hidden = rms_norm(features, self.hidden_norm[...], c.rms_norm_eps)
        q, k, v = self.attention.project(jnp.concatenate([tokens, hidden], axis=-1), rope)
        residual = hidden if c.norm_before_residual else features
        x = residual + self.attention.output(attend(q, k, v))
        x = x + self.mlp(rms_norm(x, self.post_norm[...], c.rms_norm_eps))
        return self.final_norm(x) if c.norm_output else x

    def final_norm(self, x: Float[Array, "*batch h"]) -> Float[Array, "*batch h"]:
        return rms_norm(x, self.norm[...], self.config.rms_norm_eps)

    def output_hidden(self, state: Float[Array, "*batch h"]) -> Float[Array, "*batch h"]:
        """The LM head's input: `lm_head @ output_hidden(state)` are the draft logits."""
        return state if self.config.norm_output else self.final_norm(state)

    def logits(self, state: Float[Array, "*batch h"]) -> Float[Array, "*batch dv"]:
        """float32 logits over the draft vocabulary."""
        return vocabulary_logits(self.output_hidden(state), self.lm_head[...])

    def top_k(self, state: Float[Array, "*batch h"], k: int) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"]]:
        """Log-probabilities (float32) and draft ids of the k best next tokens, best first."""
        return vocabulary_top_k(self.output_hidden(state), self.lm_head[...], k)

    def empty_cache(self, batch: int, slots: int) -> KVCache:
        c = self.config
        return KVCache.empty(1, batch, c.num_key_value_heads, slots, c.head_dim, self.fc[...].dtype)

    def empty_pages(self, pages: int, page_size: int) -> KVCache:
        c = self.config
        return KVCache.pages(1, pages, c.num_key_value_heads, page_size, c.head_dim, self.fc[...].dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draft:
    """A head and what its tokens mean.

    Attributes:
        token_ids: int32 [draft vocabulary], the target's id of each draft token, ascending (absolute, not `d2t`).
            Outside the module, so that gradients see floats only.
    """

    head: DraftHead
    token_ids: Int[Array, " dv"]
