"""Drafting: grow a tree of candidate tokens by cumulative log-probability (EAGLE3_SPEC section 5.2).

Level 1 is the top-k of the head's logits at the last committed pair; each later level feeds the k best candidates of
the level before to the head and takes the top-k of each. All candidates form a pool, of which the best are verified.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.config import DraftTree
from eagle3_jax.models.cache import KVCache
from eagle3_jax.models.draft import Draft
from eagle3_jax.models.llama import Llama


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenTree:
    """What the target verifies in one pass; node 0 is the root, and parents precede children.

    Attributes:
        tokens: target ids. parents: node indices, -1 at the root. depths: 0 at the root.
        mask: mask[b, i, j], whether j is i or an ancestor of i.
    """

    tokens: Int[Array, "b n"]
    parents: Int[Array, "b n"]
    depths: Int[Array, "b n"]
    mask: Bool[Array, "b n n"]


def root_only(root: Int[Array, " b"]) -> TokenTree:
    """The tree of vanilla decoding."""
    tokens = root[:, None]
    return TokenTree(tokens, jnp.full_like(tokens, -1), jnp.zeros_like(tokens), jnp.ones((*tokens.shape, 1), bool))


def scratch_slots(tree: DraftTree | None) -> int:
    """Cache slots behind the committed tokens that one round writes to."""
    if tree is None:
        return 1
    return max(tree.num_draft_tokens, tree.num_steps + 1, (tree.num_steps - 1) * tree.topk)


def feed(
    target: Llama,
    draft: Draft,
    tokens: Int[Array, "b t"],
    features: Float[Array, "b t h"],
    positions: Int[Array, "b t"],
    cache: KVCache,
    lengths: Int[Array, " b"],
    *,
    tail_mask: Bool[Array, "b t m"] | None = None,
) -> tuple[Float[Array, "b t h"], KVCache]:
    """Runs the head over pairs (token, feature) behind `lengths` committed ones.

    Args:
        tokens: target ids. positions: RoPE positions of the pairs.
        tail_mask: which of the m tail slots each pair sees; None is causal. The pairs take the last t; the earlier ones
            hold what the passes before left there.
    """
    updated = cache

    def attend(queries: Array, keys: Array, values: Array) -> Array:
        nonlocal updated
        attended, updated = updated.append_and_attend(0, queries, keys, values, lengths, tail_mask)
        return attended

    states = draft.head(target.embed[...][tokens], features, positions, attend)
    return states, updated


def grow(
    target: Llama,
    draft: Draft,
    tree: DraftTree,
    root: Int[Array, " b"],
    draft_state: Float[Array, "b h"],
    cache: KVCache,
    lengths: Int[Array, " b"],
) -> tuple[TokenTree, KVCache]:
    """Drafts the tree of one round.

    Args:
        root: the token after the committed ones.
        draft_state: the head's output at the last committed pair (whose token is the root).
        cache: the head's, with `lengths` committed pairs; slots behind them are scratch.

    Returns:
        The tree, and the cache with its scratch written.
    """
    k, batch = tree.topk, root.shape[0]
    scores, ids = draft.head.top_k(draft_state, k)
    frontier = jnp.broadcast_to(jnp.arange(k), (batch, k))  # indices into the pool
    pool = [(scores, ids, jnp.full((batch, k), -1))]
    features = jnp.broadcast_to(draft_state[:, None], (batch, k, draft_state.shape[-1]))
    seen = jnp.zeros((batch, k, 0), bool)
    for depth in range(1, tree.num_steps):  # the frontier's depth; its children are one deeper
        seen = jnp.concatenate([seen, jnp.broadcast_to(jnp.eye(k, dtype=bool), (batch, k, k))], axis=-1)
        positions = jnp.broadcast_to((lengths + depth - 1)[:, None], (batch, k))
        states, cache = feed(
            target,
            draft,
            draft.token_ids[ids],
            features,
            positions,
            cache,
            lengths,
            tail_mask=seen,
        )
        gained, candidates = draft.head.top_k(states, k)
        candidate_scores = (scores[:, :, None] + gained).reshape(batch, k * k)
        candidates = candidates.reshape(batch, k * k)
        first = k + (depth - 1) * k * k
        pool.append((candidate_scores, candidates, jnp.repeat(frontier, k, axis=1, total_repeat_length=k * k)))
        if depth + 1 < tree.num_steps:
            scores, best = jax.lax.top_k(candidate_scores, k)
            ids, frontier = jnp.take_along_axis(candidates, best, axis=1), first + best
            features = jnp.take_along_axis(states, (best // k)[:, :, None], axis=1)
            seen = jnp.take_along_axis(seen, (best // k)[:, :, None], axis=1)
    pool_scores, pool_ids, pool_parents = (jnp.concatenate(parts, axis=1) for parts in zip(*pool, strict=True))
    return rerank(tree, root, pool_scores, draft.token_ids[pool_ids], pool_parents), cache


def rerank(
    tree: DraftTree,
    root: Int[Array, " b"],
    scores: Float[Array, "b p"],
    tokens: Int[Array, "b p"],
    parents: Int[Array, "b p"],
) -> TokenTree:
    """The best num_draft_tokens - 1 candidates of the pool, and the root in front of them.

    A child never scores above its parent and stands behind it in the pool; `top_k` prefers the earlier of equals, so
    with a node its parent is always chosen too.
    """
    k, steps, nodes = tree.topk, tree.num_steps, tree.num_draft_tokens
    batch, size = scores.shape
    if nodes - 1 == size:  # all of them, in a chain always: the scores need not even be computed
        chosen = jnp.broadcast_to(jnp.arange(size), scores.shape)
        node_of = chosen + 1
    else:
        _, best = jax.lax.top_k(scores, nodes - 1)
        chosen = jnp.sort(best, axis=-1)
        member = jnp.any(best[:, :, None] == jnp.arange(size)[None, None], axis=1)
        node_of = jnp.cumsum(member, axis=-1, dtype=jnp.int32)  # pool index -> node index, where chosen
    parent = jnp.take_along_axis(parents, chosen, axis=1)
    parent = jnp.where(parent < 0, 0, jnp.take_along_axis(node_of, jnp.maximum(parent, 0), axis=1))
    level = jnp.concatenate([jnp.ones(k, jnp.int32), jnp.repeat(jnp.arange(2, steps + 1, dtype=jnp.int32), k * k)])
    column = jnp.zeros((batch, 1), jnp.int32)
    parent = jnp.concatenate([column - 1, parent], axis=1)
    return TokenTree(
        tokens=jnp.concatenate([root[:, None], jnp.take_along_axis(tokens, chosen, axis=1)], axis=1),
        parents=parent,
        depths=jnp.concatenate([column, level[chosen]], axis=1),
        mask=_ancestors(parent, steps),
    )


def _ancestors(parents: Int[Array, "b n"], depth: int) -> Bool[Array, "b n n"]:
    """Ancestors and self of every node, by climbing `depth` times."""
    nodes = parents.shape[1]
    climbed = jnp.broadcast_to(jnp.arange(nodes), parents.shape)
    mask = jnp.zeros((*parents.shape, nodes), bool)
    for _ in range(depth + 1):
        mask |= climbed[:, :, None] == jnp.arange(nodes)[None, None]
        climbed = jnp.maximum(jnp.take_along_axis(parents, climbed, axis=1), 0)
    return mask
