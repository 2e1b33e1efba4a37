"""Trees against plain Python references."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from eagle3_jax.config import DraftTree, MeshConfig
from eagle3_jax.decoding.rounds import draft as draft_lib
from eagle3_jax.decoding.rounds import tree as tree_lib
from eagle3_jax.decoding.rounds.lookup import Copied
from eagle3_jax.decoding.rounds.sampling import BONUS, COINS, Sampling
from eagle3_jax.kernels.tree_attention.api import tree_attention
from eagle3_jax.mesh import make_mesh
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.drafts.head import Head

SIZES = [
    DraftTree(num_steps=1, topk=1, num_draft_tokens=2),
    DraftTree(num_steps=3, topk=1, num_draft_tokens=4),
    DraftTree(num_steps=2, topk=2, num_draft_tokens=5),
    DraftTree(num_steps=3, topk=3, num_draft_tokens=10),
    DraftTree(num_steps=4, topk=2, num_draft_tokens=15),
]


rerank = jax.jit(tree_lib.rerank, static_argnums=0)


def reference_rerank(size: DraftTree, scores: list[float]) -> list[int]:
    """Pool indices of the chosen candidates: the best ones, the earlier of equals."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    return sorted(order[: size.num_draft_tokens - 1])


@examples(50)
@given(st.sampled_from(SIZES), st.randoms(use_true_random=False), st.booleans())
def test_rerank_keeps_the_best_and_stays_connected(size, random, ties):
    """A pool as `grow` builds it: each level expands k candidates of the level before; equal scores included.

    The scores are such as differences of logits have them: no negative zero, which `top_k` puts below zero.
    """
    k = size.topk
    scores, parents = [], []
    level = []
    for depth in range(1, size.num_steps + 1):
        expanded = [-1] if depth == 1 else random.sample(level, k)
        level = []
        for parent in expanded:
            for _ in range(k):
                loss = random.choice([0.0, 0.5]) if ties else random.randrange(2**20) / 2**20
                level.append(len(scores))
                parents.append(parent)
                scores.append((scores[parent] if parent >= 0 else 0.0) - loss)
    tokens = [random.randrange(100) for _ in scores]
    tree, indices = rerank(
        size,
        jnp.array([7], jnp.int32),
        jnp.asarray([scores], jnp.float32),
        jnp.asarray([tokens], jnp.int32),
        jnp.asarray([parents], jnp.int32),
    )
    chosen = reference_rerank(size, np.asarray(scores, np.float32).tolist())
    assert indices[0].tolist() == chosen
    assert tree.tokens[0].tolist() == [7, *(tokens[i] for i in chosen)]
    nodes = {-1: 0, **{pool: node + 1 for node, pool in enumerate(chosen)}}
    assert tree.parents[0].tolist() == [-1, *(nodes[parents[i]] for i in chosen)]  # KeyError: not connected
    above, mask = tree.parents[0].tolist(), np.asarray(tree.mask[0])
    for node, (parent, depth) in enumerate(zip(above, tree.depths[0].tolist(), strict=True)):
        ancestors = {node}
        while parent >= 0:
            ancestors.add(parent)
            parent = above[parent]
        assert depth == len(ancestors) - 1
        assert np.flatnonzero(mask[node]).tolist() == sorted(ancestors)


@examples(50)
@given(st.sampled_from(SIZES), st.randoms(use_true_random=False))
def test_whatever_the_scores_each_node_stands_behind_its_parent(size, random):
    """With NaN scores too: the target still verifies a tree, if a useless one."""
    k, parents, level = size.topk, [], [-1]
    for depth in range(1, size.num_steps + 1):
        expanded = level if depth == 1 else random.sample(level, k)
        level = list(range(len(parents), len(parents) + k * len(expanded)))
        parents += [parent for parent in expanded for _ in range(k)]
    scores = [random.choice([np.nan, np.inf, -np.inf, -random.random()]) for _ in parents]
    pool = (scores, jnp.float32), ([1] * len(parents), jnp.int32), (parents, jnp.int32)
    tree, _ = rerank(size, jnp.array([7], jnp.int32), *(jnp.asarray([x], dtype) for x, dtype in pool))
    above, depths, mask = (np.asarray(x[0]) for x in (tree.parents, tree.depths, tree.mask))
    ways = [{0}]
    for node in range(1, len(above)):
        assert 0 <= above[node] < node
        ways.append(ways[above[node]] | {node})
    for node, way in enumerate(ways):
        if len(way) <= size.depth + 1:  # the walk comes to no other
            assert depths[node] == len(way) - 1
            assert np.flatnonzero(mask[node]).tolist() == sorted(way)


