"""Gemma 4's assistant: a few of its layers that read the target's own keys and values, and keep none themselves.

A pass reads the embedding of the last token and the target's last hidden state, or the state that the pass before it
left. All passes of a round stand at the position of the first token that the target has not read, and see what it has
read. Sources: transformers' models/gemma4_assistant and generation/candidate_generator.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.config import DraftTree
from eagle3_jax.kernels.linear.api import linear
from eagle3_jax.kernels.linear.layouts import Quantised
from eagle3_jax.kernels.vocabulary.api import top_k_of_logits, vocabulary_logits
from eagle3_jax.models.cache import Cache, LayerPass, Pass
from eagle3_jax.models.checkpoint.table import Entry, kernel, plain
from eagle3_jax.models.drafts.head import Head, ShapeOfModel
from eagle3_jax.models.drafts.levels import Recurrent
from eagle3_jax.models.families import gemma3, gemma4
from eagle3_jax.models.families.gemma4 import Gemma4Config
from eagle3_jax.models.layers import at_row, normal, ones

_IMPOSSIBLE = -1e30  # the logit of a token outside the chosen clusters


@dataclasses.dataclass(frozen=True, kw_only=True)
class AssistantShape(ShapeOfModel):
    """`model` is the target.

    Attributes:
        own: shape of the assistant's layers.
        num_centroids: clusters of equal size, of which the vocabulary consists; 0: there are none.
        centroid_intermediate_top_k: clusters whose tokens may be drafted.
    """

    own: Gemma4Config
    num_centroids: int = 0
    centroid_intermediate_top_k: int = 32


class _Levels(Recurrent):
    """Each level is a pass over the frontier; before the first one there is a pass over the root."""

    def __init__(self, head: Any, embed: Any, root: Int[Array, " b"], *given: Any) -> None:
        super().__init__(head, embed, root, *given)
        self.descend(root[:, None], jnp.zeros((len(root), 1), jnp.int32))

    def descend(self, tokens: Int[Array, "b k"], parents: Int[Array, "b k"]) -> None:
        features = jnp.take_along_axis(self._states, parents[:, :, None], axis=1)
        self._states, self.cache = self._head.run(self._embed, tokens, features, self._this, self.cache)


class Gemma4Assistant(Head):
    """The assistant; `fc` [2H, h] and `project` [h, H] lead from the target's width to its own and back.

    `lm_head` [V, h]; with clusters their centroids [clusters, h], and `members` [V, h] has the rows of their tokens,
    cluster by cluster: the order of the draft vocabulary.
    """

    reads_target: ClassVar[bool] = True
    recurrent = _Levels
    config: AssistantShape

    def __init__(self, config: AssistantShape, *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
        c = config
        own, self.config = c.own, c
        self.fc, self.project = (
            normal(shape, dtype, rngs)
            for shape in ((2 * c.hidden_size, own.hidden_size), (own.hidden_size, c.hidden_size))
        )
        self.blocks = nnx.List([gemma4.Block(own, i, dtype=dtype, rngs=rngs) for i in range(own.num_hidden_layers)])
        self.norm = ones(own.hidden_size, dtype)
        self.lm_head = normal((c.num_centroids or c.vocab_size, own.hidden_size), dtype, rngs)
        if c.num_centroids:
            self.members = normal((c.vocab_size, own.hidden_size), dtype, rngs)

    def passes(self, tree: DraftTree) -> list[int]:
        """See `Head`; none reads the committed tokens."""
        return [1, *[tree.topk] * (tree.num_steps - 1)]

    def feed(
        self,
        embed: Float[Array, "v h"] | Quantised,
        tokens: Int[Array, "b t"],
        features: Float[Array, "b t h"],
        this: Pass,
        cache: Cache,
    ) -> tuple[Float[Array, "b r h"], Cache]:
        """See `Head`: the state is the feature, which the first pass of a round reads."""
        return at_row(features, this.row), cache

    def run(
        self,
        embed: Float[Array, "v h"] | Quantised,
        tokens: Int[Array, "b m"],
        states: Float[Array, "b m given"],
        this: Pass,
        cache: Cache,
    ) -> tuple[Float[Array, "b m both"], Cache]:
        """Runs one pass over nodes that see the committed tokens alone, none another.

        `states` are those of their parents, or the target's. Returns theirs (the feature of the next pass, then the LM
        head's input), and the cache. Scratch is written behind the committed entries, as attention does.
        """
        own, target, (b, m) = self.config.own, self.config.model, tokens.shape
        assert isinstance(target, Gemma4Config)
        x = self.entering(gemma3.scaled_embeddings(embed, tokens), states)
        at = jnp.broadcast_to(this.lengths[:, None], (b, m))
        ropes = gemma3.ropes(own, at)
        # A window ends at the last token that was read.
        hidden = {"tail_mask": jnp.zeros((b, m, m), bool), "tail_positions": jnp.zeros((b, m, m), jnp.int32)}
        seeing = dataclasses.replace(this, positions=at - 1, **hidden)
        for layer, block in enumerate(self.blocks):
            place = target.lender(local=block.local)
            nothing = jnp.zeros((b, m, *own.heads(layer)), x.dtype)
            attend = LayerPass(seeing, cache.layers[place], (nothing, nothing))
            x = block(x, (ropes, None), attend)
            cache = cache.with_layer(place, attend.cache)
        return self.leaving(x), cache

    def entering(self, embeds: Float[Array, "b m h"], states: Float[Array, "b m given"]) -> Float[Array, "b m own"]:
        """Joins scaled embeddings and the parents' states, or the target's, to what enters the first layer."""
        features = states[..., : self.config.hidden_size]
        return linear(jnp.concatenate([embeds, features], axis=-1), self.fc[...])

    def leaving(self, x: Float[Array, "b m own"]) -> Float[Array, "b m both"]:
        """Makes states of what leaves the last layer."""
        x = gemma3.float32_norm(x, self.norm[...], self.config.own.rms_norm_eps)
        return jnp.concatenate([linear(x, self.project[...]), x], axis=-1)

    def output_hidden(self, state: Float[Array, "*batch both"]) -> Float[Array, "*batch own"]:
        """Returns the part of a state that is normed already."""
        return state[..., self.config.hidden_size :]

    def top_k(
        self, state: Float[Array, "*batch both"], k: int
    ) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"]]:
        if not self.config.num_centroids:
            return super().top_k(state, k)
        logits, ids = self._of_clusters(state)
        gained, best = top_k_of_logits(logits, k)
        return gained, jnp.take_along_axis(ids, best, axis=-1)

    def logits(self, state: Float[Array, "*batch both"]) -> Float[Array, "*batch dv"]:
        if not self.config.num_centroids:
            return super().logits(state)
        logits, ids = self._of_clusters(state)
        none = jnp.full((*state.shape[:-1], self.config.vocab_size), _IMPOSSIBLE)
        return jnp.put_along_axis(none, ids, logits, axis=-1, inplace=False)

    def _of_clusters(
        self, state: Float[Array, "*batch both"]
    ) -> tuple[Float[Array, "*batch n"], Int[Array, "*batch n"]]:
        """Computes the logits of the tokens in the best clusters, and their draft ids."""
        c, x = self.config, self.output_hidden(state)
        size = c.vocab_size // c.num_centroids
        _, best = jax.lax.top_k(vocabulary_logits(x, self.output_rows), c.centroid_intermediate_top_k)
        ids = (best[..., None] * size + jnp.arange(size)[(None,) * best.ndim]).reshape(*best.shape[:-1], -1)
        logits = jnp.einsum(
            *("...nh,...h->...n", self.members[...][ids], x),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        return logits, ids


def table(shape: AssistantShape) -> dict[str, Entry]:
    """Maps parameter paths to tensors as transformers names them."""
    c, own = shape, shape.own
    rows = plain("model.embed_tokens.weight", c.vocab_size, own.hidden_size)
    entries = {
        "fc": kernel("pre_projection.weight", own.hidden_size, 2 * c.hidden_size),
        "project": kernel("post_projection.weight", c.hidden_size, own.hidden_size),
        "norm": plain("model.norm.weight", own.hidden_size),
        "lm_head": rows,
    }
    if c.num_centroids:
        entries["members"] = rows
        entries["lm_head"] = plain("masked_embedding.centroids.weight", c.num_centroids, own.hidden_size)
    for layer in range(own.num_hidden_layers):
        entries |= gemma4.layer_table(own, layer)
    return entries
