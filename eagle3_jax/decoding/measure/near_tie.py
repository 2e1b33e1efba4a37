"""Near-ties: greedy answers in bfloat16 that differ from vanilla decoding's by rounding alone.

The rounding of a bfloat16 sum depends on the shape of the pass. So verification of several tokens and a step of one
token give slightly different logits, and two almost equal tokens may change places. One common recomputation gives both
tokens' logits again, and their difference is compared with the rounding at this position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.linear.layouts import dense
from eagle3_jax.mesh import fetch, mesh_of, mesh_set
from eagle3_jax.models.target import TargetModel

_STEP = 64  # prefixes are padded to its multiples, so that few programs are compiled


@dataclasses.dataclass(frozen=True)
class NearTie:
    """The gap between a chosen token's logit and the best one, in float32.

    Attributes:
        gap: distance from the lower of the two chosen tokens to the best token of all.
        bound: twice the largest error of a bfloat16 logit at this position, over all tokens: one token may rise by it
            and another fall.
    """

    gap: float
    bound: float


def near_tie(target: TargetModel, prefix: Sequence[int], tokens: tuple[int, int]) -> NearTie | None:
    """Measures the gap of two tokens that may both be the argmax after a prefix, within rounding; None if not.

    In float32 there are no near-ties: the tokens must be equal. Processes that share a target all call this, and get
    the same answer.
    """
    if target.embed[...].dtype == jnp.float32:
        return None
    padded = np.zeros((1, -(-len(prefix) // _STEP) * _STEP), np.int32)
    padded[0, : len(prefix)] = prefix
    with mesh_set(mesh_of(target.embed[...])):
        rounded, exact = (
            np.asarray(fetch(_logits(model, jnp.asarray(padded), jnp.int32(len(prefix) - 1))), np.float64)
            for model in (target, _in_float32(target))
        )
    gap, bound = exact.max() - min(exact[list(tokens)]), 2 * np.abs(rounded - exact).max()
    return NearTie(float(gap), float(bound)) if gap <= bound else None


@jax.jit
def _logits(target: TargetModel, tokens: Int[Array, "1 t"], last: Int[Array, ""]) -> Float[Array, " v"]:
    """Computes the logits of the token after position `last`, by one pass over the whole sequence."""
    positions = jnp.arange(tokens.shape[1])[None]
    hidden, _, _ = target(tokens, positions, target.empty_cache(1, tokens.shape[1]), jnp.zeros(1, jnp.int32))
    return target.logits(hidden[:, last])[0]


def _in_float32(target: TargetModel) -> TargetModel:
    """Returns the same weights; activations follow the embeddings' dtype, so only the embeddings are copied."""
    graph, parameters = nnx.split(target)
    twin = nnx.merge(graph, parameters)
    twin.embed = nnx.Param(dense(target.embed[...]).astype(jnp.float32))
    return twin
