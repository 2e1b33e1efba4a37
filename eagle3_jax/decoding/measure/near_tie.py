"""Near-ties: greedy answers that differ from vanilla decoding's by rounding alone.

The rounding of a sum may depend on the shape of the pass: in verification of several tokens two almost equal tokens may
change places. A recomputation compares their logits' difference with the rounding at this position.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.linear.layouts import dense
from eagle3_jax.mesh import fetch, mesh_of, mesh_set
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.target import TargetModel

_STEP = 64  # prefixes are padded to its multiples, so that few programs are compiled


@dataclasses.dataclass(frozen=True)
class NearTie:
    """The gap between a chosen token's logit and the best one, in float32."""

    gap: float  # from the lower of the two chosen tokens to the best token of all
    # Twice the largest rounding of a logit at this position, over all tokens: one token may rise by it and another
    # fall. The rounding is the distance of a pass over the last token alone to one over all tokens in float32.
    bound: float


def near_tie(target: TargetModel, prefix: Sequence[int], tokens: tuple[int, int]) -> NearTie | None:
    """Measures the gap of two tokens that may both be the argmax after a prefix, within rounding; None if not."""
    padded = np.zeros((1, -(-len(prefix) // _STEP) * _STEP), np.int32)
    padded[0, : len(prefix)] = prefix
    with mesh_set(mesh_of(target.embed[...])):
        rounded, exact = (
            np.asarray(fetch(_logits(model, jnp.asarray(padded), jnp.int32(len(prefix) - 1), alone)), np.float64)
            for model, alone in ((target, True), (_in_float32(target), False))
        )
    gap, bound = exact.max() - min(exact[list(tokens)]), 2 * np.abs(rounded - exact).max()
    return NearTie(float(gap), float(bound)) if gap <= bound else None


@functools.partial(jax.jit, static_argnums=3)
def _logits(target: TargetModel, tokens: Int[Array, "1 t"], last: Int[Array, ""], alone: bool) -> Float[Array, " v"]:
    """Computes the logits behind position `last`, read `alone` as by vanilla decoding, or as one of several rows."""
    positions = jnp.arange(tokens.shape[1])[None]
    whole = Pass(positions, jnp.zeros(1, jnp.int32), counts=last[None])
    hidden, _, cache = target(tokens, whole, target.empty_cache(1, tokens.shape[1]))
    if alone:
        hidden, _, _ = target(tokens[:, last][None], Pass(last[None, None], last[None]), cache)
        return target.logits(hidden)[0, 0]
    return target.logits(hidden[:, last - jnp.arange(2)])[0, 0]


def _in_float32(target: TargetModel) -> TargetModel:
    """Returns the same weights; activations follow the embeddings' dtype, so only the embeddings are copied."""
    graph, parameters = nnx.split(target)
    twin = nnx.merge(graph, parameters)
    twin.embed = nnx.Param(dense(target.embed[...]).astype(jnp.float32))
    return twin