GRAFTED = [
    DraftTree(num_steps=3, topk=1, num_draft_tokens=5, lookup_tokens=4),
    DraftTree(num_steps=2, topk=2, num_draft_tokens=5, lookup_tokens=4),
    DraftTree(num_steps=3, topk=3, num_draft_tokens=12, lookup_tokens=2),
    DraftTree(num_steps=2, topk=2, num_draft_tokens=11, lookup_tokens=4),  # more nodes than there may be candidates
]


@jax.jit
def grafted(order, tokens, parents, copied, merges):
    return draft_lib.graft(order, tokens, parents, copied, merges)


@pytest.mark.slow
@pytest.mark.parametrize("merges", [True, False], ids=["best", "drawn"])
@examples(60)
@given(size=st.sampled_from(GRAFTED), random=st.randoms(use_true_random=False))
def test_copied_tokens_join_the_tree_and_no_token_has_a_twin_beside_it(merges, size, random):
    """Few tokens, so that the text and the head often propose the same."""
    found = random.random() < 0.8
    k, scores, parents, tokens, level = size.topk, [], [], [], []
    for depth in range(1, size.num_steps + 1):
        expanded = [-1] if depth == 1 else random.sample(level, k)
        level = []
        for parent in expanded:
            for token in random.sample(range(4), k):
                level.append(len(scores))
                parents.append(parent)
                tokens.append(token)
                scores.append((scores[parent] if parent >= 0 else 0.0) - random.random())
    order = scores if merges else [scores[parent] if parent >= 0 else 0.0 for parent in parents]
    text = [random.randrange(4) for _ in range(size.lookup_tokens)]
    certain = np.cumsum([-random.random() for _ in text]) if found else np.full(len(text), -np.inf)
    certain = certain.astype(np.float32)
    pool = grafted(
        jnp.asarray([order], jnp.float32),
        jnp.asarray([tokens], jnp.int32),
        jnp.asarray([parents], jnp.int32),
        Copied(jnp.asarray([text], jnp.int32), jnp.asarray(certain[None])),
        jnp.array([merges]),
    )
    tree, chosen = rerank(size, jnp.array([7], jnp.int32), *pool)
    above, tokens_of, mask = tree.parents[0].tolist(), tree.tokens[0].tolist(), np.asarray(tree.mask[0])
    children = {(parent, token) for parent, token in zip(above, tokens_of, strict=True) if parent >= 0}
    if merges:  # twins would be given twice their probability
        assert len(children) == sum(parent >= 0 for parent in above[1:])
    else:  # the head's candidates that are chosen are the same whatever the text says
        other = Copied(jnp.full_like(pool[1][:, len(scores) :], 99), jnp.asarray(certain[None]))
        arguments = (
            jnp.asarray([x], dtype) for x, dtype in ((order, jnp.float32), (tokens, jnp.int32), (parents, jnp.int32))
        )
        _, others = rerank(size, jnp.array([7], jnp.int32), *grafted(*arguments, other, jnp.array([False])))
        assert others.tolist() == chosen.tolist()
    for node, (parent, depth) in enumerate(zip(above, tree.depths[0].tolist(), strict=True)):
        if parent >= 0:
            ancestors = {node}
            while parent >= 0:
                ancestors.add(parent)
                parent = above[parent]
            assert min(ancestors) == 0 and depth == len(ancestors) - 1
            assert np.flatnonzero(mask[node]).tolist() == sorted(ancestors)
        elif node:
            assert chosen[0, node - 1] >= len(scores)  # only what was copied fills places
    node, followed = 0, 0  # how far the text leads in the tree
    while followed < len(text) and (node, text[followed]) in children:
        node = next(i for i, x in enumerate(zip(above, tokens_of, strict=True)) if x == (node, text[followed]))
        followed += 1
    if found and merges:  # all of it that is better than what was left out stands there
        left = np.sort(np.asarray(pool[0][0]))[::-1][size.num_draft_tokens - 1 :]
        assert followed >= np.sum(certain > left.max(initial=-np.inf))


