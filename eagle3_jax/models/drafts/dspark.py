"""DSpark: DFlash's backbone in the next-token layout, and two small heads (arXiv 2607.05147).

Row j predicts the token behind its own position, the anchor's row too. The Markov head adds to the logits what the
token in front says of the next one. The confidence head says how probable it is that a draft is accepted.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.vocabulary.api import vocabulary_logits
from eagle3_jax.models.drafts.dflash import BlockHeadConfig, DFlash
from eagle3_jax.models.layers import embeddings, linear, normal, zeros


class DSpark(DFlash):
    """`markov_in` [V, rank] is read at tokens of the target, `markov_out` [draft vocabulary, rank] at drafts."""

    first_row = 0

    def __init__(self, config: BlockHeadConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
        super().__init__(config, dtype=dtype, rngs=rngs)
        c = config
        self.markov_in = normal((c.vocab_size, c.markov_rank), dtype, rngs)
        self.markov_out = normal((c.draft_vocab_size, c.markov_rank), dtype, rngs)
        if c.confidence:
            self.confidence = normal((c.hidden_size + c.markov_rank, 1), dtype, rngs)
            self.confidence_bias = zeros(1, dtype)

    def adjusted(
        self, logits: Float[Array, "*batch dv"], states: Float[Array, "*batch h"], before: Int[Array, "*batch"]
    ) -> Float[Array, "*batch dv"]:
        """See `DFlash`: the Markov head's bias is added."""
        return logits + vocabulary_logits(self._before(states, before), self.markov_out[...])

    def confidence_logits(
        self, states: Float[Array, "*batch h"], before: Int[Array, "*batch"]
    ) -> Float[Array, "*batch"]:
        """float32; their sigmoid is the probability that a draft is accepted whose predecessors were."""
        read = jnp.concatenate([states, self._before(states, before)], axis=-1)
        return (linear(read, self.confidence[...]) + self.confidence_bias[...].astype(read.dtype)[0])[..., 0].astype(
            jnp.float32
        )

    def _before(self, states: Array, before: Array) -> Array:
        return embeddings(self.markov_in[...], before).astype(states.dtype)
