"""EAGLE-3 heads that norm queries and keys, or have a window, in rounds: against plain paths, and the promises."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy as toys
from toy import CHAIN, LENGTHS, MAX_TOKENS, NO_TEXT, TEXTS, TREE, generated

from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.drafts.head import Draft

pytestmark = pytest.mark.slow
WINDOW = 2  # less than the depth of a tree, whose slots are not positions
VARIANTS = {"qk_norm": {"qk_norm": True}, "window": {"sliding_window": WINDOW}}
VARIANTS["both"] = VARIANTS["qk_norm"] | VARIANTS["window"]


def make(toy, **changes) -> Draft:
    """The good head otherwise; of norms each weight is its own."""
    config = dataclasses.replace(toy.plain.head.config, **changes)
    head, rng = toys._good_head(config, toy.target, toy.good.token_ids), np.random.default_rng(0)
    for name in ("q_norm", "k_norm") if config.qk_norm else ():
        getattr(head, name)[...] = jnp.asarray(rng.uniform(1, 3, config.head_dim), jnp.float32)
    return Draft(head, toy.good.token_ids)


@pytest.mark.parametrize("name", ["window", pytest.param("both", marks=pytest.mark.long)])
def test_a_node_of_a_tree_sees_the_window_of_its_own_path(toy, name):
    """Against chains along each path, whose slots are positions."""
    head: Any = make(toy, **VARIANTS[name]).head
    rng, qkv = np.random.default_rng(1), head.attention.qkv
    qkv[...] = jnp.asarray(0.2 * rng.normal(size=qkv.shape), jnp.float32)  # sees others too
    committed, embed = 6, toy.target.embed[...]
    tokens, features = rng.integers(0, 24, (1, committed)), rng.normal(size=(1, committed, 32)).astype(np.float32)
    levels_of = [
        ([5, 9, 2], [0, 0, 0]),
        ([1, 3, 7], [0, 2, 0]),
        ([6, 8, 4], [0, 1, 1]),
    ]  # a level's tokens, their parents

    @jax.jit
    def run(head):
        at = jnp.arange(committed)[None]
        start = Pass(at, jnp.zeros(1, jnp.int32))
        states, cache = head.feed(embed, jnp.asarray(tokens), jnp.asarray(features), start, head.empty_cache(1, 32))
        this = Pass(at[:, :1], jnp.full(1, committed, jnp.int32))
        levels = head.levels(embed, TREE, jnp.zeros(1, jnp.int32), states[:, -1], this, cache, greedy=False)
        found, expected = [], []
        for ids, parents in levels_of:
            levels.descend(jnp.asarray([ids]), jnp.asarray([parents]))
            found.append(levels.logits(jnp.asarray([ids])))
        for node in range(3):  # of the last level
            place, path = node, []
            for ids, parents in reversed(levels_of):
                path.append(ids[place])
                place = parents[place]
            state, own = states[:, -1:], cache
            for depth, token in enumerate(reversed(path)):
                one = jnp.full(1, committed + depth, jnp.int32)
                state, own = head.feed(embed, jnp.asarray([[token]]), state, Pass(one[None], one), own)
            expected.append(head.logits(state))
        return found[-1], jnp.concatenate(expected, axis=1)

    found, expected = run(head)
    np.testing.assert_allclose(found, expected, atol=2e-4, rtol=2e-4)
    wide = jax.tree.map(lambda x: x, head)
    wide.config = dataclasses.replace(head.config, sliding_window=committed + 2)
    assert np.abs(run(wide)[0] - found).max() > 1e-3, "the window matters"


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(
    "name", [name if name == "both" else pytest.param(name, marks=pytest.mark.long) for name in VARIANTS]
)
def test_tokens_and_counters_are_those_of_contiguous_rounds_on_pages_in_a_batch(toy, vanilla, name, tree):
    draft = make(toy, **VARIANTS[name])
    state = generated(toy.target, draft, tree=tree)
    np.testing.assert_array_equal(state.output[:, :MAX_TOKENS], vanilla)
    assert int(state.accepted.sum()) > 20  # it is of use
    engine = Engine(toy.target, NO_TEXT, draft, tree, **toys.LARGE)
    prompts = [text[:length].tolist() for text, length in zip(TEXTS, LENGTHS, strict=True)]
    answers = engine.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))
    assert [answer.token_ids for answer in answers] == vanilla.tolist()
    assert [answer.stats.rounds for answer in answers] == state.rounds.tolist()
