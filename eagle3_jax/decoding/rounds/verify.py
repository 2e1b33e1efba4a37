"""Verification: walks down the tree while the target agrees, and adds one token of the target's own (the bonus).

Greedy: a child is accepted if it is the target's argmax.

Sampled: the token behind a node is drawn from the target's distribution, by the random numbers of its position, as
vanilla decoding draws it. A child that holds this token is accepted; if none does, the token is the bonus. So drafts
change no answer of a seed, and each is accepted with the target's probability of it.

Drafts drawn from the head's distribution q: multi-candidate rejection sampling (SpecInfer,
https://arxiv.org/abs/2305.09781, section 4.3; without replacement: https://arxiv.org/abs/2402.14160). Each child in
turn is accepted with probability min(1, p / q). A rejection replaces p by max(p - q, 0), normalised, and removes the
child from q. A copied token comes last, with q = 1.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.decoding.rounds.sampling import BONUS, COINS, Rows, Sampling, TokenCounts, draw, probabilities
from eagle3_jax.decoding.rounds.tree import Drawn, TokenTree
from eagle3_jax.kernels.vocabulary.api import argmax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Walk:
    """An accepted path down one tree.

    Attributes:
        path: node indices from the root, ascending; the last accepted node is repeated.
        accepted: number of accepted drafts; the path ends at node path[accepted].
    """

    path: Int[Array, "b p"]
    accepted: Int[Array, " b"]

    @property
    def last(self) -> Int[Array, " b"]:
        return self.path[:, -1]


def verify(
    tree: TokenTree,
    logits: Float[Array, "b n v"],
    steps: int,
    sampling: Sampling,
    lengths: Int[Array, " b"],
    stop_ids: Int[Rows, "b stops"],
    token_counts: TokenCounts | None = None,
    *,
    greedy: bool | Bool[Array, ""],
) -> tuple[Walk, Int[Array, " b"], Float[Array, "b p"] | None]:
    """Walks each tree of depth `steps` by the target's logits at every node; `greedy`: see `RoundPlan`.

    `lengths` are committed tokens, which choose this round's random numbers; `stop_ids` end the answer, -1 where there
    is none; `token_counts` are for the penalties of `sampling.rules`.

    Returns:
        The walk, the bonus token, and the log-probabilities of the accepted drafts and of the bonus behind them under
        the distributions that they were drawn from, see `probabilities`; the rest is undefined. None where greedy is
        True, undefined where an array says so.
    """
    if not isinstance(greedy, bool):
        known = functools.partial(verify, tree, logits, steps, sampling, lengths, stop_ids, token_counts)

        def best() -> tuple[Walk, Array, Array]:
            walk, bonus, _ = known(greedy=True)
            return walk, bonus, jnp.zeros(walk.path.shape)

        return jax.lax.cond(greedy, best, lambda: known(greedy=False))
    if greedy:
        predicted = argmax(logits)
        walk = walk_greedy(tree, predicted, steps)
        return walk, jnp.take_along_axis(predicted, walk.last[:, None], axis=1)[:, 0], None
    if steps == 0:  # no drafts
        here = logits[:, 0]
        if sampling.rules is not None and token_counts is not None:
            here = sampling.rules.apply(here, token_counts, stop_ids, lengths + 1)
        root, probs = jnp.zeros_like(lengths), probabilities(here, sampling)
        bonus = draw(sampling.uniform(lengths, BONUS, 2), probs)
        return Walk(root[:, None], root), bonus, jnp.log(_at(probs, bonus))[:, None]
    of_position = jax.vmap(lambda depth: sampling.uniform(lengths + depth, BONUS, 2), out_axes=1)
    coins = of_bonus = of_position(jnp.arange(steps + 1))
    if tree.drawn is not None:
        coins = sampling.uniform(lengths, COINS, steps + 1, tree.drawn.topk + tree.drawn.copied)
    walk, weights, taken, end = walk_sampled(tree, logits, sampling, lengths, stop_ids, coins, token_counts)
    bonus = draw(row_of(of_bonus, walk.accepted), weights)
    at_end = jnp.arange(steps + 1)[None] == walk.accepted[:, None]
    return walk, bonus, jnp.log(jnp.where(at_end, _at(end, bonus)[:, None], taken))


def pretend(
    tree: TokenTree, logits: Float[Array, "b n v"], accepts: Bool[Array, "b s"]
) -> tuple[Walk, Int[Array, " b"]]:
    """Simulates acceptance: takes a node's first child if `accepts` says so for its depth; the bonus is the argmax."""

    def hit(depth: int, node: Array) -> Array:
        return _children_of(tree, node) & accepts[:, depth, None]

    walk = _walk(tree, accepts.shape[1], hit)
    return walk, argmax(row_of(logits, walk.last))


