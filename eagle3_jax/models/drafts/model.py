"""A smaller model as the draft (Leviathan et al., https://arxiv.org/abs/2211.17192; SGLang's STANDALONE, vLLM's
draft_model).

The model reads tokens alone, no state of the target. Rounds pass pairs (token t+1, feature t). The model reads a pair's
token at the token's position t+1; heads read the pair at the feature's position t. A pair's cache entry therefore lies
one slot further, and slot 0 holds the first token of the text, which is in no pair.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.linear.layouts import Padded, Panels, Quantised
from eagle3_jax.models.cache import Cache, Pass
from eagle3_jax.models.drafts.head import Head, ShapeOfModel
from eagle3_jax.models.layers import at_row
from eagle3_jax.models.target import TargetModel


class DraftModel(Head):
    """A model of any family of targets as the draft; its state is the last hidden state after the final norm."""

    config: ShapeOfModel
    model: TargetModel

    def __init__(self, model: TargetModel) -> None:
        self.model = model.observed_at(())
        self.config = ShapeOfModel(self.model.config)

    def feed(
        self,
        embed: Float[Array, "v target"] | Quantised,
        tokens: Int[Array, "b t"],
        features: Float[Array, "b t f"],
        this: Pass,
        cache: Cache,
    ) -> tuple[Float[Array, "b r h"], Cache]:
        """See `Head`; the target's embeddings and features are not read."""
        if this.preceding is None:
            behind = dataclasses.replace(this, positions=this.positions + 1, lengths=this.lengths + 1)
            states, _, cache = self.model(tokens, behind, cache)
            return at_row(states, this.row), cache
        # Slot `lengths` is empty at the start of a text and after a prefix on shared pages. Elsewhere its entry is
        # written again with the same values, as when one chunk continues another in the same batch.
        tokens = jnp.concatenate([this.preceding, tokens], axis=1)
        positions = jnp.concatenate([this.positions[:, :1], this.positions + 1], axis=1)
        states, _, cache = self.model(tokens, dataclasses.replace(this, positions=positions), cache)
        return at_row(states[:, 1:], this.row), cache

    @property
    def output_rows(self) -> Float[Array, "v h"] | Panels | Padded | Quantised:
        return self.model.output_rows

    @property
    def dtype(self) -> Any:
        return self.model.embed[...].dtype

    def empty_pages(self, pages: int, page_size: int) -> Cache:
        return self.model.empty_pages(pages, page_size)
