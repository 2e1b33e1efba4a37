"""A live draft vocabulary: tokens of the traffic replace tokens that the traffic does not have.

A head cannot draft what its draft vocabulary lacks, however long it learns. A new token's rows are computed from the
target's row, by the linear map that fits the other tokens best. They draft at once, and learn on from there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Int32, Integer

from eagle3_jax.mesh import parameter_path, shardings
from eagle3_jax.training.fsdp import TRAINED_SHARDING_RULES
from eagle3_jax.training.state import TrainState

# Ridge of the fit, as a share of the mean square of the target's rows.
_RIDGE = 1e-3
# Steps of conjugate gradients at most: products alone, that compile in seconds at any size.
_ITERATIONS = 100


def renewed(
    token_ids: Int32[np.ndarray, " dv"], counts: Integer[np.ndarray, " v"], ends: Iterable[int]
) -> Int32[np.ndarray, " dv"]:
    """Gives every token of the answers a place in the draft vocabulary, the most frequent ones first.

    Tokens that no answer has leave, but for its ends; those of the highest ids first: the tokenizer learnt them last.
    `counts` tells how often each of the target's tokens stands in the answers; both vocabularies ascend.
    """
    answered = np.flatnonzero(counts)
    missing = np.setdiff1d(answered, token_ids)
    missing = missing[np.argsort(-counts[missing], kind="stable")]
    free = np.setdiff1d(token_ids, [*answered, *ends])[::-1]
    count = min(len(missing), len(free))
    return np.union1d(np.setdiff1d(token_ids, free[:count]), missing[:count]).astype(np.int32)


def places(old: Int32[np.ndarray, " dv"], new: Int32[np.ndarray, " dv"]) -> Int32[np.ndarray, " dv"]:
    """Returns each new draft token's place in the old vocabulary, -1 where it has none."""
    at = np.searchsorted(old, new).clip(max=len(old) - 1)
    return np.where(old[at] == new, at, -1).astype(np.int32)


def make_move(names: Sequence[str], mesh: Mesh) -> jax.stages.Wrapped:
    """Makes the jitted step that moves a head to another draft vocabulary; `names` of it have a row for each token.

    It takes the state, `places`, and the target's LM head at the old vocabulary and at the new one. Tokens keep their
    rows and moments; a new token's moments are zero. A move counts as a step, so that a checkpoint can follow.
    """

    @jax.jit
    def move(
        state: TrainState, places: Int[Array, " dv"], old: Float[Array, "dv h"], new: Float[Array, "dv h"]
    ) -> TrainState:
        inputs, stays = _with_one(old), (places >= 0)[:, None]

        def rows(path: tuple[Any, ...], leaf: Array) -> Array:
            *_, name = (found := parameter_path(path)).split("/")
            if name not in names:
                return leaf
            fresh: Array | float = 0.0
            if found.startswith("head/"):
                fresh = _with_one(new) @ _fitted(inputs, leaf)
            return jnp.where(stays, leaf[jnp.maximum(places, 0)], fresh)

        with jax.default_matmul_precision("highest"):
            moved = jax.tree_util.tree_map_with_path(rows, state)
        moved = dataclasses.replace(moved, step=state.step + 1)
        return jax.lax.with_sharding_constraint(moved, shardings(moved, mesh, TRAINED_SHARDING_RULES))

    return move


def _fitted(inputs: Float[Array, "dv h1"], outputs: Float[Array, "dv f"]) -> Float[Array, "h1 f"]:
    gram = inputs.T @ inputs
    gram += _RIDGE * jnp.trace(gram) / len(gram) * jnp.eye(len(gram))

    def column(moments: Float[Array, " h1"]) -> Float[Array, " h1"]:
        solved, _ = jax.scipy.sparse.linalg.cg(lambda x: gram @ x, moments, maxiter=_ITERATIONS)
        return solved

    return jax.vmap(column, in_axes=1, out_axes=1)(inputs.T @ outputs)


def _with_one(rows: Float[Array, "dv h"]) -> Float[Array, "dv h1"]:
    return jnp.concatenate([rows.astype(jnp.float32), jnp.ones((len(rows), 1))], axis=1)
