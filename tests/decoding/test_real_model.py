"""The real model with drafts that are sometimes right: its tokens, and the distribution they are drawn from.

Drafts come from the answers themselves, some of them wrong, so that every length of acceptance is seen without a
trained head.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from toy import plan

from eagle3_jax.config import DraftConfig, DraftTree
from eagle3_jax.decoding.rounds.generate import generate, prefill
from eagle3_jax.decoding.rounds.round import advance
from eagle3_jax.decoding.rounds.sampling import Sampling
from eagle3_jax.decoding.rounds.state import State
from eagle3_jax.decoding.rounds.tree import TokenTree, _ancestors
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.checkpoint import fetch
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.models.drafts.head import Draft

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden/smollm2.json").read_text())["conversations"]
CHAIN = DraftTree(num_steps=3, topk=1, num_draft_tokens=4)
TREE = DraftTree(num_steps=3, topk=2, num_draft_tokens=7)
PARENTS = {CHAIN: [-1, 0, 1, 2], TREE: [-1, 0, 0, 1, 1, 3, 3]}
DEPTHS = {CHAIN: [0, 1, 2, 3], TREE: [0, 1, 1, 2, 2, 3, 3]}


@pytest.fixture(scope="module")
def target():
    return fetch.load_target("smollm2-135m-instruct").model


@pytest.fixture(scope="module")
def draft(target) -> Draft:
    """A head of the right shape; what it drafts is replaced."""
    config = DraftHeadConfig.for_target(DraftConfig(vocab_size=64), target.config)
    return Draft(DraftHead(config, rngs=nnx.Rngs(0)), jnp.arange(64))


def drafting(monkeypatch, propose):
    """Replaces what the head drafts: propose(tree, root, lengths) -> tokens [b, n]."""

    def grow(target, draft, tree, root, draft_state, this, cache, sampling, copied, *, greedy):
        tokens = jnp.concatenate([root[:, None], propose(tree, root, this.lengths)[:, 1:]], axis=1)
        rows = functools.partial(jnp.broadcast_to, shape=tokens.shape)
        parents, depths = rows(jnp.asarray(PARENTS[tree])), rows(jnp.asarray(DEPTHS[tree]))
        return TokenTree(tokens, parents, depths, _ancestors(parents, tree.num_steps)), cache

    monkeypatch.setattr("eagle3_jax.decoding.rounds.round.grow", grow)


@pytest.mark.slow
@pytest.mark.parametrize("batches", [1, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "tree",
    [pytest.param(None, marks=pytest.mark.long), pytest.param(CHAIN, marks=pytest.mark.long), TREE],
    ids=["vanilla", "chain", "tree"],
)
def test_answers_are_llama_cpp_s(target, draft, tree, batches, monkeypatch):
    """16 or 64 prompts, 32 tokens of each. Every third draft is wrong; in the tree the right one is a second child."""
    ids, answers = [c["token_ids"] for c in GOLDEN], np.array([(c["answer"] + [0] * 32)[:32] for c in GOLDEN])
    count = [min(len(c["answer"]), 32) for c in GOLDEN]
    order = sorted(range(64), key=lambda i: len(ids[i]))[:: 4 // batches]
    accepted = taken = 0
    for part in np.array_split(order, batches):
        longest = -(-max(len(ids[i]) for i in part) // 64) * 64
        prompts, lengths = np.zeros((16, longest), np.int32), np.array([len(ids[i]) for i in part], np.int32)
        for row, i in enumerate(part):
            prompts[row, : len(ids[i])] = ids[i]

        def propose(tree, root, committed, part=part, lengths=lengths):
            place = committed[:, None] - lengths[:, None] + jnp.asarray(DEPTHS[tree])[None]  # of the answer
            right = jnp.take_along_axis(jnp.asarray(answers[part]), jnp.minimum(place, 31), axis=1)
            siblings = jnp.asarray([node % 2 for node in range(tree.num_draft_tokens)])[None] * (tree.topk - 1)
            return jnp.where((place % 3 == 2) | (siblings == 1), right + 1, right)

        drafting(monkeypatch, propose)
        if tree == TREE:  # the second child has the children: its place in the list of nodes is the first one's
            monkeypatch.setitem(PARENTS, TREE, [-1, 0, 0, 2, 2, 4, 4])
        jitted: Any = generate  # traced anew, with these drafts
        run = jax.jit(functools.partial(jitted.__wrapped__, max_tokens=32, tree=tree))
        state = run(target, draft, jnp.asarray(prompts), jnp.asarray(lengths), jax.random.key(0))
        for row, i in enumerate(part):
            assert state.output[row, : count[i]].tolist() == answers[i][: count[i]].tolist(), GOLDEN[i]["text"]
        accepted, taken = accepted + int(state.accepted.sum()), taken + int(state.rounds.sum())
    if tree is not None:
        assert accepted > taken  # more than two tokens a round


def filtered(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """One distribution in float64, from the definition."""
    probs = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")[: top_k or None]
    mass = probs[order]
    order = order[(np.cumsum(mass) - mass) < top_p * mass.sum()]
    order = order[probs[order] >= min_p * probs[order].max()]
    kept = np.zeros_like(probs)
    kept[order] = probs[order] / probs[order].sum()
    return kept


def chi_square(tokens: np.ndarray, probs: np.ndarray) -> float:
    """How probable a statistic as large as this one is; tokens that are rare are one class."""
    counts, expected = np.bincount(tokens, minlength=len(probs)), len(tokens) * probs
    assert not counts[probs == 0].any()
    common = expected >= 5
    rest = expected[~common].sum()
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
    freedom = common.sum() - 1
    if rest >= 1:
        statistic += (counts[~common].sum() - rest) ** 2 / rest
        freedom += 1
    return 0.5 if freedom < 1 else float(jax.scipy.special.gammaincc(freedom / 2, statistic / 2))


CONFIGURATIONS = list(itertools.product((0.6, 1.0, 1.6), (0, 3, 40), (1.0, 0.8), (0.0, 0.1), (CHAIN, TREE)))


@pytest.mark.long
def test_sampled_rounds_have_the_target_s_distribution_in_every_configuration(target, draft, monkeypatch):
    """72 configurations: first token of a round, and the second where a draft was accepted, by chi-square."""
    ids = GOLDEN[0]["token_ids"]
    batch, repeats = 64, 8

    @jax.jit
    def logits_behind(tokens):
        positions = jnp.arange(tokens.shape[1])[None]
        hidden, _, _ = target(tokens, Pass(positions, jnp.zeros(1, jnp.int32)), target.empty_cache(*tokens.shape))
        return target.logits(hidden[:, -1])[0]

    root = int(jnp.argmax(logits_behind(jnp.asarray([ids]))))
    at_root = np.asarray(logits_behind(jnp.asarray([[*ids, root]])))
    best = np.argsort(-at_root)[:2]
    behind = {int(t): np.asarray(logits_behind(jnp.asarray([[*ids, root, int(t)]]))) for t in best}
    second = {t: np.argsort(-logits)[:2] for t, logits in behind.items()}
    first = int(best[0])
    nodes = {
        CHAIN: [root, first, second[first][0], 0],
        TREE: [root, *best, *second[first], 0, 0],
    }
    drafting(
        monkeypatch, lambda tree, root, _: jnp.broadcast_to(jnp.asarray(nodes[tree]), (len(root), len(nodes[tree])))
    )
    start = {tree: one_sequence(target, draft, tuple(ids), tree) for tree in (CHAIN, TREE)}
    worst, seen = [], 0
    for number, (temperature, top_k, top_p, min_p, tree) in enumerate(CONFIGURATIONS):
        chosen, taken = [], []
        for repeat in range(repeats):
            key = jax.random.split(jax.random.key(1000 * number + repeat), batch)
            sampling = Sampling(
                jnp.full(batch, temperature),
                jnp.full(batch, top_k, jnp.int32),
                jnp.full(batch, top_p),
                jnp.full(batch, min_p),
                key,
            )
            state = spread(start[tree], sampling)
            state = one_round(target, draft, state, tree)
            chosen.append(np.asarray(state.output)[:, 1:3])
            taken.append(np.asarray(state.accepted)[:, 0])
        tokens, accepted = np.concatenate(chosen), np.concatenate(taken)
        asked = temperature, top_k, top_p, min_p
        worst.append((chi_square(tokens[:, 0], filtered(at_root, *asked)), asked, tree))
        rows = tokens[(accepted == 1) & (tokens[:, 0] == first)]
        if len(rows) > 100:
            worst.append((chi_square(rows[:, 1], filtered(behind[first], *asked)), asked, tree))
            seen += 1
    assert seen > 30
    assert min(worst, key=lambda entry: entry[0])[0] > 1e-5, min(worst, key=lambda entry: entry[0])
    assert abs(np.mean([entry[0] for entry in worst]) - 0.5) < 0.15


def one_sequence(target, draft, ids: tuple[int, ...], tree: DraftTree) -> State:
    read = jax.jit(prefill, static_argnames=("cache_length", "max_output", "tree", "greedy"))
    return read(
        target,
        draft,
        jnp.asarray([ids], jnp.int32),
        jnp.asarray([len(ids)], jnp.int32),
        Sampling.greedy(1),
        jnp.full(1, 8, jnp.int32),
        jnp.full((1, 1), -1),
        cache_length=128,
        max_output=8,
        tree=tree,
        greedy=True,
    )


@jax.jit
def spread(one: State, sampling: Sampling) -> State:
    """Many sequences with one past and random numbers of their own."""
    batch = len(sampling.temperature)
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape[1:])), one)
    return dataclasses.replace(state, requests=dataclasses.replace(state.requests, sampling=sampling))


@functools.partial(jax.jit, static_argnames="tree")
def one_round(target, draft, state, tree):
    return advance(target, draft, state, plan(tree, greedy=False))
