"""States that verification computed for each slot's newest tokens; a live head learns from them (`decoding.adapt`)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Observed:
    """The target's states of the newest l positions of each slot; position t lies at t modulo l.

    Attributes:
        aux: the hidden states that the head reads, concatenated: the bits of bfloat16, which a CPU scatters in place.
            Of bfloat16 itself XLA converts the whole buffer to float32 and back.
        last_hidden: the last hidden state after the final norm, bits of bfloat16.
        argmax: the most probable next token; 0 in the prompt.
    """

    aux: UInt16[Array, "b l f"]
    last_hidden: UInt16[Array, "b l h"]
    argmax: Int[Array, "b l"]

    @classmethod
    def empty(cls, batch: int, length: int, aux: int, hidden: int) -> Observed:
        """Makes a buffer of `length` positions; `aux` and `hidden` are the widths of the states."""
        of_aux, of_hidden = (jnp.zeros((batch, length, width), jnp.uint16) for width in (aux, hidden))
        return cls(of_aux, of_hidden, jnp.zeros((batch, length), jnp.int32))

    def put(
        self,
        slots: Int[Array, " r"],
        positions: Int[Array, "r p"],
        taken: Bool[Array, "r p"],
        aux: Float[Array, "r p f"],
        last_hidden: Float[Array, "r p h"],
        argmax: Int[Array, "r p"],
    ) -> Observed:
        """Writes the states of `taken` positions: at most l of a slot, which follow each other.

        A row whose slot is the batch's size is dropped.
        """
        length = self.argmax.shape[1]
        at = jnp.where(taken, positions % length, length)

        def write(held: Array, new: Array) -> Array:
            return held.at[slots[:, None], at].set(new, mode="drop")

        return Observed(
            write(self.aux, bits(aux)),
            write(self.last_hidden, bits(last_hidden)),
            write(self.argmax, argmax.astype(jnp.int32)),
        )


def bits(states: Float[Array, "*shape"]) -> UInt16[Array, "*shape"]:
    """Returns the bits of the states in bfloat16."""
    return states.astype(jnp.bfloat16).view(jnp.uint16)
