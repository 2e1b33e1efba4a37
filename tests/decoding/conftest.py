"""A toy target and heads for it: one that often agrees with it, one of the same shape that knows nothing, and a plain
EAGLE-3 one (grouped queries, pre-norm recurrence) that knows nothing either."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_heads
from flax import nnx

from eagle3_jax.config import DraftConfig
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.families.llama import Llama

VOCABULARY, HIDDEN = 24, 32


@dataclasses.dataclass(frozen=True)
class Toy:
    target: Llama
    random: Draft
    good: Draft
    plain: Draft

    def with_eos(self, *tokens: int) -> Llama:
        """The target with these end-of-sequence tokens."""
        graph, parameters = nnx.split(self.target)
        twin = nnx.merge(graph, parameters)
        twin.config = dataclasses.replace(twin.config, eos_token_ids=tokens)
        return twin


@pytest.fixture(scope="session")
def toy() -> Toy:
    config = tiny.llama_config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        head_dim=16,
        tie_word_embeddings=False,
        max_position_embeddings=512,
        aux_layers=(0, 1, 2),
    )
    target = tiny_heads.initialise(lambda: Llama(config, rngs=nnx.Rngs(0)), 0)
    basis, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(HIDDEN, HIDDEN)))
    target.embed[...] = jnp.asarray(basis[:VOCABULARY], jnp.float32)
    target.lm_head[...] *= 50
    for block in target.blocks:  # strong enough that the context decides too
        block.attention.o[...] *= 10
        block.mlp.down[...] *= 10
    token_ids = jnp.asarray([t for t in range(VOCABULARY) if t not in (4, 22)], jnp.int32)
    draft = DraftConfig(vocab_size=len(token_ids), intermediate_size=40)
    plain = DraftHeadConfig.for_target(draft, config)
    good = _good_head(plain, target, token_ids)
    return Toy(
        target,
        random=Draft(tiny_heads.initialise(lambda: DraftHead(good.config, rngs=nnx.Rngs(0)), 3), token_ids),
        good=Draft(good, token_ids),
        plain=Draft(tiny_heads.initialise(lambda: DraftHead(plain, rngs=nnx.Rngs(0)), 5), token_ids),
    )


def _good_head(config: DraftHeadConfig, target: Llama, token_ids: jax.Array) -> DraftHead:
    """Attends to its own token, adds its embedding to the state, and reads that with the target's LM head."""
    heads = HIDDEN // config.head_dim
    config = dataclasses.replace(config, num_attention_heads=heads, num_key_value_heads=heads, norm_output=True)
    head = tiny_heads.initialise(lambda: DraftHead(config, rngs=nnx.Rngs(0)), 4)
    identity = jnp.eye(HIDDEN).reshape(HIDDEN, heads, config.head_dim)
    embedding_half = jnp.stack([3 * identity, 3 * identity, identity], axis=2).reshape(HIDDEN, -1)
    head.attention.qkv[...] = jnp.concatenate([embedding_half, 0.01 * head.attention.qkv[...][HIDDEN:]], axis=0)
    head.attention.o[...] = 3 * jnp.eye(HIDDEN)
    head.lm_head[...] = target.lm_head[...][token_ids]
    return head
