"""MiMo's layer that predicts a further token, as a draft head (vLLM's mimo_mtp.py): Qwen 2's, the feature first.

Engines differ in the feature: as in SGLang it is the target's state behind its final norm; Xiaomi's code for vLLM, and
vLLM with it, feed the one in front of that norm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eagle3_jax.models.checkpoint.table import Entry, kernel, plain
from eagle3_jax.models.drafts.mtp import MtpHead
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
        positions: Int[Array, "b t"],
        attend: Callable[[Array, Array, Array], Array],
        row: Int[Array, " b"] | None = None,
    ) -> Float[Array, "b r h"]:
        """See `Head`. As engines do, the first pair of a text is read without its token."""
        return super().__call__(jnp.where(positions[..., None] == 0, 0, embeds), features, positions, attend, row)


def table(config: MimoConfig) -> dict[str, Entry]:
    """Parameter path in `MimoMtp` -> the tensors of the target's checkpoint; the LM head is the target's."""
    h, theirs = config.hidden_size, f"{MTP}0"
    layer = {
        path.removeprefix("blocks/0/"): _renamed(entry, "model.layers.0.", f"{theirs}.")
        for path, entry in qwen2.table(config).items()
        if path.startswith("blocks/0/")
    }
    return {f"block/{path}": entry for path, entry in layer.items()} | {
        "token_norm": plain(f"{theirs}.token_layernorm.weight", h),
        "hidden_norm": plain(f"{theirs}.hidden_layernorm.weight", h),
        "fc": kernel(f"{theirs}.input_proj.weight", h, 2 * h),
        "norm": plain(f"{theirs}.final_layernorm.weight", h),
    }


def _renamed(entry: Entry, old: str, new: str) -> Entry:
    tensors = {name.replace(old, new): shape for name, shape in entry.tensors.items()}
    return dataclasses.replace(entry, tensors=tensors)
