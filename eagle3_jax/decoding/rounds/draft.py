"""Drafting: grow a tree of candidate tokens by cumulative log-probability (EAGLE-2, arXiv 2406.16858, section 4).

Level 1 is the top-k of the head's logits at the last committed pair; each later level feeds the k best candidates of
the level before to the head and takes the top-k of each. All candidates form a pool, of which the best are verified.

Tokens copied from the text (`lookup`) join the pool as one more branch: as far as the head proposes the same, its own
nodes gain their score, and from where the two part they are nodes of their own.

Drafts that are drawn (without replacement, from the head's distribution at the request's temperature) take the place of
the top-k where multi-candidate rejection sampling verifies them. It is exact only if whether a draft is verified does
not depend on which token it is: so a node's children enter in the order of drawing, nodes by their parent's score, and
a copied token is the last of its siblings, a node of its own whatever was drawn.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding.rounds.lookup import Copied
from eagle3_jax.decoding.rounds.sampling import DRAFTS, Sampling, draw
from eagle3_jax.decoding.rounds.tree import Drawn, TokenTree, rerank
from eagle3_jax.kernels.vocabulary.api import top_k_of_logits
from eagle3_jax.mesh import constrain
from eagle3_jax.models.cache import KVCache, PageTable
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.target import TargetModel


def grow(
    target: TargetModel,
    draft: Draft,
    tree: DraftTree,
    root: Int[Array, " b"],
    draft_state: Float[Array, "b h"],
    cache: KVCache,
    lengths: Int[Array, " b"],
    sampling: Sampling | None = None,
    copied: Copied | None = None,
    page_table: PageTable | None = None,
) -> tuple[TokenTree, KVCache]:
    """Drafts the tree of one round.

    Args:
        root: the token after the committed ones.
        draft_state: the head's output at the last committed pair (whose token is the root).
        cache: the head's, with `lengths` committed pairs; slots behind them are scratch.
        sampling: draws the drafts of requests with a temperature; None takes the head's best for all.
        copied: `tree.lookup_tokens` for each root; None where that is 0.
        page_table: None where the cache is contiguous.

    Returns:
        The tree, and the cache with its scratch written.
    """
    k, batch = tree.topk, root.shape[0]
    groups = 1 + (tree.num_steps - 1) * k
    coins = None if sampling is None else sampling.uniform(lengths, DRAFTS, groups, k, 2)
    drawn: list[Array] = []

    def children(states: Float[Array, "b m h"]) -> tuple[Float[Array, "b m k"], Int[Array, "b m k"]]:
        """Log-probabilities and draft ids."""
        if sampling is None or coins is None:
            return draft.head.top_k(states, k)
        # Gathered once: else each draw asks several times what the devices that share the vocabulary have.
        logits = constrain(draft.head.logits(states), ((r"", P("data")),))
        first = sum(probs.shape[1] for probs in drawn)
        gained, candidates, probs = _draw_children(logits, sampling, coins[:, first : first + states.shape[1]])
        drawn.append(probs)
        return gained, candidates

    scores, ids = (x[:, 0] for x in children(draft_state[:, None]))
    frontier = jnp.broadcast_to(jnp.arange(k), (batch, k))  # indices into the pool
    pool = [(scores, ids, jnp.full((batch, k), -1), jnp.zeros((batch, k)))]
    features = jnp.broadcast_to(draft_state[:, None], (batch, k, draft_state.shape[-1]))
    seen = jnp.zeros((batch, k, 0), bool)
    for depth in range(1, tree.num_steps):  # the frontier's depth; its children are one deeper
        seen = jnp.concatenate([seen, jnp.broadcast_to(jnp.eye(k, dtype=bool), (batch, k, k))], axis=-1)
        positions = jnp.broadcast_to((lengths + depth - 1)[:, None], (batch, k))
        states, cache = draft.head.feed(
            target.embed[...],
            draft.token_ids[ids],
            features,
            positions,
            cache,
            lengths,
            tail_mask=seen,
            page_table=page_table,
        )
        gained, candidates = children(states)
        candidate_scores = (scores[:, :, None] + gained).reshape(batch, k * k)
        candidates = candidates.reshape(batch, k * k)
        first = k + (depth - 1) * k * k
        parents, parent_scores = (jnp.repeat(x, k, axis=1, total_repeat_length=k * k) for x in (frontier, scores))
        pool.append((candidate_scores, candidates, parents, parent_scores))
        if depth + 1 < tree.num_steps:
            scores, best = jax.lax.top_k(candidate_scores, k)
            ids, frontier = jnp.take_along_axis(candidates, best, axis=1), first + best
            features = jnp.take_along_axis(states, (best // k)[:, :, None], axis=1)
            seen = jnp.take_along_axis(seen, (best // k)[:, :, None], axis=1)
    pool_scores, pool_ids, pool_parents, parent_scores = (
        jnp.concatenate(parts, axis=1) for parts in zip(*pool, strict=True)
    )
    tokens, size = draft.token_ids[pool_ids], pool_ids.shape[1]
    merges, order = jnp.ones(batch, bool), pool_scores
    if sampling is not None:
        merges = sampling.temperature <= 0
        order = jnp.where(merges[:, None], pool_scores, parent_scores)
    if copied is not None:
        order, tokens, pool_parents = graft(order, tokens, pool_parents, copied, merges)
    nodes, chosen = rerank(tree, root, order, tokens, pool_parents)
    if sampling is None:
        return nodes, cache
    group = jnp.pad(jnp.where(chosen < size, chosen // k, -1), ((0, 0), (1, 0)))
    probs = jnp.concatenate(drawn, axis=1)
    return dataclasses.replace(nodes, drawn=Drawn(probs, group, draft.token_ids, k, copied is not None)), cache


# Parent of a copied token that is no candidate: the head's own stands for it, or nothing was found to copy.
NOBODY = -2


def graft(
    order: Float[Array, "b p"],
    tokens: Int[Array, "b p"],
    parents: Int[Array, "b p"],
    copied: Copied,
    merges: Bool[Array, " b"],
) -> tuple[Float[Array, "b q"], Int[Array, "b q"], Int[Array, "b q"]]:
    """Joins copied tokens to the pool, behind the head's candidates.

    Where `merges` says so, the head's candidates stand for copied tokens that it proposes too, with the better of both
    scores. Beside drawn drafts that would be wrong: whether one is verified may not depend on which token it is. There
    a twin does no harm: when the drawn one was rejected, nothing of p is left for it. A score never exceeds its
    parent's, on which `rerank` relies.

    Returns:
        The pool's scores, tokens and parents, now q = p + c.
    """
    size = order.shape[1]
    above = jnp.zeros(order.shape[0])
    node = jnp.full_like(parents[:, 0], -1)  # to which the copied text has led
    new = []
    for i in range(copied.tokens.shape[1]):
        token, above = copied.tokens[:, i], jnp.minimum(copied.scores[:, i], above)
        same = (parents == node[:, None]) & (tokens == token[:, None]) & merges[:, None]
        held, at = same.any(axis=1), jnp.argmax(same, axis=1).astype(jnp.int32)
        order = jnp.where(same, jnp.maximum(order, above[:, None]), order)
        idle = held | jnp.isneginf(above)
        new.append((jnp.where(idle, -jnp.inf, above), token, jnp.where(idle, NOBODY, node)))
        above = jnp.where(held, jnp.take_along_axis(order, at[:, None], axis=1)[:, 0], above)
        node = jnp.where(held, at, size + i)
    scores, ids, above_them = (jnp.stack(x, axis=1) for x in zip(*new, strict=True))
    return (
        jnp.concatenate([order, scores], axis=1),
        jnp.concatenate([tokens, ids], axis=1),
        jnp.concatenate([parents, above_them], axis=1),
    )


def _draw_children(
    logits: Float[Array, "b m dv"], sampling: Sampling, coins: Float[Array, "b m k 2"]
) -> tuple[Float[Array, "b m k"], Int[Array, "b m k"], Float[Array, "b m dv"]]:
    """k tokens for each of m nodes, without replacement: their log-probabilities, ids, and what they are drawn from.

    Requests without a temperature get the best ones. Behind the last token that has a probability comes one of none.
    """
    (batch, nodes, size), k = logits.shape, coins.shape[2]
    sampled = sampling.temperature[:, None, None] > 0
    probs = jax.nn.softmax(logits / jnp.where(sampled, sampling.temperature[:, None, None], 1.0), axis=-1)
    left, column, found = probs.reshape(-1, size), jnp.arange(size)[None], []
    for i in range(k):
        ids = jnp.minimum(draw(coins[:, :, i].reshape(-1, 2), left), size - 1)[:, None]
        found.append((jnp.log(jnp.take_along_axis(left, ids, axis=1)), ids))
        left = jnp.where(column == ids, 0.0, left)
    gained, ids = (jnp.concatenate(x, axis=1).reshape(batch, nodes, k) for x in zip(*found, strict=True))
    best = top_k_of_logits(logits, k)
    return jnp.where(sampled, gained, best[0]), jnp.where(sampled, ids, best[1]), probs
