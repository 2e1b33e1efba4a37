"""Small block heads with weights large enough for attention to matter, drawn without a compilation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle3_jax.models.drafts.dflash import BlockHeadConfig, DFlash

VOCAB, DRAFT_VOCAB, HIDDEN = 60, 24, 16


def block_config(**changes) -> BlockHeadConfig:
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "hidden_size": HIDDEN,
        "target_hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_position_embeddings": 128,
        "aux_layers": (0, 1, 3),
        "block_size": 4,
        "mask_token_id": 59,
        "layer_types": ("full_attention",) * 2,
        "markov_rank": 8,
        "conv_group": 4,
        "selector_rank": 8,
        "selector_top_k": 5,
    }
    return BlockHeadConfig(**values | changes)


def make_block_head(kind: type[DFlash], **changes) -> DFlash:
    """Matrices of N(0, 0.16), norms and kernels around what they are when new."""
    head = nnx.eval_shape(lambda: kind(block_config(**changes), rngs=nnx.Rngs(0)))
    leaves, structure = jax.tree.flatten(head)
    rng = np.random.default_rng(1)

    def draw(x: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(rng.normal((1 if x.ndim == 1 else 0), 0.3 if x.ndim == 1 else 0.16, x.shape), jnp.float32)

    return jax.tree.unflatten(structure, [draw(x) for x in leaves])