@jax.jit
def without_cache(target, draft, tokens, features):
    """The head's states over pairs, each of which sees those before it; nothing cached."""

    def attend(queries, keys, values, window=None):
        assert window is None
        empty = jnp.zeros_like(keys.swapaxes(1, 2))
        return tree_attention(queries, keys, values, empty, empty, this.lengths)[0]

    this = Pass(jnp.arange(tokens.shape[1])[None], jnp.zeros(1, jnp.int32))
    states = draft.head(target.embed[...][tokens], features, this, attend)
    return states, jax.nn.log_softmax(draft.head.logits(states))


def reference_grow(toy, draft, size, root, committed, features):
    """The tree with Python lists: every candidate from its whole history, without a cache.

    Of the padded pairs, those behind the last token see what they like; nothing before them sees them.
    """
    length = len(committed)
    room = length + size.num_steps

    def children(path, score):
        known = np.zeros((1, room, features.shape[-1]), np.float32)
        known[:, :length] = features
        tokens = np.zeros((1, room), np.int32)
        history = [*committed[1:], root, *path]
        tokens[0, : len(history)] = history
        for last in range(length - 1, length + len(path)):  # each pass gives the next pair its feature
            states, logp = without_cache(toy.target, draft, tokens, known)
            known[:, last + 1] = states[:, last]
        logp = np.asarray(logp[0, len(history) - 1])
        best = np.argsort(-logp, kind="stable")[: size.topk]
        return [([*path, int(draft.token_ids[i])], score + float(logp[i])) for i in best]

    level = children([], 0.0)
    pool = list(level)
    for _ in range(size.num_steps - 1):
        frontier = sorted(level, key=lambda node: -node[1])[: size.topk]
        level = [child for node in frontier for child in children(*node)]
        pool += level
    return sorted(pool, key=lambda node: -node[1])[: size.num_draft_tokens - 1]


def first_pass(length: int) -> Pass:
    return Pass(jnp.array([[length]], jnp.int32), jnp.array([length], jnp.int32))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "good"])
@pytest.mark.parametrize("size", [SIZES[1], SIZES[3]], ids=["chain", "tree"])
def test_grow_against_a_reference_without_cache(toy, size, kind):
    draft = getattr(toy, kind)
    committed, root = [3, 1, 20, 7, 5], 18
    length = len(committed)
    features = jax.random.normal(jax.random.key(5), (1, length, toy.target.config.hidden_size))
    tokens = jnp.asarray([[*committed[1:], root]], jnp.int32)
    states, cache = jax.jit(Head.feed)(
        draft.head,
        toy.target.embed[...],
        tokens,
        features,
        Pass(jnp.arange(length)[None], jnp.zeros(1, jnp.int32)),
        draft.head.empty_cache(1, 32),
    )
    tree, _ = jax.jit(draft_lib.grow, static_argnums=2)(
        toy.target, draft, size, jnp.array([root], jnp.int32), states[:, -1], first_pass(length), cache
    )
    got = []
    for node in range(1, size.num_draft_tokens):
        path = []
        while node > 0:
            path.insert(0, int(tree.tokens[0, node]))
            node = int(tree.parents[0, node])
        got.append(path)
    expected = [path for path, _ in reference_grow(toy, draft, size, root, committed, features)]
    assert sorted(got) == sorted(expected)
    assert len(got) == size.num_draft_tokens - 1


