"""A smaller model as the draft (Leviathan et al., https://arxiv.org/abs/2211.17192; SGLang's STANDALONE, vLLM's
draft_model).

It reads tokens and nothing of the target. Rounds speak of pairs (token t+1, feature t): of a pair it reads the token,
at its own position t+1, where heads stand at the feature's. So the pair's entry in the cache lies one slot further, and
slot 0 holds the first token of the text, of which no pair tells.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.kernels.linear.cpu import Panels
from eagle3_jax.kernels.linear.few_rows import Padded
from eagle3_jax.models.cache import KVCache
from eagle3_jax.models.drafts.head import Head, ShapeOfModel
from eagle3_jax.models.layers import at_row
from eagle3_jax.models.target import TargetModel


class DraftModel(Head):
    """A model of any family of targets; its state is the last hidden state behind the final norm."""

    config: ShapeOfModel

    def __init__(self, model: TargetModel) -> None:
        self.model = model.observed_at(())
        self.config = ShapeOfModel(self.model.config)

    def fuse(self, aux: Float[Array, "b t aux"]) -> Float[Array, "b t aux"]:
        """No state of the target: nothing to fuse."""
        return aux

    def feed(
        self,
        embed: Float[Array, "v target"],
        tokens: Int[Array, "b t"],
        features: Float[Array, "b t f"],
        positions: Int[Array, "b t"],
        cache: KVCache,
        lengths: Int[Array, " b"],
        *,
        tail_mask: Bool[Array, "b t m"] | None = None,
        preceding: Int[Array, "b 1"] | None = None,
        row: Int[Array, " b"] | None = None,
    ) -> tuple[Float[Array, "b r h"], KVCache]:
        """See `Head`; embeddings and features of the target are not read."""
        if preceding is None:
            states, _, cache = self.model(tokens, positions + 1, cache, lengths + 1, tail_mask)
            return at_row(states, row), cache
        # Slot `lengths` is empty where a text begins, and behind a prefix on shared pages; else what stands there is
        # written again, as it is where one stretch continues another in the same batch.
        tokens = jnp.concatenate([preceding, tokens], axis=1)
        positions = jnp.concatenate([positions[:, :1], positions + 1], axis=1)
        states, _, cache = self.model(tokens, positions, cache, lengths)
        return at_row(states[:, 1:], row), cache

    def output_hidden(self, state: Float[Array, "*batch h"]) -> Float[Array, "*batch h"]:
        """The state itself: it is normed."""
        return state

    @property
    def output_rows(self) -> Float[Array, "v h"] | Panels | Padded:
        return self.model.output_rows

    @property
    def dtype(self) -> Any:
        return self.model.embed[...].dtype

    def empty_cache(self, batch: int, slots: int) -> KVCache:
        return self.model.empty_cache(batch, slots)

    def empty_pages(self, pages: int, page_size: int) -> KVCache:
        return self.model.empty_pages(pages, page_size)
