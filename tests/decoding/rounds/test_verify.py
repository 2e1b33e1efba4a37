"""The walk down the tree: greedy, and sampled with the target's exact distribution."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.decoding.rounds import verify as verify_lib
from eagle3_jax.decoding.rounds.sampling import Sampling
from eagle3_jax.decoding.rounds.tree import Drawn, TokenTree, _ancestors
from eagle3_jax.decoding.rounds.verify import Walk, verify, walk_greedy, walk_sampled


def make_tree(tokens: list[int], parents: list[int], batch: int) -> TokenTree:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)

    def rows(values):
        return jnp.broadcast_to(jnp.asarray(values, jnp.int32), (batch, len(values)))

    return TokenTree(rows(tokens), rows(parents), rows(depths), _ancestors(rows(parents), 3))


def every_draw(probs: np.ndarray, depths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Coins [combinations, depths, 1] that stand for all there are, and the probability of each combination.

    Between two neighbouring thresholds of a depth's nodes nothing depends on where a coin falls, if tokens are drawn by
    `in_order`.
    """
    intervals = []
    for depth in range(depths.max() + 1):
        edges = sorted({0.0, 1.0, *np.cumsum(probs[depths == depth], axis=-1)[:, :-1].ravel().tolist()})
        intervals.append([(a, b) for a, b in itertools.pairwise(edges) if b - a > 1e-9])
    combinations = list(itertools.product(*intervals))
    coins = [[[(a + b) / 2] for a, b in combination] for combination in combinations]
    return np.array(coins, np.float32), np.array([np.prod([b - a for a, b in row]) for row in combinations])


def in_order(coins: jax.Array, weights: jax.Array) -> jax.Array:
    """`draw` by one coin alone: the first token at which the running sum exceeds it."""
    exceeds = jnp.cumsum(weights, axis=-1) > coins[:, :1] * weights.sum(axis=-1, keepdims=True)
    return jnp.argmax(exceeds, axis=-1).astype(jnp.int32)


def walk(tree: TokenTree, probs: jax.Array, coins: jax.Array) -> tuple[Walk, jax.Array]:
    """Runs the sampled walk on given probabilities."""
    batch = probs.shape[0]
    sampling = dataclasses.replace(Sampling.greedy(batch), temperature=jnp.ones(batch))
    stop_ids = jnp.full((batch, 1), -1, jnp.int32)
    found, weights, *_ = walk_sampled(tree, jnp.log(probs), sampling, jnp.zeros(batch, jnp.int32), stop_ids, coins)
    return found, weights


TREES = {
    "chain": ([0, 1, 2, 3], [-1, 0, 1, 2]),
    "branches": ([0, 1, 2, 3, 1, 2, 0], [-1, 0, 0, 1, 1, 2, 3]),
    # The same token stands in two branches, as a sibling's child and as a child of the root.
    "wide": ([2, 0, 1, 2, 3, 0, 1, 0, 0], [-1, 0, 0, 0, 0, 1, 1, 2, 5]),
    "root": ([2], [-1]),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "branches" else pytest.mark.slow) for name in TREES]
)
@pytest.mark.parametrize("sharp", [1.0, 6.0])
def test_sampled_walk_has_exactly_the_target_s_distribution(monkeypatch, name, sharp):
    """All coins, by enumeration.

    For every node and token: the walk reaches the node and the next token is that one with the probability that the
    target gives to this continuation.
    """
    monkeypatch.setattr(verify_lib, "draw", in_order)
    tokens, parents = TREES[name]
    vocabulary = 5
    rng = np.random.default_rng(3)
    probs = np.exp(sharp * rng.normal(size=(len(tokens), vocabulary)))
    probs /= probs.sum(axis=-1, keepdims=True)
    probs[0, 3] = 0.0  # a drafted token that the target never says
    probs[0] /= probs[0].sum()
    coins, weights = every_draw(probs, np.asarray(make_tree(tokens, parents, 1).depths[0]))
    batch = len(coins)
    way, rest = jax.jit(walk)(
        make_tree(tokens, parents, batch),
        jnp.broadcast_to(jnp.asarray(probs, jnp.float32), (batch, *probs.shape)),
        jnp.asarray(coins),
    )
    path, accepted = np.asarray(way.path), np.asarray(way.accepted)
    bonus = np.asarray(in_order(jnp.asarray(coins[np.arange(batch), accepted]), rest))
    got = np.zeros_like(probs)
    for weight, way, taken, last in zip(weights, path, accepted, bonus, strict=True):
        for here, there in itertools.pairwise(way[: taken + 1]):
            got[here, tokens[there]] += weight
        got[way[taken], last] += weight

    reached = np.ones(len(tokens))
    for node in range(1, len(tokens)):
        reached[node] = reached[parents[node]] * probs[parents[node], tokens[node]]
    np.testing.assert_allclose(got, reached[:, None] * probs, atol=1e-6)


