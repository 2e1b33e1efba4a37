"""Token trees: what the target verifies in one pass, and which candidates of a pool enter it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding.rounds.lookup import Copied


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenTree:
    """What the target verifies in one pass; node 0 is the root, and parents precede children.

    Attributes:
        tokens: target ids. depths: 0 at the root.
        parents: node indices, -1 at the root and at what only fills a place.
        mask: mask[b, i, j], whether j is i or an ancestor of i.
        drawn: what the drafts were drawn from; None where they are the head's best.
    """

    tokens: Int[Array, "b n"]
    parents: Int[Array, "b n"]
    depths: Int[Array, "b n"]
    mask: Bool[Array, "b n n"]
    drawn: Drawn | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drawn:
    """The distributions of drafts that were drawn without replacement; siblings stand in the order of drawing.

    Attributes:
        probs: over the draft vocabulary, of each group of siblings.
        group: of each node; -1 of a copied one, which no chance chose; of the root 0, which says nothing.
        token_ids: the target's id of each draft token.
        topk: most siblings that were drawn.
        copied: whether there are copied nodes.
    """

    probs: Float[Array, "b g dv"]
    group: Int[Array, "b n"]
    token_ids: Int[Array, " dv"]
    topk: int = dataclasses.field(metadata={"static": True})
    copied: bool = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LastTree:
    """What a sequence's last round drafted, for those who watch; -1 in places that the round had no use for.

    Attributes:
        parents: node indices. taken: the root, and the drafts that were accepted.
    """

    tokens: Int[Array, "b n"]
    parents: Int[Array, "b n"]
    taken: Bool[Array, "b n"]

    @classmethod
    def empty(cls, batch: int, nodes: int) -> LastTree:
        none = jnp.full((batch, nodes), -1, jnp.int32)
        return cls(none, none, jnp.zeros((batch, nodes), bool))

    def note(self, nodes: TokenTree, path: Int[Array, "b p"], running: Bool[Array, " b"]) -> LastTree:
        """Args: path: nodes that were taken, see `Walk`. running: sequences that took part in this round."""
        room = self.tokens.shape[1] - nodes.tokens.shape[1]
        taken = (path[:, :, None] == jnp.arange(self.tokens.shape[1])[None, None]).any(axis=1)

        def padded(x: Array) -> Array:
            return jnp.pad(x, ((0, 0), (0, room)), constant_values=-1)

        new = LastTree(padded(nodes.tokens), padded(nodes.parents), taken)
        return jax.tree.map(lambda x, old: jnp.where(running[:, None], x, old), new, self)

    def stacked(self) -> Int[Array, "b 3 n"]:
        """Tokens, parents and whether each was taken, in one array."""
        return jnp.stack([self.tokens, self.parents, self.taken.astype(jnp.int32)], axis=1)


def chain(root: Int[Array, " b"], drafts: Int[Array, "b c"]) -> TokenTree:
    """Drafts that follow each other."""
    tokens = jnp.concatenate([root[:, None], drafts], axis=1)
    depths = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return TokenTree(tokens, depths - 1, depths, depths[:, :, None] >= depths[:, None, :])


def chain_of_copies(root: Int[Array, " b"], copied: Copied) -> TokenTree:
    """A chain of what was copied from the text; in rows where nothing was, the root alone."""
    nodes = chain(root, copied.tokens)
    known = jnp.isfinite(copied.scores[:, :1])
    return dataclasses.replace(nodes, parents=jnp.where(known, nodes.parents, -1))


def root_only(root: Int[Array, " b"]) -> TokenTree:
    """The tree of vanilla decoding."""
    return chain(root, jnp.zeros((len(root), 0), root.dtype))


def steps_of(tree: DraftTree | None) -> int:
    """Most drafts that one round can accept."""
    return 0 if tree is None else tree.depth


def scratch_slots(tree: DraftTree | None) -> int:
    """Cache slots behind the committed tokens that one round writes to; a draft model's entries lie one further."""
    if tree is None:
        return 1
    return max(tree.num_draft_tokens, 1 + tree.depth + 1, 1 + (tree.num_steps - 1) * tree.topk)


def rerank(
    tree: DraftTree,
    root: Int[Array, " b"],
    scores: Float[Array, "b p"],
    tokens: Int[Array, "b p"],
    parents: Int[Array, "b p"],
) -> tuple[TokenTree, Int[Array, "b drafts"]]:
    """The best num_draft_tokens - 1 candidates of the pool, and the root in front of them; and which they are.

    A child never scores above its parent and stands behind it in the pool; `top_k` prefers the earlier of equals, so
    with a node its parent is always chosen too. Where scores are NaN it may not be, and the child hangs elsewhere;
    depths and mask follow the parents, so the target still reads each node at the position of its own path, and tokens
    that it accepts greedily are its own.
    """
    drafts = tree.num_draft_tokens - 1
    batch, size = scores.shape
    if drafts == size:  # all of them, in a chain always: the scores need not even be computed
        chosen = jnp.broadcast_to(jnp.arange(size), scores.shape)
        node_of = chosen + 1
    else:
        _, best = jax.lax.top_k(scores, drafts)
        chosen = jnp.sort(best, axis=-1)
        member = jnp.any(best[:, :, None] == jnp.arange(size)[None, None], axis=1)
        node_of = jnp.cumsum(member, axis=-1, dtype=jnp.int32)  # pool index -> node index, where chosen
    parent = jnp.take_along_axis(parents, chosen, axis=1)
    of_pool = jnp.take_along_axis(node_of, jnp.maximum(parent, 0), axis=1)
    parent = jnp.where(parent < 0, parent + 1, of_pool)  # the root is node 0, and NOBODY becomes -1
    parent = jnp.concatenate([jnp.full((batch, 1), -1), parent], axis=1)
    mask = _ancestors(parent, tree.depth)
    nodes = TokenTree(
        tokens=jnp.concatenate([root[:, None], jnp.take_along_axis(tokens, chosen, axis=1)], axis=1),
        parents=parent,
        depths=mask.sum(axis=-1, dtype=jnp.int32) - 1,
        mask=mask,
    )
    return nodes, chosen


def _ancestors(parents: Int[Array, "b n"], depth: int) -> Bool[Array, "b n n"]:
    """Ancestors and self of every node, by climbing `depth` times."""
    nodes = parents.shape[1]
    climbed = jnp.broadcast_to(jnp.arange(nodes), parents.shape)
    mask = jnp.zeros((*parents.shape, nodes), bool)
    for _ in range(depth + 1):
        mask |= climbed[:, :, None] == jnp.arange(nodes)[None, None]
        climbed = jnp.maximum(jnp.take_along_axis(parents, climbed, axis=1), 0)
    return mask
