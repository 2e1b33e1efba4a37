"""The gated delta rule token by token: every state is its parent's, moved on by one and the same step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.kernels.gated_delta.solve import Tokens


def chain(
    tokens: Tokens, states: Float[Array, "b n d_k d_v"], begins: Bool[Array, "b t"]
) -> tuple[Float[Array, "b t n d_v"], Float[Array, "b n d_k d_v"]]:
    """See `api.chain`."""

    def token(state: Array, of: tuple[Tokens, Array]) -> tuple[Array, Array]:
        one, begin = of
        state, _, output = _step(jnp.where(begin[:, None, None, None], 0, state), one)
        return state, output

    states, outputs = jax.lax.scan(token, states, _in_time((tokens, begins)))
    return outputs.swapaxes(0, 1), states


def tree(
    tokens: Tokens, states: Float[Array, "b n d_k d_v"], mask: Bool[Array, "b t t"]
) -> tuple[Float[Array, "b t n d_v"], Float[Array, "b t n d_v"]]:
    """See `api.tree`; the states of this layer's nodes live as long as the call."""
    t = mask.shape[1]
    every = jnp.zeros((t + 1, *states.shape), states.dtype).at[0].set(states)

    def node(every: Array, of: tuple[Array, Array, Tokens]) -> tuple[Array, tuple[Array, Array]]:
        index, parent, own = of
        before = jax.vmap(lambda states, place: states[place], in_axes=(1, 0))(every, parent)
        state, update, output = _step(before, own)
        return jax.lax.dynamic_update_index_in_dim(every, state, index, 0), (output, update)

    _, (outputs, updates) = jax.lax.scan(node, every, (jnp.arange(1, t + 1), *_in_time((parents(mask), tokens))))
    return outputs.swapaxes(0, 1), updates.swapaxes(0, 1)


def parents(mask: Bool[Array, "b t t"]) -> Int[Array, "b t"]:
    """Returns each node's parent, the last of its ancestors, as an index plus one; 0: it stands behind the text."""
    t = mask.shape[1]
    return jnp.max(jnp.where(jnp.tril(mask, -1), jnp.arange(1, t + 1, dtype=jnp.int32)[None, None], 0), axis=-1)


def fold(
    states: Float[Array, "b n d_k d_v"],
    keys: Float[Array, "b p k d_k"],
    updates: Float[Array, "b p n d_v"],
    decays: Float[Array, "b p n"],
    counts: Int[Array, " b"],
) -> Float[Array, "b n d_k d_v"]:
    """See `api.fold`."""

    def node(state: Array, of: tuple[Array, ...]) -> tuple[Array, None]:
        index, key, update, decay = of
        after = _written(_decayed(state, decay), _per_value_head(key, state), update)
        return jnp.where((index < counts)[:, None, None, None], after, state), None

    return jax.lax.scan(node, states, (jnp.arange(keys.shape[1]), *_in_time((keys, updates, decays))))[0]


def _in_time(of: Any) -> Any:
    """Puts the axis of tokens in front."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1), of)


def _step(state: Float[Array, "b n d_k d_v"], one: Tokens) -> tuple[Array, Array, Array]:
    """Returns the state behind a token, whose arrays have no axis of tokens; its update and its output."""
    query, key = _per_value_head(one.queries, state), _per_value_head(one.keys, state)
    state = _decayed(state, one.decays)
    update = (one.values - (state * key[..., None]).sum(axis=-2)) * one.betas[..., None]
    state = _written(state, key, update)
    return state, update, (state * query[..., None]).sum(axis=-2)


def _decayed(state: Float[Array, "b n d_k d_v"], decay: Float[Array, "b n"]) -> Float[Array, "b n d_k d_v"]:
    return jax.lax.optimization_barrier(state * jnp.exp(decay)[..., None, None])


def _written(
    state: Float[Array, "b n d_k d_v"], key: Float[Array, "b n d_k"], update: Float[Array, "b n d_v"]
) -> Float[Array, "b n d_k d_v"]:
    return jax.lax.optimization_barrier(state + key[..., None] * update[..., None, :])


def _per_value_head(x: Float[Array, "b k d"], state: Float[Array, "b n d_k d_v"]) -> Float[Array, "b n d"]:
    return jnp.repeat(x, state.shape[1] // x.shape[1], axis=1)
