"""Was it a near-tie? What explains a greedy answer in bfloat16 that differs from vanilla decoding's.

A sum in bfloat16 is rounded as the shape of the pass has it, so verification of several tokens and a step of one token
give logits that differ by rounding, and two tokens that are closer than that may change places. Both are computed once
more by a common recomputation, and the difference of their logits is compared with what rounding does there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.mesh import fetch, mesh_of, mesh_set
from eagle3_jax.models.target import TargetModel

_STEP = 64  # prefixes are padded to multiples of it, so that few programs are compiled


@dataclasses.dataclass(frozen=True)
class NearTie:
    """Logits of a token that was chosen and the best one, in float32.

    Attributes:
        gap: how far the lower of the two chosen tokens lies below the best of all.
        bound: twice the largest error of a bfloat16 logit at this position, of any token: one token may rise by it and
            another fall.
    """

    gap: float
    bound: float


def near_tie(target: TargetModel, prefix: Sequence[int], tokens: tuple[int, int]) -> NearTie | None:
    """Whether both tokens may be the argmax behind a prefix, within rounding; None when they may not.

    In float32 nothing is a near-tie: there the tokens must be the same. Of several processes that share the target all
    ask the same, and get the same answer.
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
    """Logits of the token behind position `last`, by one pass over the whole sequence."""
    positions = jnp.arange(tokens.shape[1])[None]
    hidden, _, _ = target(tokens, positions, target.empty_cache(1, tokens.shape[1]), jnp.zeros(1, jnp.int32))
    return target.logits(hidden[:, last])[0]


def _in_float32(target: TargetModel) -> TargetModel:
    """The same weights; activations follow the embeddings' dtype, so that only those are copied."""
    graph, parameters = nnx.split(target)
    twin = nnx.merge(graph, parameters)
    twin.embed = nnx.Param(target.embed[...].astype(jnp.float32))
    return twin
