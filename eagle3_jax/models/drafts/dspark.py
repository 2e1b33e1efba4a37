"""DSpark: DFlash's backbone in the next-token layout, with a Markov head and a confidence head (arXiv 2607.05147).

Every row, the anchor's included, predicts the token after its own position. The Markov head adds a bias to the logits
that depends on the preceding token. The confidence head predicts the probability that a draft is accepted.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.linear.api import linear
from eagle3_jax.kernels.vocabulary.api import top_k_of_logits, vocabulary_logits
from eagle3_jax.models.drafts.dflash import BlockHeadConfig, DFlash
from eagle3_jax.models.layers import embeddings, normal, zeros


class DSpark(DFlash):
    """The DSpark head; `markov_in` [V, rank] by target id, `markov_out` [draft vocabulary, rank] by draft id."""

    first_row = 0
    corrector = "markov"
    gathered = ("lm_head", "markov_in")
    vocabulary_rows = ("lm_head", "markov_out")

    def __init__(self, config: BlockHeadConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
        super().__init__(config, dtype=dtype, rngs=rngs)
        c = config
        self.markov_in = normal((c.vocab_size, c.markov_rank), dtype, rngs)
        self.markov_out = normal((c.draft_vocab_size, c.markov_rank), dtype, rngs)
        if c.confidence:
            self.confidence = normal((c.hidden_size + c.markov_rank, 1), dtype, rngs)
            self.confidence_bias = zeros(1, dtype)

    def candidates(self, states: Float[Array, "b s h"], k: int) -> Any:
        """See `DFlash`: all logits, since the Markov head may raise any token."""
        return states, vocabulary_logits(states, self.output_rows)

    def best(
        self, candidates: Any, row: int, before: Int[Array, "b m"], k: int
    ) -> tuple[Float[Array, "b m k"], Int[Array, "b m k"]]:
        states, logits = (jnp.broadcast_to(x[:, row, None], (*before.shape, x.shape[-1])) for x in candidates)
        return top_k_of_logits(self.adjusted(logits, states, before), k)

    def adjusted(
        self, logits: Float[Array, "*batch dv"], states: Float[Array, "*batch h"], before: Int[Array, "*batch"]
    ) -> Float[Array, "*batch dv"]:
        """See `DFlash`: adds the Markov head's bias."""
        return logits + vocabulary_logits(self._before(states, before), self.markov_out[...])

    def confidence_logits(
        self, states: Float[Array, "*batch h"], before: Int[Array, "*batch"]
    ) -> Float[Array, "*batch"]:
        """Computes float32 logits of the probability that a draft is accepted, given that its predecessors are."""
        read = jnp.concatenate([states, self._before(states, before)], axis=-1)
        return (linear(read, self.confidence[...]) + self.confidence_bias[...].astype(read.dtype)[0])[..., 0].astype(
            jnp.float32
        )

    def _before(self, states: Array, before: Array) -> Array:
        return embeddings(self.markov_in[...], before).astype(states.dtype)
