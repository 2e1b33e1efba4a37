"""Verification: walk down the tree as far as the target agrees, and add one token of its own (the bonus).

Greedy (EAGLE3_SPEC section 5.4): a child is accepted when it is the target's argmax. Sampled (section 5.5a, SGLang's
target-only rule with thresholds 1): with one coin u a node's children are accepted where u falls into their stretch of
the target's distribution; if into none, the bonus comes from the distribution without the children. Each token thus
comes with exactly the target's probability, whatever was drafted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.decoding.sampling import Sampling, draw, probabilities
from eagle3_jax.decoding.tree import TokenTree
from eagle3_jax.kernels.vocabulary import argmax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Walk:
    """The way down one tree.

    Attributes:
        path: node indices from the root, ascending; behind the accepted ones the last of them is repeated.
        accepted: number of accepted drafts; the way ends at node path[accepted].
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
    stop_ids: Int[Array, "b stops"],
    *,
    greedy: bool,
) -> tuple[Walk, Int[Array, " b"]]:
    """Walks each tree; the way and the bonus token.

    Args:
        logits: the target's, at every node.
        steps: depth of the tree.
        lengths: committed tokens, which choose this round's random numbers.
        stop_ids: tokens that end the answer; -1 where there is none.
        greedy: leaves sampling out of the program; every request must then be `SamplingParams.greedy`.
    """
    if greedy:
        predicted = argmax(logits)
        walk = walk_greedy(tree, predicted, steps)
        return walk, jnp.take_along_axis(predicted, walk.last[:, None], axis=1)[:, 0]
    coin_keys, bonus_keys = jax.vmap(jax.random.split, out_axes=1)(sampling.keys(lengths))
    coins = jax.vmap(lambda key: jax.random.uniform(key, (steps,)))(coin_keys)
    walk, weights = walk_sampled(tree, logits, sampling, lengths, stop_ids, coins)
    return walk, draw(bonus_keys, weights)


def walk_greedy(tree: TokenTree, predicted: Int[Array, "b n"], steps: int) -> Walk:
    """Accepts a child when its token is the target's argmax at its parent."""
    agreed = tree.tokens == jnp.take_along_axis(predicted, jnp.maximum(tree.parents, 0), axis=1)
    return _walk(tree, steps, lambda _, node, going: _children_of(tree, node) & agreed)


def walk_sampled(
    tree: TokenTree,
    logits: Float[Array, "b n v"],
    sampling: Sampling,
    lengths: Int[Array, " b"],
    stop_ids: Int[Array, "b stops"],
    coins: Float[Array, "b s"],
) -> tuple[Walk, Float[Array, "b v"]]:
    """Accepts the first child at which the running sum of the target's probabilities exceeds the depth's coin.

    Only the nodes on the way are looked at: the distribution of each is made when the walk comes to it, so that
    penalties count what was accepted in front of it.

    Args:
        coins: uniform in [0, 1), one for each depth of the tree.

    Returns:
        The way, and the weights of the bonus token: the distribution at its end without that node's children.
    """
    rules, weights = sampling.rules, jnp.zeros((logits.shape[0], logits.shape[2]))

    def hit(depth: int, node: Array, going: Array) -> Array:
        nonlocal rules, weights
        here = jax.vmap(lambda rows, n: rows[n])(logits, node)
        if rules is not None:
            taken = going & (depth > 0)  # the root was counted when it was chosen
            rules = rules.count(jnp.take_along_axis(tree.tokens, node[:, None], axis=1), taken[:, None])
            here = rules.apply(here, stop_ids, lengths + depth + 1)
        probs = probabilities(here, sampling)
        children = _children_of(tree, node)
        mass = jnp.where(children, jnp.take_along_axis(probs, tree.tokens, axis=1), 0.0)
        coin = coins[:, depth] if depth < coins.shape[1] else jnp.full_like(lengths, 2, coins.dtype)
        hits = children & (mass > 0) & (coin[:, None] < jnp.cumsum(mass, axis=-1))
        keep = jnp.where(children, 0.0, 1.0)
        rest = jax.vmap(lambda p, token, factor: p.at[token].multiply(factor))(probs, tree.tokens, keep)
        # Where the children hold everything, rounding may still let a coin pass them all.
        rest = jnp.where(rest.sum(axis=-1, keepdims=True) > 0, rest, probs)
        weights = jnp.where((going & ~hits.any(axis=-1))[:, None], rest, weights)
        return hits

    walk = _walk(tree, coins.shape[1], hit)
    return walk, weights


def _children_of(tree: TokenTree, nodes: Int[Array, " b"]) -> Bool[Array, "b n"]:
    return tree.parents == nodes[:, None]


def _walk(tree: TokenTree, steps: int, hit: Callable[[int, Array, Array], Array]) -> Walk:
    """Goes to the first child that `hit(depth, node, going)` marks, until there is none; asks once more at the end."""
    node = jnp.zeros(tree.tokens.shape[0], jnp.int32)
    going = jnp.ones(tree.tokens.shape[0], bool)
    path, accepted = [node], jnp.zeros_like(node)
    for depth in range(steps):
        hits = hit(depth, node, going) & going[:, None]
        going = hits.any(axis=-1)
        node = jnp.where(going, jnp.argmax(hits, axis=-1).astype(jnp.int32), node)
        accepted += going.astype(jnp.int32)
        path.append(node)
    hit(steps, node, going)
    return Walk(jnp.stack(path, axis=1), accepted)
