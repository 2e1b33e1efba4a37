"""Heads of EAGLE-2 in rounds: the network against a loop over numpy, then the same promises as for EAGLE-3's."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_heads
from flax import nnx
from toy import CHAIN, IDS, MAX_TOKENS, NO_TEXT, SMALL, TREE, generated

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.drafts.eagle2 import Eagle2Config, Eagle2Head
from eagle3_jax.models.drafts.head import Draft

TREES = [CHAIN, TREE, DraftTree(num_steps=3, topk=2, num_draft_tokens=8, lookup_tokens=3)]


def make(toy, token_ids: np.ndarray, **options: Any) -> Draft:
    """A head that often agrees with the target: it adds what its token's embedding is to the feature."""
    shape = toy.target.config
    config = Eagle2Config(
        vocab_size=shape.vocab_size,
        draft_vocab_size=len(token_ids),
        hidden_size=shape.hidden_size,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        max_position_embeddings=512,
        target_layers=shape.num_hidden_layers,
        **options,
    )
    head = tiny_heads.initialise(lambda: Eagle2Head(config, rngs=nnx.Rngs(0)), 6)
    head.fc[...] = head.fc[...].at[: shape.hidden_size].add(jnp.eye(shape.hidden_size))
    head.lm_head[...] = toy.target.lm_head[...][token_ids]
    return Draft(head, jnp.asarray(token_ids, jnp.int32))


@pytest.fixture
def model(toy):
    return toy.target.observed_at((toy.target.config.num_hidden_layers + 1,))


def reference(head: Eagle2Head, embeds: np.ndarray, features: np.ndarray) -> np.ndarray:
    """One sequence, position after position, in float64."""
    c, weights = head.config, jax.tree.map(lambda x: np.asarray(x, np.float64), head)
    group, d, half = c.num_attention_heads // c.num_key_value_heads, c.head_dim, c.head_dim // 2
    x = np.concatenate([embeds, features], axis=-1) @ weights.fc[...] + (weights.fc_bias[...] if c.fc_bias else 0)
    qkv = (x @ weights.attention.qkv[...]).reshape(len(x), c.num_key_value_heads, group + 2, d)
    angles = np.arange(len(x))[:, None] / c.rope_theta ** (np.arange(half) / half)

    def turned(vector: np.ndarray, at: int) -> np.ndarray:
        cos, sin = np.cos(angles[at]), np.sin(angles[at])
        first, second = vector[:half], vector[half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin])

    attended = np.zeros((len(x), c.num_attention_heads, d))
    for i in range(len(x)):
        for n in range(c.num_attention_heads):
            k, q = n // group, turned(qkv[i, n // group, n % group], i)
            scores = np.array([turned(qkv[j, k, -2], j) @ q for j in range(i + 1)]) / np.sqrt(d)
            weight = np.exp(scores - scores.max())
            attended[i, n] = weight / weight.sum() @ qkv[: i + 1, k, -1]
    x = x + attended.reshape(len(x), -1) @ weights.attention.o[...]
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + c.rms_norm_eps) * weights.post_norm[...]
    gate = normed @ weights.mlp.gate[...]
    return x + (gate / (1 + np.exp(-gate)) * (normed @ weights.mlp.up[...])) @ weights.mlp.down[...]


@pytest.mark.slow
@pytest.mark.parametrize("fc_bias", [False, True])
def test_the_network(toy, fc_bias):
    draft = make(toy, np.arange(24), fc_bias=fc_bias)
    rng = np.random.default_rng(0)
    noisy = jax.tree.map(lambda x: x + jnp.asarray(rng.normal(size=x.shape) * 0.3, x.dtype), draft.head)
    draft = dataclasses.replace(draft, head=noisy)
    tokens, features = rng.integers(0, 24, (1, 7)), rng.normal(size=(1, 7, 32)).astype(np.float32)
    states, _ = draft.head.feed(
        toy.target.embed[...],
        jnp.asarray(tokens),
        draft.head.fuse(jnp.asarray(features)),
        Pass(jnp.arange(7)[None], jnp.zeros(1, jnp.int32)),
        draft.head.empty_cache(1, 16),
    )
    assert isinstance(noisy, Eagle2Head)
    expected = reference(noisy, np.asarray(toy.target.embed[...])[tokens[0]], features[0])
    np.testing.assert_allclose(states[0], expected, atol=1e-4, rtol=1e-4)
    logits = expected @ np.asarray(noisy.lm_head[...]).T
    np.testing.assert_allclose(draft.head.logits(states)[0], logits, atol=1e-3, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("tree", TREES, ids=["chain", "tree", "tree and text"])
def test_greedy_drafts_change_no_token(toy, vanilla, model, tree):
    drafted = generated(model, make(toy, IDS), tree=tree)
    np.testing.assert_array_equal(drafted.output[:, :MAX_TOKENS], vanilla)
    assert int(drafted.accepted.sum()) > 10  # it is of use


@pytest.mark.slow
def test_the_engine_takes_it(toy, model):
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    prompts = [[1, 2, 3], [9, 8, 7, 6, 5, 4], [11]]
    plain = Engine(toy.target, NO_TEXT, **SMALL).generate(prompts, params)
    drafting = Engine(model, NO_TEXT, make(toy, np.arange(24)), TREE, **SMALL)
    assert [x.token_ids for x in drafting.generate(prompts, params)] == [x.token_ids for x in plain]
    with pytest.raises(ValueError, match=r"draft\.aux_layers: got \(3,\), expected the target's \(0, 1, 2\)"):
        Engine(toy.target, NO_TEXT, make(toy, np.arange(24)), TREE, **SMALL)
