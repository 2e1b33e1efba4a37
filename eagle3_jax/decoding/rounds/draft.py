"""Drafting: grows a tree of candidate tokens by cumulative log-probability (EAGLE-2, arXiv 2406.16858, section 4).

Level 1 is the top-k of the head's logits at the last committed pair. Each later level feeds the k best candidates of
the previous level to the head and takes the top-k of each. A block head runs one pass, and each level takes the top-k
of the next row behind every candidate. All candidates form a pool; the best of it are verified.

Tokens copied from the text (`lookup`) join the pool as one more branch. Where the head proposes the same tokens, its
nodes take the better score. After the first difference, copied tokens are nodes of their own.

Drawn drafts (without replacement, from the head's distribution at the request's temperature) replace the top-k where
multi-candidate rejection sampling verifies them. This is exact only if the choice of nodes to verify does not depend on
their tokens. So children enter in the order of drawing, nodes by their parent's score, and a copied token is the last
of its siblings and always a node of its own.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding.rounds.constraint import Constraints
from eagle3_jax.decoding.rounds.lookup import Copied
from eagle3_jax.decoding.rounds.sampling import DRAFTS, Sampling, draw
from eagle3_jax.decoding.rounds.tree import Drawn, TokenTree, rerank
from eagle3_jax.kernels.vocabulary.api import ranked, top_k_of_logits
from eagle3_jax.mesh import constrain
from eagle3_jax.models.cache import Cache, Pass
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.drafts.levels import unread
from eagle3_jax.models.target import TargetModel


def grow(
    target: TargetModel,
    draft: Draft,
    tree: DraftTree,
    root: Int[Array, " b"],
    draft_state: Float[Array, "b h"],
    this: Pass,
    cache: Cache,
    sampling: Sampling | None = None,
    copied: Copied | None = None,
    constraints: Constraints | None = None,
    *,
    greedy: bool | Bool[Array, ""] = False,
) -> tuple[TokenTree, Cache]:
    """Drafts the tree of one round.

    Args:
        root: the token after the committed ones.
        draft_state: the head's output at the last committed pair (whose token is the root).
        this: its `lengths` pairs are committed in the head's `cache`; slots behind them are scratch.
        sampling: draws the drafts of requests with a temperature; None takes the head's best for all.
        copied: `tree.lookup_tokens` tokens for each root; None if that is 0.
        constraints: forbid drafts, each by the state that its own path leads to.
        greedy: see `RoundPlan`.

    Returns the tree, and the cache with its scratch written.
    """
    k, batch, lengths = tree.topk, root.shape[0], this.lengths
    coins = _coins(sampling, lengths, tree.num_steps, greedy=greedy) if sampling is not None and k == 1 else None
    drawn: list[Array] = []
    best_alone = True if sampling is None else greedy
    states = None if constraints is None else constraints.states[:, None]  # of the frontier
    if constraints is not None and best_alone is not False:
        best_alone = ~constraints.bind & best_alone
    levels = draft.head.levels(target.embed[...], tree, root, draft_state, this, cache, greedy=best_alone)

    def children(tokens: Int[Array, "b m"]) -> tuple[Float[Array, "b m k"], Int[Array, "b m k"]]:
        """Returns log-probabilities and draft ids."""
        if sampling is None and constraints is None:
            return levels.best(tokens, k)
        depth = len(drawn)

        def logits_of() -> Float[Array, "b m dv"]:
            if constraints is None or states is None:
                return levels.logits(tokens)
            return levels.logits(tokens, constraints.allowed(states, draft.token_ids))

        def draws() -> tuple[Array, Array, Array]:
            logits = logits_of()
            if sampling is None:
                return none(*top_k_of_logits(logits, k))
            if coins is not None:
                return _draw_child(logits, sampling, coins[:, depth])
            return _draw_children(logits, k, sampling, sampling.gumbel(lengths, DRAFTS + depth, *logits.shape[1:]))

        def best() -> tuple[Array, Array, Array]:
            return none(*levels.best(tokens, k))

        def none(gained: Array, candidates: Array) -> tuple[Array, Array, Array]:
            """Adds what stands for the distribution of drafts that are not drawn."""
            return gained, candidates, jnp.zeros((*tokens.shape, 0 if sampling is None else len(draft.token_ids)))

        def constrained() -> tuple[Array, Array, Array]:
            return jax.lax.cond(greedy, lambda: none(*top_k_of_logits(logits_of(), k)), draws)

        # The head runs outside: a branch that wrote its cache would copy all of it.
        others = draws if constraints is None or isinstance(greedy, bool) else constrained
        gained, candidates, probs = draws() if best_alone is False else jax.lax.cond(best_alone, best, others)
        drawn.append(probs)
        return gained, candidates

    scores, ids = (x[:, 0] for x in children(root[:, None]))
    frontier = jnp.broadcast_to(jnp.arange(k), (batch, k))  # indices into the pool
    pool = [(scores, ids, jnp.full((batch, k), -1), jnp.zeros((batch, k)))]
    parents_of = jnp.zeros((batch, k), jnp.int32)
    for depth in range(1, tree.num_steps):  # the frontier's depth; its children are one deeper
        levels.descend(draft.token_ids[ids], parents_of)
        if constraints is not None and states is not None:
            states = constraints.step(jnp.take_along_axis(states, parents_of, axis=1), draft.token_ids[ids])
        gained, candidates = children(draft.token_ids[ids])
        candidate_scores = (scores[:, :, None] + gained).reshape(batch, k * k)
        candidates = candidates.reshape(batch, k * k)
        first = k + (depth - 1) * k * k
        parents, parent_scores = (jnp.repeat(x, k, axis=1, total_repeat_length=k * k) for x in (frontier, scores))
        pool.append((candidate_scores, candidates, parents, parent_scores))
        if depth + 1 < tree.num_steps:
            scores, best = jax.lax.top_k(candidate_scores, k)
            ids, frontier, parents_of = jnp.take_along_axis(candidates, best, axis=1), first + best, best // k
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
        return nodes, levels.cache
    group = jnp.pad(jnp.where(chosen < size, chosen // k, -1), ((0, 0), (1, 0)))
    of = Drawn(tuple(drawn), group, draft.token_ids, k, copied is not None)
    return dataclasses.replace(nodes, drawn=of), levels.cache


def _coins(
    sampling: Sampling, lengths: Int[Array, " b"], steps: int, *, greedy: bool | Bool[Array, ""]
) -> Float[Array, "b s 2"]:
    """Makes the coins of a chain, at once for all levels; where an array says greedy, zeros."""

    def made() -> Array:
        return sampling.uniform(lengths, DRAFTS, steps, 2)

    return made() if greedy is False else jax.lax.cond(greedy, lambda: unread(made), made)


# Parent of a copied token that is no candidate: the head proposes the token itself, or nothing was copied.
NOBODY = -2


def graft(
    order: Float[Array, "b p"],
    tokens: Int[Array, "b p"],
    parents: Int[Array, "b p"],
    copied: Copied,
    merges: Bool[Array, " b"],
) -> tuple[Float[Array, "b q"], Int[Array, "b q"], Int[Array, "b q"]]:
    """Joins copied tokens to the pool, behind the head's candidates.

    In rows that merge, a copied token that the head proposes too becomes the head's candidate, with the better of both
    scores. Drawn drafts must not merge: the choice of nodes to verify may not depend on their tokens. There a twin does
    no harm: after the drawn token's rejection, p has no mass left on it. A score never exceeds its parent's; `rerank`
    relies on that.

    Returns the pool's scores, tokens and parents, now q = p + c.
    """
    size = order.shape[1]
    above = jnp.zeros(order.shape[0])
    node = jnp.full_like(parents[:, 0], -1)  # the node that the copied text has reached
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
    pool = zip((order, tokens, parents), zip(*new, strict=True), strict=True)
    order, tokens, parents = (jnp.concatenate([held, jnp.stack(more, axis=1)], axis=1) for held, more in pool)
    return order, tokens, parents


def _draw_children(
    logits: Float[Array, "b m dv"], k: int, sampling: Sampling, noise: Float[Array, "b m dv"]
) -> tuple[Float[Array, "b m k"], Int[Array, "b m k"], Float[Array, "b m dv"]]:
    """Draws k tokens for each of m nodes, without replacement: their log-probabilities, ids, and the distribution.

    The greatest log-probabilities plus Gumbel noise are such draws, in their order (https://arxiv.org/abs/1903.06059).
    Requests without a temperature get the best tokens.
    """
    logits, sampled = _tempered(logits, sampling)
    gained, ids, normalizer = ranked(logits, k, jnp.where(sampled, noise, 0.0))
    return gained, ids, constrain(jnp.exp(logits - normalizer), ((r"", P("data", None, "model")),))


def _draw_child(
    logits: Float[Array, "b 1 dv"], sampling: Sampling, coins: Float[Array, "b 2"]
) -> tuple[Float[Array, "b 1 1"], Int[Array, "b 1 1"], Float[Array, "b 1 dv"]]:
    """Does as `_draw_children` for one token, by two coins in place of noise for every token of the vocabulary."""
    logits = constrain(logits, ((r"", P("data")),))  # gathered once; else `draw` gathers the shards several times
    tempered, sampled = _tempered(logits, sampling)
    probs = jax.nn.softmax(tempered, axis=-1)
    ids = jnp.minimum(draw(coins, probs[:, 0]), probs.shape[-1] - 1)[:, None, None]
    best = top_k_of_logits(logits, 1)
    gained = jnp.log(jnp.take_along_axis(probs, ids, axis=-1))
    return jnp.where(sampled, gained, best[0]), jnp.where(sampled, ids, best[1]), probs


def _tempered(
    logits: Float[Array, "b m dv"], sampling: Sampling
) -> tuple[Float[Array, "b m dv"], Bool[Array, "b 1 1"]]:
    """Divides the logits of requests that have a temperature by it. Returns them, and which requests have one."""
    temperature = sampling.temperature[:, None, None]
    return logits / jnp.where(temperature > 0, temperature, 1.0), temperature > 0
