"""The gated delta rule as products: all tokens of a chunk, or all nodes of a tree, by one unit-triangular system.

With A[i, j] whether i sees j (itself included), G_i the sum of the decays that i sees, D = A * e^(G_i - G_j):
(I + diag(beta) strict(D) * K K^T) U = diag(beta) (V - diag(e^G) K S); outputs are diag(e^G) Q S + (D * Q K^T) U.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

CHUNK = 64  # tokens of a prompt that are one system
_HIGHEST = jax.lax.Precision.HIGHEST


class Tokens(NamedTuple):
    """Tokens in order, or nodes of a tree, float32.

    Attributes:
        queries, keys: of unit length, queries scaled.
        decays: the logarithm g, at most 0. A token with a decay of 0 and a beta of 0 changes no state.
    """

    queries: Float[Array, "b t k d_k"]
    keys: Float[Array, "b t k d_k"]
    values: Float[Array, "b t n d_v"]
    decays: Float[Array, "b t n"]
    betas: Float[Array, "b t n"]


def chain(
    tokens: Tokens, states: Float[Array, "b n d_k d_v"], begins: Bool[Array, "b t"]
) -> tuple[Float[Array, "b t n d_v"], Float[Array, "b n d_k d_v"]]:
    """See `api.chain`."""
    b, t = begins.shape
    size = min(CHUNK, t)

    def chunks(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, -t % size), *((0, 0),) * (x.ndim - 2)))
        return padded.reshape(b, -1, size, *x.shape[2:]).swapaxes(0, 1)

    def chunk(states: Array, of: tuple[Tokens, Array]) -> tuple[Array, Array]:
        tokens, begins = of
        documents = jnp.cumsum(begins, axis=1)
        sees = jnp.tril(documents[:, :, None] == documents[:, None])
        states, outputs, _ = _solved(tokens, states, sees, documents == 0)
        return states, outputs

    states, outputs = jax.lax.scan(chunk, states, jax.tree.map(chunks, (tokens, begins)))
    return outputs.swapaxes(0, 1).reshape(b, -1, *outputs.shape[3:])[:, :t], states


def tree(
    tokens: Tokens, states: Float[Array, "b n d_k d_v"], mask: Bool[Array, "b t t"]
) -> tuple[Float[Array, "b t n d_v"], Float[Array, "b t n d_v"]]:
    """See `api.tree`."""
    goes_on = jnp.ones(mask.shape[:2], bool)
    _, outputs, updates = _solved(tokens, states, mask, goes_on)
    return outputs, updates


def fold(
    states: Float[Array, "b n d_k d_v"],
    keys: Float[Array, "b p k d_k"],
    updates: Float[Array, "b p n d_v"],
    decays: Float[Array, "b p n"],
    counts: Int[Array, " b"],
) -> Float[Array, "b n d_k d_v"]:
    """See `api.fold`."""
    taken = (jnp.arange(keys.shape[1])[None] < counts[:, None])[:, :, None]
    decays, updates = jnp.where(taken, decays, 0), jnp.where(taken[..., None], updates, 0)
    total = decays.sum(axis=1)
    behind = jnp.exp(total[:, None] - jnp.cumsum(decays, axis=1))
    keys = jnp.repeat(keys, states.shape[1] // keys.shape[2], axis=2)
    added = jnp.einsum("bpnk,bpnv->bnkv", keys * behind[..., None], updates, precision=_HIGHEST)
    return states * jnp.exp(total)[..., None, None] + added


def _solved(
    tokens: Tokens, states: Float[Array, "b n d_k d_v"], sees: Bool[Array, "b t t"], goes_on: Bool[Array, "b t"]
) -> tuple[Float[Array, "b n d_k d_v"], Float[Array, "b t n d_v"], Float[Array, "b t n d_v"]]:
    """Returns the states behind the last token, outputs and updates.

    `goes_on`: whether a token stands behind the states, or behind a document's beginning.
    """
    _, _, values, decays, betas = tokens

    def product(form: str, *operands: Array) -> Array:
        return jnp.einsum(form, *operands, precision=_HIGHEST)

    queries, keys = (jnp.repeat(x, values.shape[2] // x.shape[2], axis=2) for x in tokens[:2])
    total = product("bij,bjn->bni", sees.astype(jnp.float32), decays)
    gaps = jnp.where(sees[:, None], total[..., :, None] - total[..., None, :], 0)
    decay = jnp.where(sees[:, None], jnp.exp(gaps), 0)
    since = jnp.where(goes_on[:, None], jnp.exp(total), 0)  # of the state in front, [b, n, t]
    strict = jnp.tril(decay * product("binc,bjnc->bnij", keys, keys), -1) * betas.swapaxes(1, 2)[..., None]
    before = product("binc,bncv->bniv", keys, states) * since[..., None]
    right = (values.swapaxes(1, 2) - before) * betas.swapaxes(1, 2)[..., None]
    updates = jax.scipy.linalg.solve_triangular(strict, right, lower=True, unit_diagonal=True)
    inside = product("bnij,bnjv->bniv", decay * product("binc,bjnc->bnij", queries, keys), updates)
    outputs = product("binc,bncv->bniv", queries, states) * since[..., None] + inside
    added = product("bjnc,bnj,bnjv->bncv", keys, decay[:, :, -1], updates)
    states = states * since[:, :, -1, None, None] + added
    return states, outputs.swapaxes(1, 2), updates.swapaxes(1, 2)
