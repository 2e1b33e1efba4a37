"""DFlash2: DFlash with convolutions over the rows of a block, and a selector among the best candidates.

Source: z-lab/dflash at 07ebd93. Attention and the MLP are each wrapped in causal convolutions whose taps depend on the
row. The selector scores a row's best candidates by the preceding token. Freshly initialised convolutions are the
identity. With a zero predecessor codebook the selector adds nothing either, and the head drafts as DFlash.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.linear.api import linear
from eagle3_jax.kernels.vocabulary.api import top_k_of_logits, vocabulary_top_k
from eagle3_jax.models.drafts.dflash import BlockHeadConfig, BlockLayer, DFlash
from eagle3_jax.models.layers import embeddings, normal


class BlockConvolution(nnx.Module):
    """Two causal convolutions over the rows of a block, before and after a sublayer.

    `base` [2, taps, H]; `taps` [H, 2 * taps * H / group], each row's additive term, one number per group of channels.
    The taps of both convolutions are computed from the sublayer's input.
    """

    def __init__(self, config: BlockHeadConfig, *, dtype: Any, rngs: nnx.Rngs) -> None:
        c = config
        self.base = nnx.Param(jnp.zeros((2, c.conv_taps, c.hidden_size), dtype).at[:, 0].set(1))
        self.taps = nnx.Param(jnp.zeros((c.hidden_size, 2 * c.conv_taps * c.hidden_size // c.conv_group), dtype))

    def __call__(
        self, sublayer: Callable[[Array], Array], x: Float[Array, "b m h"], rows: int
    ) -> Float[Array, "b m h"]:
        sides, taps, h = self.base[...].shape
        blocks = x.shape[0], x.shape[1] // rows, rows
        added = linear(x, self.taps[...]).reshape(*blocks, sides, taps, -1)
        kernel = jnp.repeat(added, h // added.shape[-1], axis=-1) + self.base[...].astype(x.dtype)[None, None, None]

        def convolved(side: int, y: Array) -> Array:
            own = y.reshape(*blocks, h)
            shifted = (jnp.pad(own, ((0, 0), (0, 0), (t, 0), (0, 0)))[:, :, :rows] for t in range(taps))
            tapped = [kernel[:, :, :, side, t] * row for t, row in enumerate(shifted)]
            return sum(tapped[1:], tapped[0]).reshape(y.shape)

        return convolved(1, sublayer(convolved(0, x)))


class ConvolvedLayer(BlockLayer):
    """A layer with convolutions around attention and the MLP; the context is not convolved."""

    def __init__(self, config: BlockHeadConfig, *, dtype: Any, rngs: nnx.Rngs) -> None:
        super().__init__(config, dtype=dtype, rngs=rngs)
        self.attention_conv = BlockConvolution(config, dtype=dtype, rngs=rngs)
        self.mlp_conv = BlockConvolution(config, dtype=dtype, rngs=rngs)

    def around(self, name: str, sublayer: Callable[[Array], Array], normed: Float[Array, "b m h"], rows: int) -> Array:
        return getattr(self, name)(sublayer, normed, rows)


class DFlash2(DFlash):
    """The DFlash2 head; `predecessors` [V, rank] by target id, `successors` [draft vocabulary, rank] by draft id."""

    layer = ConvolvedLayer
    corrector = "selector"
    vocabulary_rows = ("lm_head", "successors")
    gathered = ("lm_head", "predecessors", "successors")

    def __init__(self, config: BlockHeadConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
        super().__init__(config, dtype=dtype, rngs=rngs)
        c = config
        self.predecessors = normal((c.vocab_size, c.selector_rank), dtype, rngs)
        self.successors = normal((c.draft_vocab_size, c.selector_rank), dtype, rngs)
        self.selector = normal((c.hidden_size, c.selector_rank), dtype, rngs)

    @property
    def most_children(self) -> int:
        return self.config.selector_top_k

    def candidate_scores(
        self,
        logits: Float[Array, "*batch c"],
        candidates: Int[Array, "*batch c"],
        states: Float[Array, "*batch h"],
        before: Int[Array, "*batch"],
    ) -> Float[Array, "*batch c"]:
        """Adds the selector's scores to the logits of candidates (draft ids)."""
        read = embeddings(self.predecessors[...], before).astype(states.dtype) * linear(states, self.selector[...])
        successors = embeddings(self.successors[...], candidates).astype(states.dtype)
        return logits + jnp.sum((read[..., None, :] * successors).astype(jnp.float32), axis=-1)

    def best_of(self, logits: Float[Array, "*batch dv"]) -> tuple[Float[Array, "*batch c"], Int[Array, "*batch c"]]:
        """Returns the logits and draft ids of the selector's candidates, best first."""
        # Of a matrix: XLA sorts the whole vocabulary of an array of three dimensions on TPUs.
        best, ids = jax.lax.top_k(logits.reshape(-1, logits.shape[-1]), self.config.selector_top_k)
        return best.reshape(*logits.shape[:-1], -1), ids.reshape(*logits.shape[:-1], -1)

    def candidates(self, states: Float[Array, "b s h"], k: int) -> Any:
        return (states, *vocabulary_top_k(states, self.output_rows, self.config.selector_top_k))

    def best(
        self, candidates: Any, row: int, before: Int[Array, "b m"], k: int
    ) -> tuple[Float[Array, "b m k"], Int[Array, "b m k"]]:
        """See `DFlash`: of the selector's candidates alone, over which the probabilities are normalised."""
        states, scores, ids = (jnp.broadcast_to(x[:, row, None], (*before.shape, x.shape[-1])) for x in candidates)
        best, place = top_k_of_logits(self.candidate_scores(scores, ids, states, before), k)
        return best, jnp.take_along_axis(ids, place, axis=-1)

    def adjusted(
        self, logits: Float[Array, "*batch dv"], states: Float[Array, "*batch h"], before: Int[Array, "*batch"]
    ) -> Float[Array, "*batch dv"]:
        """See `DFlash`: the selector's scores of the best candidates, -inf for the others."""
        best, candidates = self.best_of(logits)
        scores = self.candidate_scores(best, candidates, states, before)
        none = jnp.full_like(logits, -jnp.inf)
        return jnp.put_along_axis(none, candidates, scores, axis=-1, inplace=False)