def walk_greedy(tree: TokenTree, predicted: Int[Array, "b n"], steps: int) -> Walk:
    """Accepts a child if its token is the target's argmax at its parent."""
    agreed = tree.tokens == jnp.take_along_axis(predicted, jnp.maximum(tree.parents, 0), axis=1)
    return _walk(tree, steps, lambda _, node: _children_of(tree, node) & agreed)


# depth, path, accepted, rows that go on, token counts, weights of the bonus, probabilities of the accepted drafts, the
# distribution at the end
_Steps = tuple[Array, Array, Array, Array, TokenCounts | None, Array, Array, Array]


def walk_sampled(
    tree: TokenTree,
    logits: Float[Array, "b n v"],
    sampling: Sampling,
    lengths: Int[Array, " b"],
    stop_ids: Int[Rows, "b stops"],
    coins: Float[Array, "b p k"],
    token_counts: TokenCounts | None = None,
) -> tuple[Walk, Float[Array, "b v"], Float[Array, "b p"], Float[Array, "b v"]]:
    """Accepts children so that each token has the target's probability.

    The distribution of a node is computed when the walk reaches it, so penalties count the tokens accepted before.
    Other nodes cost nothing. The loop runs on the device and ends with the longest walk.

    Args:
        coins: uniform in [0, 1), for each depth from the root's on: the two of `draw`, or one per sibling for drawn
            drafts. Nodes of the last depth have no children.

    Returns the walk, the weights of the bonus token, the probability of each accepted draft, and the distribution at
    the walk's end: the weights, or what they were before drawn drafts.
    """
    steps = coins.shape[1] - 1
    of_drawn = None if tree.drawn is None else tree.drawn.probs

    def proceed(carry: _Steps) -> Array:
        depth, going = carry[0], carry[3]
        return going.any() & (depth <= steps)

    def step(carry: _Steps) -> _Steps:
        depth, path, accepted, going, counts, weights, taken, end = carry
        node = path[:, depth]
        here = row_of(logits, node)
        if sampling.rules is not None and counts is not None:
            counted = going & (depth > 0)  # the root was counted when it was chosen
            counts = counts.add(jnp.take_along_axis(tree.tokens, node[:, None], axis=1), counted[:, None])
            here = sampling.rules.apply(here, counts, stop_ids, lengths + depth + 1)
        probs, children = probabilities(here, sampling), _children_of(tree, node)
        if tree.drawn is None:
            hits, rest = children & (tree.tokens == draw(coins[:, depth], probs)[:, None]), probs
        else:
            assert of_drawn is not None
            hits, rest = _multi_candidate(tree.tokens, children, probs, tree.drawn, of_drawn, coins[:, depth])
        goes_on = going & hits.any(axis=-1)
        ends = (going & ~goes_on)[:, None]
        weights, end = jnp.where(ends, rest, weights), jnp.where(ends, probs, end)
        node = jnp.where(goes_on, jnp.argmax(hits, axis=-1).astype(jnp.int32), node)
        path = jnp.where(jnp.arange(path.shape[1])[None] > depth, node[:, None], path)
        taken = taken.at[:, depth].set(_at(probs, jnp.take_along_axis(tree.tokens, node[:, None], axis=1)[:, 0]))
        return depth + 1, path, accepted + goes_on.astype(jnp.int32), goes_on, counts, weights, taken, end

    batch, _, vocabulary = logits.shape
    walked = jnp.zeros((batch, steps + 1), jnp.int32), jnp.zeros(batch, jnp.int32), jnp.ones(batch, bool)
    sums = jnp.zeros((batch, vocabulary)), jnp.ones((batch, steps + 1)), jnp.ones((batch, vocabulary))
    start = jnp.int32(0), *walked, token_counts, *sums
    _, path, accepted, _, _, weights, taken, end = jax.lax.while_loop(proceed, step, start)
    return Walk(path, accepted), weights, taken, end


