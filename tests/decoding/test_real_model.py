"""The real model with drafts that are sometimes right: its tokens, and the distribution they are drawn from.

Drafts come from the answers themselves, some of them wrong, so that every length of acceptance is seen without a
trained head.
"""

import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from eagle3_jax.config import DraftConfig, DraftTree
from eagle3_jax.decoding.rounds.generate import generate
from eagle3_jax.decoding.rounds.tree import TokenTree, _ancestors
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

    def grow(target, draft, tree, root, draft_state, this, cache, sampling, copied, constraints, *, greedy):
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
    """16 or 64 prompts, 16 tokens of each. Every third draft is wrong; in the tree the right one is a second child."""
    ids, answers = [c["token_ids"] for c in GOLDEN], np.array([(c["answer"] + [0] * 16)[:16] for c in GOLDEN])
    count = [min(len(c["answer"]), 16) for c in GOLDEN]
    order = sorted(range(64), key=lambda i: len(ids[i]))[:: 4 // batches]
    accepted = taken = 0
    for part in np.array_split(order, batches):
        longest = -(-max(len(ids[i]) for i in part) // 64) * 64
        prompts, lengths = np.zeros((16, longest), np.int32), np.array([len(ids[i]) for i in part], np.int32)
        for row, i in enumerate(part):
            prompts[row, : len(ids[i])] = ids[i]

        def propose(tree, root, committed, part=part, lengths=lengths):
            place = committed[:, None] - lengths[:, None] + jnp.asarray(DEPTHS[tree])[None]  # of the answer
            right = jnp.take_along_axis(jnp.asarray(answers[part]), jnp.minimum(place, 15), axis=1)
            siblings = jnp.asarray([node % 2 for node in range(tree.num_draft_tokens)])[None] * (tree.topk - 1)
            return jnp.where((place % 3 == 2) | (siblings == 1), right + 1, right)

        drafting(monkeypatch, propose)
        if tree == TREE:  # the second child has the children: its place in the list of nodes is the first one's
            monkeypatch.setitem(PARENTS, TREE, [-1, 0, 0, 2, 2, 4, 4])
        jitted: Any = generate  # traced anew, with these drafts
        run = jax.jit(functools.partial(jitted.__wrapped__, max_tokens=16, tree=tree))
        state = run(target, draft, jnp.asarray(prompts), jnp.asarray(lengths), jax.random.key(0))
        for row, i in enumerate(part):
            assert state.output[row, : count[i]].tolist() == answers[i][: count[i]].tolist(), GOLDEN[i]["text"]
        accepted, taken = accepted + int(state.accepted.sum()), taken + int(state.rounds.sum())
    if tree is not None:
        assert accepted > taken  # more than two tokens a round
