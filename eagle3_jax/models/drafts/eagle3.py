"""The EAGLE-3 draft head (EAGLE-3, arXiv 2503.01840, section 3.1).

One decoder layer whose attention reads [embedding of token t+1, feature t]. Its residual is the un-normed fused
feature, and its pre-norm output recurs as the next step's feature; flags change both. Embeddings are the target's. The
caller supplies attention: over a cache when drafting, by the training-time test when training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from eagle3_jax.config import DraftConfig
from eagle3_jax.kernels.linear.api import linear
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.drafts.head import Head, HeadConfig
from eagle3_jax.models.layers import Attention, SwiGLU, apply_rope, at_row, normal, ones, rms_norm, scaled_rope_table
from eagle3_jax.models.target_config import ModelConfig, without_aux_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftHeadConfig(HeadConfig):
    """Shape of a draft head.

    Attributes:
        target_hidden_size: the target's width.
        aux_layers: boundaries of the target that feed the head; their number sets the width of `fc`'s input. None, only
            for a head on disk: every engine's default three, of a target whose depth is unknown.
        fc_norm: norm each aux feature before fc; norm_output: the post-norm output recurs. Both: EAGLE-3.1.
        norm_before_residual: the residual is the normed feature (vLLM, speculators).
        norm_before_fc: one norm over all aux features together before fc (heads of RedHat and NVIDIA for gpt-oss).
        qk_norm: norm each query and key head before RoPE, as Qwen 3's layer does (vLLM, speculators).
        sliding_window: pairs that attention reads, the pair's own included; None reads all.
    """

    target_hidden_size: int
    aux_layers: tuple[int, ...] | None
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None

    @property
    def num_aux_layers(self) -> int:
        return 3 if self.aux_layers is None else len(self.aux_layers)

    @classmethod
    def for_target(cls, draft: DraftConfig, target: ModelConfig) -> DraftHeadConfig:
        """Makes the shape that `draft` describes, with the target's values where it has none. Raises ValueError."""
        if not target.aux_layers:
            raise ValueError(without_aux_layers(target))
        sizes = ("num_attention_heads", "num_key_value_heads", "head_dim") if target.latent_cache else ()
        sizes = (*sizes, *(() if target.intermediate_size else ("intermediate_size",)))
        missing = [f"draft.{name}" for name in sizes if getattr(draft, name) is None]
        if missing:
            raise ValueError(
                f"{', '.join(missing)}: got none, expected sizes for the head: {target.architecture} has none"
            )
        heads = draft.num_attention_heads or target.num_attention_heads
        kv_heads = draft.num_key_value_heads or target.num_key_value_heads
        if heads % kv_heads:
            raise ValueError(f"draft.num_attention_heads: got {heads}, expected a multiple of {kv_heads} KV heads")
        if draft.vocab_size > target.vocab_size:
            raise ValueError(f"draft.vocab_size: got {draft.vocab_size}, expected at most {target.vocab_size}")
        either = ("intermediate_size", "head_dim", "max_position_embeddings")
        flags = ("rope_theta", "fc_norm", "norm_output", "norm_before_residual", "qk_norm", "sliding_window")
        return cls(
            **{name: getattr(target, name) for name in ("vocab_size", "hidden_size", "rms_norm_eps", "aux_layers")},
            **{name: getattr(draft, name) or getattr(target, name) for name in either},
            **{name: getattr(draft, name) for name in flags},
            draft_vocab_size=draft.vocab_size,
            target_hidden_size=target.hidden_size,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
        )


class DraftHead(Head):
    """The EAGLE-3 head."""

    read_once = ("fc",)
    config: DraftHeadConfig

    def __init__(self, config: DraftHeadConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
        c = config
        self.config = c
        self.fc = normal((c.num_aux_layers * c.target_hidden_size, c.hidden_size), dtype, rngs)
        if c.norm_before_fc:
            self.aux_norm = ones(c.num_aux_layers * c.target_hidden_size, dtype)
        if c.fc_norm:
            self.fc_norm = nnx.List([ones(c.target_hidden_size, dtype) for _ in range(c.num_aux_layers)])
        self.input_norm = ones(c.hidden_size, dtype)
        self.hidden_norm = ones(c.hidden_size, dtype)
        heads = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.attention = Attention(2 * c.hidden_size, c.hidden_size, *heads, dtype=dtype, rngs=rngs)
        if c.qk_norm:
            self.q_norm, self.k_norm = ones(c.head_dim, dtype), ones(c.head_dim, dtype)
        self.post_norm = ones(c.hidden_size, dtype)
        self.mlp = SwiGLU(c.hidden_size, c.intermediate_size, dtype=dtype, rngs=rngs)
        self.norm = ones(c.hidden_size, dtype)
        self.lm_head = normal((c.draft_vocab_size, c.hidden_size), dtype, rngs)

    def fuse(self, aux: Float[Array, "b t aux"]) -> Float[Array, "b t h"]:
        if self.config.norm_before_fc:
            aux = rms_norm(aux, self.aux_norm[...], self.config.rms_norm_eps)
        if self.config.fc_norm:
            chunks = jnp.split(aux, self.config.num_aux_layers, axis=-1)
            normed = [rms_norm(x, w[...], self.config.rms_norm_eps) for x, w in zip(chunks, self.fc_norm, strict=True)]
            aux = jnp.concatenate(normed, axis=-1)
        return linear(aux, self.fc[...])

    def __call__(
        self, embeds: Float[Array, "b t h"], features: Float[Array, "b t h"], this: Pass, attend: Callable[..., Array]
    ) -> Float[Array, "b r h"]:
        c = self.config
        rope = scaled_rope_table(this.positions, c.head_dim, c.rope_theta, c.rope_scaling)
        tokens = rms_norm(embeds, self.input_norm[...], c.rms_norm_eps)
        hidden = rms_norm(features, self.hidden_norm[...], c.rms_norm_eps)
        q, k, v = self.attention.heads(self.attention.fused(jnp.concatenate([tokens, hidden], axis=-1)))
        if c.qk_norm:
            q, k = rms_norm(q, self.q_norm[...], c.rms_norm_eps), rms_norm(k, self.k_norm[...], c.rms_norm_eps)
        attended = attend(apply_rope(q, rope), apply_rope(k, rope), v, window=c.sliding_window)
        residual = at_row(hidden if c.norm_before_residual else features, this.row)
        x = residual + self.attention.output(at_row(attended, this.row))
        x = x + self.mlp(rms_norm(x, self.post_norm[...], c.rms_norm_eps))
        return self.final_norm(x) if c.norm_output else x

    def final_norm(self, x: Float[Array, "*batch h"]) -> Float[Array, "*batch h"]:
        return rms_norm(x, self.norm[...], self.config.rms_norm_eps)

    def output_hidden(self, state: Float[Array, "*batch h"]) -> Float[Array, "*batch h"]:
        return state if self.config.norm_output else self.final_norm(state)