def _multi_candidate(
    tokens: Int[Array, "b n"],
    children: Bool[Array, "b n"],
    probs: Float[Array, "b v"],
    drawn: Drawn,
    of_drawn: Float[Array, "b g dv"],
    coins: Float[Array, "b k"],
) -> tuple[Bool[Array, "b n"], Float[Array, "b v"]]:
    """Accepts one child after the other with probability min(1, p / q); a rejection subtracts q from p.

    If p is one token (temperature 0) this is the greedy rule, for any q. Returns the child, and what remains of p.
    """
    by_chance = children & (drawn.group >= 0)
    first, count = jnp.argmax(by_chance, axis=-1), by_chance.sum(axis=-1)
    column, vocabulary = jnp.arange(tokens.shape[1])[None], jnp.arange(probs.shape[1])[None]
    hits = jnp.zeros(tokens.shape, bool)
    of_group = row_of(of_drawn, row_of(drawn.group, first))
    q = jnp.zeros_like(probs).at[:, drawn.token_ids].set(of_group)
    for i in range(drawn.topk):
        asks = (i < count) & ~hits.any(axis=-1)
        token = jnp.take_along_axis(tokens, first[:, None] + i, axis=1, mode="clip")
        q /= jnp.maximum(q.sum(axis=-1, keepdims=True), jnp.finfo(q.dtype).tiny)
        of_p, of_q = (jnp.take_along_axis(x, token, axis=1)[:, 0] for x in (probs, q))
        asks &= of_q > 0  # 0: no other token was left to draw
        accepted = asks & (coins[:, i] * of_q < of_p)
        hits |= accepted[:, None] & (column == first[:, None] + i)
        probs = _behind(probs, jnp.maximum(probs - q, 0.0), asks, accepted)
        q = jnp.where(vocabulary == token, 0.0, q)
    if drawn.copied:  # the last child: drawn from one token, so q is 1
        copied = children & ~by_chance
        token = jnp.take_along_axis(tokens, jnp.argmax(copied, axis=-1)[:, None], axis=1)
        asks = copied.any(axis=-1) & ~hits.any(axis=-1)
        accepted = asks & (coins[:, -1] < jnp.take_along_axis(probs, token, axis=1)[:, 0])
        hits |= accepted[:, None] & copied
        probs = _behind(probs, jnp.where(vocabulary == token, 0.0, probs), asks, accepted)
    return hits, probs


def _behind(probs: Array, rest: Array, asks: Array, accepted: Array) -> Array:
    """Returns what remains of p behind a rejected draft; p itself if that is nothing, where only rounding rejects."""
    total = rest.sum(axis=-1, keepdims=True)
    return jnp.where((asks & ~accepted)[:, None] & (total > 0), rest / jnp.where(total > 0, total, 1.0), probs)


def row_of(array: Array, row: Int[Array, " b"]) -> Array:
    """Selects array[b, row[b]]."""
    return jax.vmap(lambda rows, i: rows[i])(array, row)


def _at(probs: Float[Array, "b v"], tokens: Int[Array, " b"]) -> Float[Array, " b"]:
    return jnp.take_along_axis(probs, tokens[:, None], axis=1)[:, 0]


def _children_of(tree: TokenTree, nodes: Int[Array, " b"]) -> Bool[Array, "b n"]:
    return tree.parents == nodes[:, None]


def _walk(tree: TokenTree, steps: int, hit: Callable[[int, Array], Array]) -> Walk:
    """Goes to the first child that `hit(depth, node)` marks, as long as there is one."""
    node = jnp.zeros(tree.tokens.shape[0], jnp.int32)
    going = jnp.ones(tree.tokens.shape[0], bool)
    path, accepted = [node], jnp.zeros_like(node)
    for depth in range(steps):
        hits = hit(depth, node) & going[:, None]
        going = hits.any(axis=-1)
        node = jnp.where(going, jnp.argmax(hits, axis=-1).astype(jnp.int32), node)
        accepted += going.astype(jnp.int32)
        path.append(node)
    return Walk(jnp.stack(path, axis=1), accepted)
