"""The MTP layer of Qwen 3.5 and Qwen3-Next as a draft head: gated attention, an input with the embedding first.

Norms multiply by 1 + the stored weight. As in vLLM 0.32.0 (qwen3_5_mtp.py, qwen3_next_mtp.py) and SGLang 0.5.23, the
feature is the target's state after its final norm, and the normed output recurs. The layer has experts where the
target's first one has them, as in vLLM.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from eagle3_jax.models.checkpoint.table import Entry, kernel, plain
from eagle3_jax.models.drafts.mtp import MtpHead, first_layer
from eagle3_jax.models.families import qwen3_5
from eagle3_jax.models.families.gemma3 import offset_norm
from eagle3_jax.models.families.qwen3_5 import FULL, MTP, Qwen35Config
from eagle3_jax.models.layers import zeros


def _alone(config: Qwen35Config) -> Qwen35Config:
    return dataclasses.replace(config, num_hidden_layers=1, layer_types=(FULL,))


def _layer(target: Qwen35Config, layer: int, *, dtype: Any, rngs: nnx.Rngs) -> qwen3_5.Block:
    """Makes the layer, which is one of full attention."""
    return qwen3_5.Block(_alone(target), 0, dtype=dtype, rngs=rngs)


class Qwen35Mtp(MtpHead):
    block_type = staticmethod(_layer)
    counted_by = (*MtpHead.counted_by, "mtp_num_hidden_layers")

    def __init__(self, target: Qwen35Config, *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
        super().__init__(target, dtype=dtype, rngs=rngs)
        self.token_norm, self.hidden_norm, self.norm = (zeros(target.hidden_size, dtype) for _ in range(3))

    def normed(self, x: Float[Array, "b t h"], weight: nnx.Param) -> Float[Array, "b t h"]:
        """See `MtpHead`; `weight` is an offset from 1."""
        return offset_norm(x, weight[...], self.config.model.rms_norm_eps)


def table(config: Qwen35Config) -> dict[str, Entry]:
    """Maps parameter paths in `Qwen35Mtp` to tensors of the target's checkpoint; the LM head is the target's."""
    h = config.hidden_size
    return first_layer(qwen3_5.table(_alone(config)), f"{MTP}layers.0.") | {
        "token_norm": plain(f"{MTP}pre_fc_norm_embedding.weight", h),
        "hidden_norm": plain(f"{MTP}pre_fc_norm_hidden.weight", h),
        "fc": kernel(f"{MTP}fc.weight", h, 2 * h),
        "norm": plain(f"{MTP}norm.weight", h),
    }