@pytest.mark.slow
def test_siblings_are_drawn_without_replacement():
    """With the head's probabilities at the request's temperature, in order of drawing; without one the best."""
    logits, samples = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05])), 4000
    q = np.sqrt([0.5, 0.3, 0.15, 0.05])
    q /= q.sum()
    sampling = dataclasses.replace(Sampling.greedy(2), temperature=jnp.array([2.0, 0.0]))
    noise = sampling.gumbel(jnp.array([3, 4]), 2, samples, 4)
    gained, ids, probs = draft_lib._draw_children(jnp.broadcast_to(logits, (2, samples, 4)), 2, sampling, noise)
    assert (ids[1] == jnp.arange(2)[None]).all()
    np.testing.assert_allclose(probs[0, 0], q, rtol=1e-5)
    np.testing.assert_allclose(gained[0], np.log(q)[np.asarray(ids[0])], rtol=1e-4)
    pairs = np.zeros((4, 4))
    np.add.at(pairs, tuple(np.asarray(ids[0]).T), 1)
    expected = samples * q[:, None] * q[None] / (1 - q[:, None]) * (1 - np.eye(4))
    assert np.trace(pairs) == 0
    assert (np.abs(pairs - expected) <= 4 * np.sqrt(expected)).all()


def test_noise_is_the_exponential_race_of_all_bits(monkeypatch):
    """From the rarest winner to the surest loser; equal levels, lengths and requests alone have equal noise."""
    bits = np.array([0, 1, 2, 1000, 2**24 + 1, 2**31, 2**32 - 2**20, 2**32 - 1], np.uint32)
    sampling, lengths = Sampling.greedy(2), jnp.array([7, 7])
    kinds = [sampling.gumbel(lengths, purpose, 8) for purpose in (2, 3)] + [sampling.gumbel(lengths + 1, 2, 8)]
    assert len(np.unique(np.stack(kinds))) == 3 * 2 * 8
    np.testing.assert_array_equal(kinds[0], sampling.gumbel(lengths, 2, 8))
    monkeypatch.setattr(jax.random, "bits", lambda *_: jnp.asarray(bits))
    expected = -np.log(-np.log1p(-np.minimum((bits + 0.5) * 2.0**-32, 1 - 2.0**-24)))
    np.testing.assert_allclose(sampling.gumbel(lengths, 2, 8)[1], expected, rtol=1e-5, atol=1e-5)


def test_each_level_is_drawn_by_noise_of_its_own(toy, monkeypatch):
    """Else a node's children would depend on how it was drawn."""
    purposes, gumbel = [], Sampling.gumbel
    monkeypatch.setattr(Sampling, "gumbel", lambda *given: purposes.append(given[2]) or gumbel(*given))
    state, cache = jnp.ones((1, toy.target.config.hidden_size)), toy.good.head.empty_cache(1, 32)
    given = toy.good, SIZES[3], jnp.array([18]), state, first_pass(0), cache, Sampling.greedy(1)
    jax.make_jaxpr(lambda: draft_lib.grow(toy.target, *given)[0].tokens)()
    assert len({*purposes, COINS, BONUS}) == SIZES[3].num_steps + 2


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [1024, 1020], ids=["split", "does not divide"])
def test_a_split_vocabulary_draws_the_same_siblings_by_one_collective(vocabulary):
    k, sampling = 3, dataclasses.replace(Sampling.greedy(2), temperature=jnp.array([0.8, 0.0]))
    logits = 3 * jax.random.normal(jax.random.key(1), (2, 4, vocabulary))

    def draws(logits):
        noise = sampling.gumbel(jnp.array([3, 4]), 2, *logits.shape[1:])
        return draft_lib._draw_children(logits, k, sampling, noise)

    mesh = make_mesh(MeshConfig(data=1, model=8))
    place = NamedSharding(mesh, PartitionSpec(None, None, "model" if vocabulary == 1024 else None))
    with jax.set_mesh(mesh):
        split = jax.jit(draws).lower(jax.ShapeDtypeStruct(logits.shape, logits.dtype, sharding=place)).compile()
    collectives = re.findall(r" (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", split.as_text() or "")
    assert collectives == (["all-gather"] if vocabulary == 1024 else [])
    gained, ids, probs = split(jax.device_put(logits, place))
    expected = jax.jit(draws)(logits)
    np.testing.assert_array_equal(ids, expected[1])
    np.testing.assert_allclose(gained, expected[0], atol=1e-5)
    np.testing.assert_allclose(probs, expected[2], atol=1e-6)
