"""Token trees, which the target verifies in one pass, and the choice of their nodes from a pool of candidates."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding.rounds.lookup import Copied
from eagle3_jax.mesh import constrain


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenTree:
    """A tree of tokens; node 0 is the root, and parents precede children.

    Attributes:
        tokens: target ids.
        depths: 0 at the root.
        parents: node indices; -1 at the root and at padding.
        mask: mask[b, i, j], whether j is i or an ancestor of i.
        drawn: distributions of drawn drafts; None if the drafts are the head's best.
    """

    tokens: Int[Array, "b n"]
    parents: Int[Array, "b n"]
    depths: Int[Array, "b n"]
    mask: Bool[Array, "b n n"]
    drawn: Drawn | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drawn:
    """Distributions of drafts that were drawn without replacement; siblings are in the order of drawing.

    Attributes:
        levels: over the draft vocabulary, for each group of siblings, level by level [b, groups of the level, dv].
        group: group of each node; -1 for a copied node. The root's 0 is unused.
        token_ids: the target's id of each draft token.
        topk: most siblings that are drawn.
        copied: whether there are copied nodes.
    """

    levels: tuple[Float[Array, "b _ dv"], ...]
    group: Int[Array, "b n"]
    token_ids: Int[Array, " dv"]
    topk: int = dataclasses.field(metadata={"static": True})
    copied: bool = dataclasses.field(metadata={"static": True})

    @property
    def probs(self) -> Float[Array, "b g dv"]:
        """All levels in one array, whole on every device, which greedy rounds do not make."""
        return constrain(jnp.concatenate(self.levels, axis=1), ((r"", P("data")),))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LastTree:
    """The tree of each sequence's last round, to be shown; -1 in unused places.

    Attributes:
        parents: node indices.
        taken: whether a node is the root or was accepted.
    """

    tokens: Int[Array, "b n"]
    parents: Int[Array, "b n"]
    taken: Bool[Array, "b n"]

    @classmethod
    def empty(cls, batch: int, nodes: int) -> LastTree:
        none = jnp.full((batch, nodes), -1, jnp.int32)
        return cls(none, none, jnp.zeros((batch, nodes), bool))

    def note(self, nodes: TokenTree, path: Int[Array, "b p"], running: Bool[Array, " b"]) -> LastTree:
        """Replaces the trees of the sequences that took part in a round; `path`: accepted nodes, see `Walk`."""
        room = self.tokens.shape[1] - nodes.tokens.shape[1]
        taken = (path[:, :, None] == jnp.arange(self.tokens.shape[1])[None, None]).any(axis=1)

        def padded(x: Array) -> Array:
            return jnp.pad(x, ((0, 0), (0, room)), constant_values=-1)

        new = LastTree(padded(nodes.tokens), padded(nodes.parents), taken)
        return jax.tree.map(lambda x, old: jnp.where(running[:, None], x, old), new, self)


def chain(root: Int[Array, " b"], drafts: Int[Array, "b c"]) -> TokenTree:
    """Makes a chain of drafts."""
    tokens = jnp.concatenate([root[:, None], drafts], axis=1)
    depths = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return TokenTree(tokens, depths - 1, depths, depths[:, :, None] >= depths[:, None, :])


def chain_of_copies(root: Int[Array, " b"], copied: Copied) -> TokenTree:
    """Makes a chain of copied tokens; the root alone in rows without a match."""
    nodes = chain(root, copied.tokens)
    known = jnp.isfinite(copied.scores[:, :1])
    return dataclasses.replace(nodes, parents=jnp.where(known, nodes.parents, -1))


def root_only(root: Int[Array, " b"]) -> TokenTree:
    """Makes the tree of vanilla decoding."""
    return chain(root, jnp.zeros((len(root), 0), root.dtype))


def rerank(
    tree: DraftTree,
    root: Int[Array, " b"],
    scores: Float[Array, "b p"],
    tokens: Int[Array, "b p"],
    parents: Int[Array, "b p"],
) -> tuple[TokenTree, Int[Array, "b drafts"]]:
    """Chooses the best num_draft_tokens - 1 candidates of the pool. Returns the tree, root first, and their indices.

    A child never scores above its parent and follows it in the pool; `top_k` prefers the earlier of equals. So the
    parent of a chosen node is always chosen. With NaN scores it may not be, and the child gets another parent. Depths
    and mask follow the parents, so the target still reads each node at the position of its own path. Tokens that it
    accepts greedily are still its own.
    """
    drafts = tree.num_draft_tokens - 1
    batch, size = scores.shape
    if drafts == size:  # all of them, as always in a chain: the scores need not be computed
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
    """Returns the ancestors and self of every node, by climbing `depth` times."""
    nodes = parents.shape[1]
    climbed = jnp.broadcast_to(jnp.arange(nodes), parents.shape)
    mask = jnp.zeros((*parents.shape, nodes), bool)
    for _ in range(depth + 1):
        mask |= climbed[:, :, None] == jnp.arange(nodes)[None, None]
        climbed = jnp.maximum(jnp.take_along_axis(parents, climbed, axis=1), 0)
    return mask
