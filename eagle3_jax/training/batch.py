"""What a training step is fed: packed rows, and the frozen parts of the target."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, Float, Int

TEACHER_SHARDING_RULES = ((r"embed|rows", P("model", None)),)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed rows of T tokens, several documents each.

    Attributes:
        aux: the target's aux hidden states, concatenated in ascending order of boundary.
        last_hidden: the target's last hidden state after its final norm.
        argmax: the target's most probable next token at each position.
        loss_mask: nonzero where a token was written by the assistant.
        segment_ids: 1, 2, ... for the documents of a row, 0 for padding.
        positions: position in the document.
    """

    token_ids: Int[Array, "b t"]
    aux: Float[Array, "b t aux"]
    last_hidden: Float[Array, "b t h"]
    argmax: Int[Array, "b t"]
    loss_mask: Int[Array, "b t"]
    segment_ids: Int[Array, "b t"]
    positions: Int[Array, "b t"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Teacher:
    """The target's frozen parts that training reads; never in the optimizer.

    Attributes:
        embed: the embedding table, one row a target token.
        rows: rows of the target's LM head at the draft vocabulary, in draft order.
        draft_ids: int32 [target vocabulary], the draft token of each target token, -1 outside the draft vocabulary.
    """

    embed: Float[Array, "v h"]
    rows: Float[Array, "dv h"]
    draft_ids: Int[Array, " v"]

    @classmethod
    def of(cls, embed: Float[Array, "v h"], output_rows: Float[Array, "v h"], token_ids: Int[Array, " dv"]) -> Teacher:
        """Takes what training needs from the target; `token_ids` is the draft vocabulary in target ids."""
        draft_ids = jnp.full(embed.shape[0], -1, jnp.int32).at[token_ids].set(jnp.arange(len(token_ids)))
        return cls(embed, output_rows[token_ids], draft_ids)
