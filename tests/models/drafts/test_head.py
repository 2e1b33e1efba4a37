"""The interface that rounds rely on, for every kind of draft."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_families
from flax import nnx

from eagle3_jax.config import DraftConfig
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.drafts.eagle2 import Eagle2Config, Eagle2Head
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.models.drafts.head import Head, HeadConfig
from eagle3_jax.models.drafts.model import DraftModel
from eagle3_jax.models.drafts.mtp import DeepseekMtp, MimoMtp
from eagle3_jax.models.families import FAMILIES
from eagle3_jax.models.target import TargetModel

PAIRS, BATCH = 5, 3


def target(model_type: str) -> TargetModel:
    return tiny_families.make(next(family for family in FAMILIES if family.config.model_type == model_type))


def eagle3(**flags: Any) -> DraftHead:
    config = DraftHeadConfig.for_target(DraftConfig(vocab_size=40, **flags), target("llama").config)
    return DraftHead(config, rngs=nnx.Rngs(1))


def eagle2() -> Eagle2Head:
    config = DraftHeadConfig.for_target(DraftConfig(vocab_size=60), target("llama").config)
    shared = {field.name: getattr(config, field.name) for field in dataclasses.fields(HeadConfig)}
    return Eagle2Head(Eagle2Config(**shared, target_layers=3), rngs=nnx.Rngs(1))


HEADS = {
    "eagle3": eagle3,
    "normed output": lambda: eagle3(norm_output=True, fc_norm=True),
    "eagle2": eagle2,
    "mimo": lambda: MimoMtp(target("mimo").config, rngs=nnx.Rngs(1)),
    "deepseek": lambda: DeepseekMtp(target("deepseek_v3").config, rngs=nnx.Rngs(1)),
    "model": lambda: DraftModel(target("llama")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("begins", [False, pytest.param(True, marks=pytest.mark.long)])
def test_one_row_s_state_is_that_of_all(name, begins):
    """The state of one pair alone equals its state among all pairs."""
    head: Head = HEADS[name]()
    size, width = head.config.hidden_size, head.config.num_aux_layers * head.config.target_hidden_size
    rng = np.random.default_rng(0)
    embed, aux = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((60, size), (BATCH, PAIRS, width)))
    tokens = jnp.asarray(rng.integers(0, 60, (BATCH, PAIRS)))
    lengths = jnp.zeros(BATCH, jnp.int32) if begins else jnp.asarray([4, 0, 7], jnp.int32)
    row = jnp.asarray([2, 0, 4])

    @jax.jit
    def feed(head: Head, row: jax.Array | None):
        cache, positions = head.empty_cache(BATCH, 32), lengths[:, None] + jnp.arange(PAIRS)[None]
        preceding = tokens[:, :1] if begins else None
        return head.feed(embed, tokens, head.fuse(aux), Pass(positions, lengths, preceding=preceding, row=row), cache)

    (whole, cache), (one, same) = feed(head, None), feed(head, row)
    assert one.shape == (BATCH, 1, whole.shape[-1])
    np.testing.assert_allclose(one[:, 0], whole[np.arange(BATCH), row], atol=1e-5, rtol=1e-5)
    for got, expected in zip(jax.tree.leaves(same), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.slow
def test_a_draft_model_fed_pair_by_pair_has_the_states_of_one_pass():
    model = target("llama")
    text = jnp.asarray(np.random.default_rng(0).integers(0, 60, (1, 9)))
    expected, _, _ = model(text, Pass(jnp.arange(9)[None], jnp.zeros(1, jnp.int32)), model.empty_cache(1, 32))
    head, nothing = DraftModel(model), jnp.zeros((1, 1))
    cache, got = head.empty_cache(1, 32), []
    for first, end in ((0, 3), (3, 6), (6, 8)):  # pairs, named by their features
        tokens, positions = text[:, first + 1 : end + 1], jnp.arange(first, end)[None]
        features = jnp.zeros((1, end - first, 0))
        preceding = None if first else text[:, :1]
        this = Pass(positions, jnp.full(1, first, jnp.int32), preceding=preceding)
        state, cache = head.feed(nothing, tokens, features, this, cache)
        got.append(state)
    np.testing.assert_allclose(jnp.concatenate(got, axis=1), expected[:, 1:], atol=1e-5, rtol=1e-5)
