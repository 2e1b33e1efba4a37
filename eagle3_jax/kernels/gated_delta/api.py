"""The gated delta rule (https://arxiv.org/abs/2412.06464) over a prompt, and over the nodes of a draft tree.

A value head's state S [d_k, d_v] moves on by S <- e^g S; u = beta (v - S^T k); S <- S + k u^T, and its output is S^T q.
Value head h reads key head h // (value heads / key heads). All is float32.

A tree keeps no state per node: its nodes' keys, updates u and decays g are enough to `fold` the accepted path. On a CPU
all three do the same operations in the same order, so that a node's output, and the state behind a path, are to the bit
those of the same tokens in a row. Elsewhere a tree, and each chunk of a prompt, is one unit-triangular system under the
ancestor mask, which sums in another order. On a TPU a kernel solves it, where heads have 128 numbers.

States are [slots, value heads, d_k, d_v], and a row names its slot; out of range it reads any, and writes none. Slots
of None are the rows' own, which a mesh's data axis may split with them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.kernels.dispatch import Implementation, choose, device, over_mesh
from eagle3_jax.kernels.gated_delta import cpu, solve, walk
from eagle3_jax.kernels.gated_delta.solve import Tokens
from eagle3_jax.kernels.tpu.registers import LANES

# How a mesh splits tokens, states, and what a row has.
_TOKENS, _STATES, _ROWS = P("data", None, "model"), P("data", "model"), P("data")


def chain(
    tokens: Tokens,
    states: Float[Array, "s n d_k d_v"],
    slots: Int[Array, " b"] | None,
    begins: Bool[Array, "b t"],
    kept: Bool[Array, " b"],
    *,
    follows: Bool[Array, " b"] | None = None,
    implementation: Implementation | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "b t n d_v"], Float[Array, "s n d_k d_v"]]:
    """Reads tokens in order. Returns outputs, and all states.

    Args:
        begins: whether a document begins with a token: no state before it counts.
        kept: whether the state behind a row's last token is written to its slot.
        follows: whether a row goes on where the row before it ends; None: no row does.
        implementation: the default is "cpu" on a CPU where its kernel knows the sizes, "pallas" on a TPU for heads of
            128 numbers, "xla" elsewhere.
        interpret: runs the Pallas kernel without a TPU; `pltpu.InterpretParams` included.
    """
    chosen = _chosen(implementation, states, pallas=True)
    if chosen == "cpu":
        operands = tokens, states, slots, begins, kept, jnp.zeros_like(kept) if follows is None else follows
        specs = _TOKENS, _STATES, _ROWS, _ROWS, _ROWS, _ROWS
        return over_mesh(cpu.chain, operands, specs, (_TOKENS, _STATES), _sizes(tokens.keys, slots))
    read, own = _reader("chain", chosen, interpret), _of(states, slots)
    if follows is None:
        outputs, own = read(tokens, own, begins)
    else:

        def row(before: Array, of: Any) -> tuple[Array, tuple[Array, Array]]:
            tokens, state, begin, goes_on = jax.tree.map(lambda x: x[None], of)
            outputs, state = read(tokens, jnp.where(goes_on[:, None, None, None], before, state), begin)
            return state, (outputs[0], state[0])

        _, (outputs, own) = jax.lax.scan(row, jnp.zeros_like(own[:1]), (tokens, own, begins, follows))
    return outputs, _written(states, slots, own, kept)


def tree(
    tokens: Tokens,
    states: Float[Array, "s n d_k d_v"],
    slots: Int[Array, " b"] | None,
    mask: Bool[Array, "b t t"] | None,
    *,
    implementation: Implementation | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "b t n d_v"], Float[Array, "b t n d_v"]]:
    """Reads the nodes of a tree, each behind its ancestors. Returns outputs, and the updates u.

    Args:
        mask: which nodes each one sees: its ancestors, which stand before it, and itself. None: they are a chain.
        implementation, interpret: see `chain`; the Pallas kernel reads trees of up to 64 nodes.
    """
    b, t, _ = tokens.betas.shape
    if mask is None:
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((t, t), bool)), (b, t, t))
    chosen = _chosen(implementation, states, pallas=t <= solve.CHUNK)
    if chosen == "cpu":
        operands = tokens, states, slots, walk.parents(mask)
        specs = _TOKENS, _STATES, _ROWS, _ROWS
        return over_mesh(cpu.tree, operands, specs, (_TOKENS, _TOKENS), _sizes(tokens.keys, slots))
    return _reader("tree", chosen, interpret)(tokens, _of(states, slots), mask)


def fold(
    states: Float[Array, "s n d_k d_v"],
    slots: Int[Array, " b"] | None,
    keys: Float[Array, "b p k d_k"],
    updates: Float[Array, "b p n d_v"],
    decays: Float[Array, "b p n"],
    counts: Int[Array, " b"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "s n d_k d_v"]:
    """Moves states on by the first `counts` nodes of a path; all others are as they were."""
    if _chosen(implementation, states) == "cpu":
        operands = states, slots, keys, updates, decays, counts
        specs = _STATES, _ROWS, _TOKENS, _TOKENS, _TOKENS, _ROWS
        return over_mesh(cpu.fold, operands, specs, _STATES, _sizes(keys, slots))
    own = _form().fold(_of(states, slots), keys, updates, decays, counts)
    return _written(states, slots, own, counts > 0)


def _chosen(implementation: Implementation | None, states: Array, *, pallas: bool = False) -> Implementation:
    pallas = pallas and states.shape[2:] == (LANES, LANES)
    return choose(implementation, cpu=cpu.supports(states.shape[3]), pallas=pallas)


def _reader(name: str, chosen: Implementation, interpret: Any) -> Callable[..., Any]:
    if chosen == "xla":
        return getattr(_form(), name)
    from eagle3_jax.kernels.gated_delta import tpu

    return functools.partial(getattr(tpu, name), interpret=interpret)


def _form() -> Any:
    return walk if device().platform == "cpu" else solve


def _of(states: Float[Array, "s n d_k d_v"], slots: Int[Array, " b"] | None) -> Float[Array, "b n d_k d_v"]:
    return states if slots is None else jnp.take(states, slots, axis=0, mode="clip")


def _written(states: Array, slots: Array | None, own: Array, kept: Bool[Array, " b"]) -> Array:
    if slots is None:
        return jnp.where(kept[:, None, None, None], own, states)
    return states.at[jnp.where(kept, slots, len(states))].set(own, mode="drop")


def _sizes(keys: Array, slots: Array | None) -> dict[str, int]:
    return {"model": keys.shape[2]} | ({"data": len(keys)} if slots is None else {})