@pytest.mark.slow
def test_a_token_of_probability_zero_is_never_accepted(monkeypatch):
    """Coins of exactly 0 and close to 1, and others, over children of probability 0."""
    batch, vocabulary = 4096, 12
    rng = np.random.default_rng(5)
    probs = rng.random((batch, vocabulary)).astype(np.float32) * (rng.random((batch, vocabulary)) < 0.5)
    probs[:, 0] += 1e-3
    probs /= probs.sum(axis=-1, keepdims=True)
    children = np.argsort(rng.random((batch, vocabulary - 1)), axis=-1)[:, :8] + 1
    kind, coins = rng.integers(0, 3, (batch, 2, 2)), rng.random((batch, 2, 2))
    coins = np.where(kind == 0, 0.0, np.where(kind == 1, 1 - 2.0**-24, coins))
    tree = dataclasses.replace(
        make_tree([0] * 9, [-1] + [0] * 8, batch),
        tokens=jnp.asarray(np.pad(children, ((0, 0), (1, 0))), jnp.int32),
    )
    monkeypatch.setattr(verify_lib, "probabilities", lambda *_: jnp.asarray(probs))
    given = jnp.asarray(coins, jnp.float32)
    way, rest = walk(tree, jnp.ones((batch, 9, vocabulary)), given)
    accepted, last = np.asarray(way.accepted), np.asarray(way.last)
    tokens = np.asarray(tree.tokens)[np.arange(batch), last]
    assert 0 < accepted.sum() < batch
    assert (probs[np.arange(batch), tokens][accepted == 1] > 0).all()
    bonus = np.asarray(verify_lib.draw(given[:, 0], rest))
    assert (probs[np.arange(batch), bonus] > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain", "branches", "wide"])
def test_drafts_change_no_token_of_a_seed(name):
    """The accepted drafts and the bonus are what vanilla decoding draws, one token after the other."""
    tokens, parents = TREES[name]
    batch, vocabulary = 64, 5
    logits = 1.5 * jax.random.normal(jax.random.key(2), (batch, len(tokens), vocabulary))
    sampling = dataclasses.replace(
        Sampling.greedy(batch),
        temperature=jnp.full(batch, 0.8),
        top_p=jnp.full(batch, 0.9),
        min_p=jnp.full(batch, 0.01),
    )
    lengths, stops = 7 + jnp.arange(batch, dtype=jnp.int32) % 5, jnp.full((batch, 1), -1, jnp.int32)
    jitted = jax.jit(verify, static_argnums=2, static_argnames="greedy")
    tree, root = make_tree(tokens, parents, batch), make_tree([0], [-1], batch)
    way, bonus, _ = jitted(tree, logits, 3, sampling, lengths, stops, greedy=False)
    assert set(np.asarray(way.accepted).tolist()) >= {0, 1, 2}
    for depth in range(4):
        node = verify_lib.row_of(way.path, jnp.minimum(depth, way.accepted))
        at = jnp.take_along_axis(logits, node[:, None, None], axis=1)
        _, drawn, _ = jitted(root, at, 0, sampling, lengths + depth, stops, greedy=False)
        there = way.path[:, min(depth + 1, 3)]
        chosen = jnp.where(depth < way.accepted, verify_lib.row_of(tree.tokens, there), bonus)
        reached = np.asarray(depth <= way.accepted)
        np.testing.assert_array_equal(np.asarray(chosen)[reached], np.asarray(drawn)[reached])


def drawn_tree(drafts: np.ndarray, q: np.ndarray, token_ids: np.ndarray, copied: int | None) -> TokenTree:
    """A root and its children, draft ids [batch, k] that were drawn from q; behind them a target id that was copied."""
    batch, k = drafts.shape
    tokens, group = np.pad(token_ids[drafts], ((0, 0), (1, 0))), np.zeros((batch, k + 1), np.int32)
    if copied is not None:
        tokens = np.pad(tokens, ((0, 0), (0, 1)), constant_values=copied)
        group = np.pad(group, ((0, 0), (0, 1)), constant_values=-1)
    children = tokens.shape[1] - 1
    probs = jnp.broadcast_to(jnp.asarray(q, jnp.float32), (batch, 1, len(q)))
    drawn = Drawn((probs,), jnp.asarray(group), jnp.asarray(token_ids), k, copied is not None)
    tree = make_tree([0] * (children + 1), [-1] + [0] * children, batch)
    return dataclasses.replace(tree, tokens=jnp.asarray(tokens, jnp.int32), drawn=drawn)


def without_replacement(q: np.ndarray, k: int) -> list[tuple[tuple[int, ...], float]]:
    """Every order in which k tokens can be drawn, and its probability; where nothing is left, the first comes."""
    found: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for _ in range(k):
        longer = []
        for order, probability in found:
            left = {token: q[token] for token in range(len(q)) if token not in order}
            if not any(left.values()):
                left = {min(left): 1.0}
            total = sum(left.values())
            longer += [((*order, t), probability * x / total) for t, x in left.items() if x]
        found = longer
    return found


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("sharp", [0.5, pytest.param(3.0, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "q_of", ["other", *(pytest.param(q, marks=pytest.mark.slow) for q in ("same", "one token", "two tokens"))]
)
@pytest.mark.parametrize("copied", [None, *(pytest.param(token, marks=pytest.mark.slow) for token in (1, 3))])
def test_multi_candidate_rejection_sampling_has_exactly_the_target_s_distribution(k, sharp, q_of, copied):
    """Every order of drawing, with the probability of accepting each draft found by bisection of its coin.

    A copied token comes behind them: one that is never drafted, or one that may have been drawn already.
    """
    vocabulary, token_ids = 6, np.array([0, 2, 3, 5])  # two tokens are never drafted
    rng = np.random.default_rng(k)
    p = np.exp(sharp * rng.normal(size=vocabulary))
    q = {
        "other": np.exp(sharp * rng.normal(size=4)),
        "same": p[token_ids],
        "one token": np.array([0.0, 1.0, 0.0, 0.0]),
        "two tokens": np.array([1.0, 0.0, 0.0, 3.0]),
    }[q_of]
    p, q = p / p.sum(), q / q.sum()
    drafts, orders = (np.array(x) for x in zip(*without_replacement(q, k), strict=True))
    np.testing.assert_allclose(orders.sum(), 1, atol=1e-9)

    tree = drawn_tree(drafts, q, token_ids, copied)
    children = np.asarray(tree.tokens)[:, 1:]
    logits = jnp.broadcast_to(jnp.asarray(p, jnp.float32), (*tree.tokens.shape, vocabulary))
    run = jax.jit(walk)

    def padded(coins: np.ndarray) -> jax.Array:
        return jnp.asarray(np.pad(coins[:, None], ((0, 0), (0, 1), (0, 0))), jnp.float32)

    highest = 1 - 2.0**-24
    coins = np.full(children.shape, highest)
    got, reached = np.zeros(vocabulary), orders.copy()
    for child in range(children.shape[1]):
        low, high = np.zeros(len(drafts)), np.ones(len(drafts))
        for _ in range(26):
            tried = coins.copy()
            tried[:, child] = np.minimum((low + high) / 2, highest)
            accepted = np.asarray(run(tree, logits, padded(tried))[0].last) == child + 1
            low, high = np.where(accepted, (low + high) / 2, low), np.where(accepted, high, (low + high) / 2)
        np.add.at(got, children[:, child], reached * high)
        reached *= 1 - np.where(high > 1 - 1e-6, 1.0, high)
    rest = np.asarray(run(tree, logits, padded(coins))[1], np.float64)
    got += (reached[:, None] * rest / rest.sum(axis=1, keepdims=True)).sum(axis=0)
    np.testing.assert_allclose(got, p, atol=1e-6)


def test_greedy_walk_follows_the_argmax_and_stays_where_it_ends():
    tree = make_tree([9, 1, 2, 5, 6, 7], [-1, 0, 0, 1, 2, 3], 4)
    predicted = jnp.asarray(
        [
            [1, 5, 0, 7, 0, 8],  # 1, 5, 7, then the bonus
            [2, 5, 0, 7, 0, 8],  # 2, and nothing of its own child 6
            [7, 5, 6, 7, 0, 8],  # 7 is drafted, but not at the root
            [2, 5, 6, 7, 3, 8],  # 2, 6
        ],
        jnp.int32,
    )
    walk = walk_greedy(tree, predicted, 3)
    assert walk.accepted.tolist() == [3, 1, 0, 2]
    assert walk.path.tolist() == [[0, 1, 3, 5], [0, 2, 2, 2], [0, 0, 0, 0], [0, 2, 4, 4]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.5, 4, 0.8), (0.7, 0, 1.0), (1.0, 0, 0.6)],
)
def test_verify_draws_from_the_filtered_distribution(monkeypatch, temperature, top_k, top_p):
    """Through `verify`, every coin by enumeration: temperature, top-k and top-p decide over drafts and bonus alike."""
    tokens, parents = TREES["branches"]
    steps, vocabulary = 3, 5
    logits = np.random.default_rng(4).normal(size=(len(tokens), vocabulary)).astype(np.float32) * 1.5
    scaled = np.exp(logits.astype(np.float64) / temperature)
    probs = scaled / scaled.sum(axis=-1, keepdims=True)
    for row in probs:  # token by token, the most probable first
        order = np.argsort(-row)
        order = order[: top_k or vocabulary]
        before = np.cumsum(row[order]) - row[order]
        kept = order[before < top_p * row[order].sum()]
        row[np.setdiff1d(np.arange(vocabulary), kept)] = 0.0
        row /= row.sum()

    coins, weights = every_draw(probs, np.asarray(make_tree(tokens, parents, 1).depths[0]))
    batch = len(coins)
    monkeypatch.setattr(verify_lib, "draw", in_order)
    monkeypatch.setattr(Sampling, "uniform", lambda _, lengths, *__: jnp.asarray(coins)[jnp.arange(batch), lengths - 3])
    sampling = dataclasses.replace(
        Sampling.greedy(batch),
        temperature=jnp.full(batch, temperature),
        top_k=jnp.full(batch, top_k, jnp.int32),
        top_p=jnp.full(batch, top_p),
    )
    walk, bonus, _ = verify(
        make_tree(tokens, parents, batch),
        jnp.broadcast_to(logits, (batch, *logits.shape)),
        steps,
        sampling,
        jnp.full(batch, 3, jnp.int32),
        jnp.full((batch, 1), -1, jnp.int32),
        greedy=False,
    )
    got = np.zeros_like(probs)
    for weight, way, taken, last in zip(
        weights, np.asarray(walk.path), np.asarray(walk.accepted), np.asarray(bonus), strict=True
    ):
        for here, there in itertools.pairwise(way[: taken + 1]):
            got[here, tokens[there]] += weight
        got[way[taken], last] += weight
    reached = np.ones(len(tokens))
    for node in range(1, len(tokens)):
        reached[node] = reached[parents[node]] * probs[parents[node], tokens[node]]
    np.testing.assert_allclose(got, reached[:, None] * probs, atol=2e-6)
