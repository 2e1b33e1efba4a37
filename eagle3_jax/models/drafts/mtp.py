"""Multi-token prediction layers (MTP) of a target's own checkpoint as draft heads; NEXTN in SGLang.

A decoder layer of the target's family over fc(normed embedding of token t+1 and normed feature t, in the family's
order), then a norm. The first feature is the target's last hidden state after the final norm; later ones are the normed
outputs. Embeddings and LM head are the target's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from eagle3_jax.kernels.linear.api import linear
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.checkpoint.table import Entry
from eagle3_jax.models.drafts.head import Head, ShapeOfModel
from eagle3_jax.models.layers import at_row, normal, ones, rms_norm
from eagle3_jax.models.target import rotary
from eagle3_jax.models.target_config import ModelConfig, final_boundary


class MtpHead(Head):
    """An MTP layer as a head; `fc` [2H, H], the layer shaped as the target's.

    Attributes:
        counted_by: fields of config.json that count such layers.
    """

    block_type: ClassVar[Callable[..., Any]]  # as `TargetModel.block`
    rotary: ClassVar[Callable[..., Any]] = staticmethod(rotary)  # (config, positions) -> the block's `Rope`
    counted_by: ClassVar[tuple[str, ...]] = ("num_nextn_predict_layers",)
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
        return jnp.concatenate([tokens, hidden], axis=-1)

    def normed(self, x: Float[Array, "b t h"], weight: nnx.Param) -> Float[Array, "b t h"]:
        return rms_norm(x, weight[...], self.config.model.rms_norm_eps)

    def __call__(
        self,
        embeds: Float[Array, "b t h"],
        features: Float[Array, "b t h"],
        this: Pass,
        attend: Callable[[Array, Array, Array], Array],
    ) -> Float[Array, "b r h"]:
        """See `Head`."""
        joined = self.joined(self.normed(embeds, self.token_norm), self.normed(features, self.hidden_norm))
        x = self.block(linear(joined, self.fc[...]), self.rotary(self.config.model, this.positions), attend)
        return self.normed(at_row(x, this.row), self.norm)

    def output_hidden(self, state: Float[Array, "*batch h"]) -> Float[Array, "*batch h"]:
        """Returns the state, which is normed already."""
        return state


def first_layer(table: Mapping[str, Entry], source: str) -> dict[str, Entry]:
    """Takes the entries of a target's first layer as `MtpHead.block`'s, with the prefix `source` of their tensors."""

    def moved(entry: Entry) -> Entry:
        tensors = {name.replace("model.layers.0.", source, 1): shape for name, shape in entry.tensors.items()}
        return dataclasses.replace(entry, tensors=tensors, other=entry.other and moved(entry.other))

    layer = {path.removeprefix("blocks/0/"): entry for path, entry in table.items() if path.startswith("blocks/0/")}
    return {f"block/{path}": moved(entry) for path, entry in layer.items()}
