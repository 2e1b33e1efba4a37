"""`Head`, the interface of drafts to decoding rounds: fuse the target's states, run a pass, score the next tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.linear.layouts import Padded, Panels, Quantised
from eagle3_jax.kernels.vocabulary.api import vocabulary_logits, vocabulary_top_k
from eagle3_jax.models.cache import CachedAttention, KVCache, Pass
from eagle3_jax.models.layers import embeddings
from eagle3_jax.models.target import ModelConfig


class Head(nnx.Module):
    """A draft head: one decoder layer over pairs (token t+1, feature t), and an LM head over the draft vocabulary.

    A draft of another network (`DraftModel`) overrides `feed`, `output_rows`, `dtype` and the caches.

    Attributes:
        config: has `vocab_size` (the target's), `draft_vocab_size`, `hidden_size`, `num_key_value_heads`, `head_dim`,
            `max_position_embeddings`; for the target's states `aux_layers`, `num_aux_layers` and `target_hidden_size`.
        fc: input projection of the features, or of embeddings and features; its dtype is the head's.
        lm_head: [draft vocabulary, H], one row per draft token.
        vocabulary_rows: names of the parameters that have a row for each draft token.
    """

    vocabulary_rows: ClassVar[tuple[str, ...]] = ("lm_head",)
    config: Any
    fc: nnx.Param
    lm_head: nnx.Param

    def fuse(self, aux: Float[Array, "b t aux"]) -> Float[Array, "b t h"]:
        """Fuses the target's states (concatenated, ascending boundaries) into the feature of each position."""
        raise NotImplementedError

    def __call__(
        self,
        embeds: Float[Array, "b t h"],
        features: Float[Array, "b t h"],
        this: Pass,
        attend: Callable[[Array, Array, Array], Array],
    ) -> Float[Array, "b r h"]:
        """Runs one pass over pairs (token t+1, feature t).

        Args:
            embeds: the target's embeddings of the tokens.
            features: fused features, or the previous pass's output.
            this: positions of the pairs (the feature's); pairs outside its `row` get keys and values alone.
            attend: (q [b t n d], k [b t k d], v [b t k d]) -> [b t n d].

        Returns:
            The recurrent state, which `logits` and `top_k` read: of every pair, or of the pass's `row` (r = 1).
        """
        raise NotImplementedError

    def feed(
        self,
        embed: Float[Array, "v h"] | Quantised,
        tokens: Int[Array, "b t"],
        features: Float[Array, "b t h"],
        this: Pass,
        cache: KVCache,
    ) -> tuple[Float[Array, "b r h"], KVCache]:
        """Reads pairs (token, feature) behind the committed ones, and appends them to the cache.

        Args:
            embed: the target's embeddings.
            tokens: target ids.

        Returns:
            The state, as `__call__` returns it, and the cache.
        """
        attend = CachedAttention(this, cache)
        return self(embeddings(embed, tokens), features, this, attend), attend.cache

    def output_hidden(self, state: Float[Array, "*batch h"]) -> Float[Array, "*batch h"]:
        """Returns the LM head's input: `lm_head @ output_hidden(state)` are the draft logits."""
        raise NotImplementedError

    @property
    def output_rows(self) -> Float[Array, "dv h"] | Panels | Padded | Quantised:
        """Rows of the LM head, one per draft token."""
        return self.lm_head[...]

    @property
    def dtype(self) -> Any:
        """Dtype of the hidden states and the cache."""
        return self.fc[...].dtype

    def logits(self, state: Float[Array, "*batch h"]) -> Float[Array, "*batch dv"]:
        """Computes float32 logits over the draft vocabulary."""
        return vocabulary_logits(self.output_hidden(state), self.output_rows)

    def top_k(self, state: Float[Array, "*batch h"], k: int) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"]]:
        """Returns log-probabilities (float32) and draft ids of the k best next tokens, best first."""
        return vocabulary_top_k(self.output_hidden(state), self.output_rows, k)

    def empty_cache(self, batch: int, slots: int) -> KVCache:
        c = self.config
        return KVCache.empty(1, batch, c.num_key_value_heads, slots, c.head_dim, self.dtype)

    def empty_pages(self, pages: int, page_size: int) -> KVCache:
        c = self.config
        return KVCache.pages(1, pages, c.num_key_value_heads, page_size, c.head_dim, self.dtype)


@dataclasses.dataclass(frozen=True)
class ShapeOfModel:
    """`Head.config` of a draft shaped as a model: the target itself (MTP) or a smaller one.

    Attributes:
        aux_layers: boundaries that the draft reads of a target as wide as `model`.
    """

    model: ModelConfig
    aux_layers: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def draft_vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.model.hidden_size

    @property
    def num_key_value_heads(self) -> int:
        return self.model.num_key_value_heads

    @property
    def head_dim(self) -> int:
        return self.model.head_dim

    @property
    def max_position_embeddings(self) -> int:
        return self.model.max_position_embeddings

    @property
    def num_aux_layers(self) -> int:
        return len(self.aux_layers)

    @property
    def target_hidden_size(self) -> int:
        return self.hidden_size if self.aux_layers else 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draft:
    """A head and its draft vocabulary.

    Attributes:
        token_ids: int32 [draft vocabulary], the target's id of each draft token, ascending (absolute, not `d2t`).
            Kept outside the module, so that gradients see floats only.
    """

    head: Head
    token_ids: Int[Array, " dv"]
