"""A small head, its teacher, and random packed batches."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.sequence import WHOLE
from eagle3_jax.training.batch import Batch, Teacher

VOCAB, DRAFT_VOCAB, HIDDEN = 60, 24, 16


@pytest.fixture(scope="session")
def head_config() -> DraftHeadConfig:
    return DraftHeadConfig(
        vocab_size=VOCAB,
        draft_vocab_size=DRAFT_VOCAB,
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        max_position_embeddings=128,
        aux_layers=(0, 1, 3),
    )


@pytest.fixture(scope="session")
def new_head(head_config) -> Callable[..., DraftHead]:
    """Heads with weights large enough for attention to matter, and norms that are not 1."""

    def build(**changes) -> DraftHead:
        head = DraftHead(dataclasses.replace(head_config, **changes), rngs=nnx.Rngs(0))
        leaves, structure = jax.tree.flatten(head)
        keys = jax.random.split(jax.random.key(1), len(leaves))
        scaled = [
            8 * x if x.ndim > 1 else x + 0.3 * jax.random.normal(key, x.shape)
            for key, x in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, scaled)

    return build


@pytest.fixture(scope="session")
def head(new_head) -> DraftHead:
    return new_head()


@pytest.fixture(scope="session")
def teacher() -> Teacher:
    rng = np.random.default_rng(2)
    embed, rows = rng.normal(size=(2, VOCAB, HIDDEN)).astype(np.float32)
    token_ids = np.sort(rng.permutation(VOCAB)[:DRAFT_VOCAB]).astype(np.int32)
    return Teacher.of(jnp.asarray(embed), jnp.asarray(rows), jnp.asarray(token_ids))


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., Batch]:
    """Batches of random documents: `make_batch([[5, 9], [12]], row_length=16)` are two rows, one of two documents."""

    def build(rows: Sequence[Sequence[int]], row_length: int, seed: int = 0) -> Batch:
        documents = 0
        arrays: dict[str, np.ndarray] = {
            name: np.zeros((len(rows), row_length), np.int32)
            for name in ("token_ids", "argmax", "loss_mask", "segment_ids", "positions")
        }
        arrays["aux"] = np.zeros((len(rows), row_length, 3 * HIDDEN), np.float32)
        arrays["last_hidden"] = np.zeros((len(rows), row_length, HIDDEN), np.float32)
        for row, lengths in enumerate(rows):
            start = 0
            for segment, length in enumerate(lengths, start=1):
                rng = np.random.default_rng((seed, documents))  # a document is the same wherever it lies
                documents += 1
                at = (row, slice(start, start + length))
                arrays["token_ids"][at] = rng.integers(0, VOCAB, length)
                arrays["argmax"][at] = rng.integers(0, VOCAB, length)
                arrays["loss_mask"][at] = rng.integers(0, 3, length) > 0
                arrays["aux"][at] = rng.normal(size=(length, 3 * HIDDEN))
                arrays["last_hidden"][at] = rng.normal(size=(length, HIDDEN))
                arrays["segment_ids"][at] = segment
                arrays["positions"][at] = np.arange(length)
                start += length
        return Batch(**{name: jnp.asarray(x) for name, x in arrays.items()}, split=WHOLE)

    return build
