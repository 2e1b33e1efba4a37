"""Inputs of a training step: packed rows (`Batch`), and the target's frozen parts (`Teacher`)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, Float, Int

from eagle3_jax.sequence import Split

# A leaf of a pytree: an array, or its shape or sharding instead.
Leaf = Any

# Whole on each data shard: looking tokens up in a table that is split over it, or gathering it, costs more.
TEACHER_SHARDING_RULES = ((r"embed|rows", P("model", None)),)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed rows of T tokens with several documents each; or pieces of such rows, as `split` says."""

    token_ids: Leaf  # int [B, T]
    aux: Leaf  # float or Fp8 [B, T, n_aux * H], the target's aux hidden states in ascending order of boundary
    last_hidden: Leaf  # float or Fp8 [B, T, H], after the final norm
    argmax: Leaf  # int [B, T], the target's most probable next token at each position
    loss_mask: Leaf  # int [B, T], nonzero where a token was written by the assistant
    segment_ids: Leaf  # int [B, T], 1, 2, ... for the documents of a row, 0 for padding
    positions: Leaf  # int [B, T], position in the document
    split: Split = dataclasses.field(default=Split(), metadata={"static": True}, kw_only=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Teacher:
    """The target's frozen parts that training reads, outside the optimizer."""

    embed: Leaf  # float [V, H], the embedding table, one row per target token
    rows: Leaf  # float [draft vocabulary, H], rows of the target's LM head at the draft vocabulary, in draft order
    draft_ids: Leaf  # int32 [V], the draft token of each target token, -1 outside the draft vocabulary
    blocks: Any = ()  # of the target's layers, those that the loss reads
    cap: float | None = dataclasses.field(default=None, metadata={"static": True})  # `ModelConfig.logit_cap`

    @classmethod
    def of(cls, embed: Float[Array, "v h"], output_rows: Float[Array, "v h"], token_ids: Int[Array, " dv"]) -> Teacher:
        """Selects the parts from the target's arrays; `token_ids` is the draft vocabulary in target ids."""
        draft_ids = jnp.full(embed.shape[0], -1, jnp.int32).at[token_ids].set(jnp.arange(len(token_ids)))
        return cls(embed, output_rows[token_ids], draft_ids)

    @property
    def token_ids(self) -> Int[Array, " dv"]:
        """The target's id of each draft token; ascending."""
        return jnp.nonzero(self.draft_ids >= 0, size=len(self.rows))[0].astype(jnp.int32)
