"""`Head`, the interface of drafts to decoding rounds: fuse the target's states, run a pass, score the next tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.config import DraftTree
from eagle3_jax.kernels.linear.layouts import Padded, Panels, Quantised
from eagle3_jax.kernels.vocabulary.api import vocabulary_logits, vocabulary_top_k
from eagle3_jax.models.cache import Cache, KVCache, LayerPass, Pass, slots_of
from eagle3_jax.models.drafts.levels import Recurrent, Rows
from eagle3_jax.models.layers import Scaling, embeddings
from eagle3_jax.models.target_config import ModelConfig

# Sizes of drafts of which the engine takes the fastest. Until it knows, it takes a chain of 3.
CHAIN = DraftTree(num_steps=3, num_draft_tokens=4)
TREES = (
    DraftTree(num_steps=1, num_draft_tokens=2),
    CHAIN,
    DraftTree(num_steps=3, topk=3, num_draft_tokens=8, lookup_tokens=7),
    DraftTree(num_steps=5, topk=4, num_draft_tokens=16, lookup_tokens=8),
)


class Head(nnx.Module):
    """A draft head: one decoder layer over pairs (token t+1, feature t), and an LM head over the draft vocabulary.

    A draft of another network (`DraftModel`) overrides `feed`, `output_rows`, `dtype` and `empty_pages`.

    Attributes:
        config: has `vocab_size` (the target's), `draft_vocab_size`, `hidden_size`, `num_key_value_heads`, `head_dim`,
            `max_position_embeddings`; for the target's states `aux_layers`, `num_aux_layers` and `target_hidden_size`.
        fc: input projection of the features, or of embeddings and features; its dtype is the head's.
        lm_head: [draft vocabulary, H], one row per draft token.
        vocabulary_rows: names of the parameters that have a row for each draft token.
        gathered: names of the parameters of which a round reads single rows.
        read_once: names of the parameters that the last of a round's `passes` reads, and no other.
        model: the smaller model that drafts; None: the head is a layer over the target's states.
        reads_target: whether its passes attend to the target's cache, and it has none of its own.
    """

    vocabulary_rows: ClassVar[tuple[str, ...]] = ("lm_head",)
    gathered: ClassVar[tuple[str, ...]] = ("lm_head",)
    read_once: ClassVar[tuple[str, ...]] = ()
    model: Any = None
    recurrent: ClassVar[type[Recurrent]] = Recurrent  # what `levels` returns
    reads_target: ClassVar[bool] = False
    config: Any
    fc: nnx.Param
    lm_head: nnx.Param

    def fuse(self, aux: Float[Array, "b t aux"]) -> Float[Array, "b t h"]:
        """Fuses the target's states (concatenated, ascending boundaries) into features; here the one state is it."""
        return aux

    def __call__(
        self, embeds: Float[Array, "b t h"], features: Float[Array, "b t h"], this: Pass, attend: Callable[..., Array]
    ) -> Float[Array, "b r h"]:
        """Runs one pass over pairs (token t+1, feature t).

        Args:
            embeds: the target's embeddings of the tokens.
            features: fused features, or the previous pass's output.
            this: positions of the pairs (the feature's); pairs outside its `row` get keys and values alone.
            attend: (q [b t n d], k [b t k d], v [b t k d], *, window) -> [b t n d]; see `LayerPass`.

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
        cache: Cache,
    ) -> tuple[Float[Array, "b r h"], Cache]:
        """Reads pairs (token, feature) behind the committed ones, and appends them to the cache; tokens are target ids.

        Returns the state, as `__call__` returns it, and the cache.
        """
        own = LayerPass(this.with_tail_positions(), cache.layers[0])
        return self(embeddings(embed, tokens), features, this, own), cache.with_layer(0, own.cache)

    def levels(
        self,
        embed: Float[Array, "v e"] | Quantised,
        tree: DraftTree,
        root: Int[Array, " b"],
        state: Float[Array, "b h"],
        this: Pass,
        cache: Cache,
        *,
        greedy: bool | Bool[Array, ""],
    ) -> Recurrent | Rows:
        """Begins to draft a tree behind the committed pairs.

        Args:
            embed: the target's embeddings.
            root: the token after the committed ones.
            state: what `feed` returned of the last committed pair, whose token is the root.
            this: the pass behind the committed pairs; its positions and masks are not read.
            cache: the head's, or the target's if it reads that; slots behind the committed pairs are scratch.
            greedy: whether the best children alone are asked for, never logits; an array is known on the device alone.
        """
        return self.recurrent(self, embed, root, state, this, cache)

    def passes(self, tree: DraftTree) -> list[int]:
        """Lists the nodes of a sequence in each pass of a round; the last one reads the committed tokens."""
        return [tree.topk] * (tree.num_steps - 1) + [tree.depth + 1]

    @property
    def drafts(self) -> int | None:
        """Most tokens of a chain; None: as many as asked for."""
        return None

    @property
    def most_children(self) -> int:
        """Most tokens that are proposed behind a node."""
        return self.config.draft_vocab_size

    @property
    def trees(self) -> tuple[DraftTree, ...]:
        """The sizes that the engine chooses from unless others are asked for."""
        return tuple(tree for tree in TREES if tree.topk <= self.most_children)

    @property
    def first_tree(self) -> DraftTree:
        """The size among `trees` that is taken until costs are known: the whole chain of one pass, else one of 3."""
        return CHAIN if self.drafts is None else DraftTree(num_steps=self.drafts, num_draft_tokens=self.drafts + 1)

    def output_hidden(self, state: Float[Array, "*batch h"]) -> Float[Array, "*batch h"]:
        """Returns the LM head's input: `lm_head @ output_hidden(state)` are the draft logits. Here the state is it."""
        return state

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

    @property
    def cached_layers(self) -> int:
        """Layers with a cache of keys and values."""
        return 0 if self.reads_target else 1

    def empty_cache(self, batch: int, slots: int) -> Cache:
        """Allocates at least `slots` entries per sequence."""
        return self.empty_pages(batch, slots_of(slots))

    def empty_pages(self, pages: int, page_size: int) -> Cache:
        """Allocates free pages."""
        c = self.config
        form = pages, c.num_key_value_heads, page_size, c.head_dim, self.dtype
        return Cache(tuple(KVCache.pages(*form) for _ in range(self.cached_layers)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """What all heads of layers of their own have in their shape; fields are named as in a head's config.json.

    `vocab_size` is the target's vocabulary, `draft_vocab_size` the head's own, or the part of it that is drafted.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    rope_scaling: Scaling | None = None


@dataclasses.dataclass(frozen=True)
class ShapeOfModel:
    """`Head.config` of a draft shaped as a model: as the target, whose `aux_layers` it reads (MTP), or smaller."""

    model: ModelConfig
    aux_layers: tuple[int, ...] = ()

    vocab_size = draft_vocab_size = property(lambda self: self.model.vocab_size)
    hidden_size = property(lambda self: self.model.hidden_size)
    num_key_value_heads = property(lambda self: self.model.num_key_value_heads)
    head_dim = property(lambda self: self.model.head_dim)
    max_position_embeddings = property(lambda self: self.model.max_position_embeddings)
    num_aux_layers = property(lambda self: len(self.aux_layers))
    target_hidden_size = property(lambda self: self.hidden_size if self.aux_layers else 0)


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
