"""MiMo's MTP layer as a draft head (vLLM's mimo_mtp.py): a Qwen 2 layer whose input has the feature first.

Engines differ in the feature. It is the target's state after its final norm here, as in SGLang; Xiaomi's code for vLLM,
and vLLM itself, use the state before that norm.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from eagle3_jax.models.cache import Pass
from eagle3_jax.models.checkpoint.table import Entry, kernel, plain
from eagle3_jax.models.drafts.mtp import MtpHead, first_layer
from eagle3_jax.models.families import qwen2
from eagle3_jax.models.families.mimo import MTP, MimoConfig


class MimoMtp(MtpHead):
    block_type = qwen2.Block

    def joined(self, tokens: Float[Array, "b t h"], hidden: Float[Array, "b t h"]) -> Float[Array, "b t both"]:
        return jnp.concatenate([hidden, tokens], axis=-1)

    def __call__(
        self,
        embeds: Float[Array, "b t h"],
        features: Float[Array, "b t h"],
        this: Pass,
        attend: Callable[[Array, Array, Array], Array],
    ) -> Float[Array, "b r h"]:
        """See `Head`. The token of a text's first pair is zeroed, as in engines."""
        return super().__call__(jnp.where(this.positions[..., None] == 0, 0, embeds), features, this, attend)


def table(config: MimoConfig) -> dict[str, Entry]:
    """Maps parameter paths in `MimoMtp` to tensors of the target's checkpoint; the LM head is the target's."""
    h, source = config.hidden_size, f"{MTP}0"
    return first_layer(qwen2.table(config), f"{source}.") | {
        "token_norm": plain(f"{source}.token_layernorm.weight", h),
        "hidden_norm": plain(f"{source}.hidden_layernorm.weight", h),
        "fc": kernel(f"{source}.input_proj.weight", h, 2 * h),
        "norm": plain(f"{source}.final_layernorm.weight", h),
    }
