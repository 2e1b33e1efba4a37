"""MiMo's layer that predicts a further token (MTP), as a draft head: what SGLang calls NEXTN (vLLM's mimo_mtp.py).

A decoder layer of Qwen 2's over fc([normed feature t, normed embedding of token t+1]), and a norm behind it. The
feature is the target's last hidden state behind the final norm; the normed output takes its place from then on.
Embeddings and LM head are the target's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.models import qwen2
from eagle3_jax.models.entries import Entry, kernel, plain
from eagle3_jax.models.head import Head
from eagle3_jax.models.layers import linear, normal, ones, rms_norm, rope_frequencies, rope_table
from eagle3_jax.models.mimo import MTP, MimoConfig
from eagle3_jax.models.target import final_boundary


@dataclasses.dataclass(frozen=True)
class MimoMtpConfig:
    """The layer has the target's own shape."""

    target: MimoConfig

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    @property
    def draft_vocab_size(self) -> int:
        return self.target.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.target.hidden_size

    @property
    def target_hidden_size(self) -> int:
        return self.target.hidden_size

    @property
    def num_key_value_heads(self) -> int:
        return self.target.num_key_value_heads

    @property
    def head_dim(self) -> int:
        return self.target.head_dim

    @property
    def max_position_embeddings(self) -> int:
        return self.target.max_position_embeddings

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return (final_boundary(self.target.num_hidden_layers),)

    @property
    def num_aux_layers(self) -> int:
        return 1


class MimoMtp(Head):
    """`fc` [2H, H] has the feature first."""

    config: MimoMtpConfig

    def __init__(self, config: MimoMtpConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
        h = config.hidden_size
        self.config = config
        self.token_norm, self.hidden_norm = ones(h, dtype), ones(h, dtype)
        self.fc = normal((2 * h, h), dtype, rngs)
        self.block = qwen2.Block(config.target, 0, dtype=dtype, rngs=rngs)
        self.norm = ones(h, dtype)
        self.lm_head = normal((config.vocab_size, h), dtype, rngs)

    def fuse(self, aux: Float[Array, "b t aux"]) -> Float[Array, "b t h"]:
        """The feature is the state itself."""
        return aux

    def __call__(
        self,
        embeds: Float[Array, "b t h"],
        features: Float[Array, "b t h"],
        positions: Int[Array, "b t"],
        attend: Callable[[Array, Array, Array], Array],
    ) -> Float[Array, "b t h"]:
        """See `Head`. As engines do, the first pair of a text is read without its token."""
        c = self.config.target
        embeds = jnp.where(positions[..., None] == 0, 0, embeds)
        tokens = rms_norm(embeds, self.token_norm[...], c.rms_norm_eps)
        hidden = rms_norm(features, self.hidden_norm[...], c.rms_norm_eps)
        rope = rope_table(positions, rope_frequencies(c.head_dim, c.rope_theta, c.rope_scaling))
        x = self.block(linear(jnp.concatenate([hidden, tokens], axis=-1), self.fc[...]), rope, attend)
        return rms_norm(x, self.norm[...], c.rms_norm_eps)

    def output_hidden(self, state: Float[Array, "*batch h"]) -> Float[Array, "*batch h"]:
        """The state itself: it is normed."""
        return state


def table(config: MimoConfig) -> dict[str, Entry]:
    """Parameter path in `MimoMtp` -> the tensors of the target's checkpoint; the LM head is the target's."""
    h, theirs = config.hidden_size, f"{MTP}0"
    layer = {
        path.removeprefix("blocks/0/"): _renamed(entry, "model.layers.0.", f"{theirs}.")
        for path, entry in qwen2.table(config).items()
        if path.startswith("blocks/0/")
    }
    return {f"block/{path}": entry for path, entry in layer.items()} | {
        "token_norm": plain(f"{theirs}.token_layernorm.weight", h),
        "hidden_norm": plain(f"{theirs}.hidden_layernorm.weight", h),
        "fc": kernel(f"{theirs}.input_proj.weight", h, 2 * h),
        "norm": plain(f"{theirs}.final_layernorm.weight", h),
    }


def _renamed(entry: Entry, old: str, new: str) -> Entry:
    tensors = {name.replace(old, new): shape for name, shape in entry.tensors.items()}
    return dataclasses.replace(entry, tensors=tensors)
