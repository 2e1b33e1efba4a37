"""Sharding of the training state (FSDP), and loops whose weights are gathered once, before them.

Weights and moments are split over the data axis too (FSDP). Left to the partitioner, a loop gathers each weight in
every iteration, and sums each gradient over the data axis in every iteration of the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array

from eagle3_jax.mesh import shardings

STATE_SHARDING_RULES = (
    (r"lm_head|markov_(in|out)|predecessors|successors", P(("model", "data"), None)),
    (r"expert_(gate|up)$", P(None, "data", "model")),
    (r"expert_down$", P(None, "model", "data")),
    (r"attention/(qkv|q|q_up)$|layers/\d+/(q|kv)$|(mlp|shared)/(gate|up)$|(^|/)fc$|taps$", P("data", "model")),
    (r"attention/o$|layers/\d+/o$|(mlp|shared)/down$", P("model", "data")),
    (r"attention/(q|kv)_down$|selector$", P("data", None)),
    (r"attention/kv_up$", P("model", None, "data")),
)


def on_own_rows(function: Callable[..., Array], head: Any, rows: Sequence[Array], dtype: Any) -> Array:
    """Calls `function(head, *rows)` with the rows of each data shard, and the whole head gathered once.

    The backward pass sums gradients over the data axis once, in float32. Tables of a row per token are not gathered,
    and `function` must not read them.

    Args:
        rows: split over the data axis by their first dimension.
        dtype: dtype in which weights are gathered and read.

    Returns:
        The result [steps, rows, ...], split as the rows.
    """
    mesh = jax.sharding.get_abstract_mesh()
    ways = mesh.shape.get("data", 1)
    if ways == 1 or rows[0].shape[0] % ways:
        return function(head, *rows)
    leaves, structure = jax.tree.flatten(head)
    specs = [where.spec for where in jax.tree.leaves(shardings(head, mesh, STATE_SHARDING_RULES))]
    read = [i for i, spec in enumerate(specs) if ("model", "data") not in spec]

    def local(copies: list[Array], *own: Array) -> Array:
        whole: list[Any] = [jnp.zeros(())] * len(leaves)
        for i, copy in zip(read, copies, strict=True):
            whole[i] = copy[0]
        return function(jax.tree.unflatten(structure, whole), *own)

    return jax.shard_map(
        local, mesh=mesh, axis_names={"data"}, in_specs=P("data"), out_specs=P(None, "data"), check_vma=False
    )([_copies(specs[i], jnp.dtype(dtype), leaves[i]) for i in read], *rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _copies(spec: P, dtype: Any, weight: Array) -> Array:
    """Copies a weight to each data shard, [shards, *weight]; gathered over data, split over the model axis.

    The gradient is the sum over the copies, in float32.

    Args:
        spec: the weight's partition.
    """

    def gather(share: Array) -> Array:
        if "data" not in spec:
            return share[None]
        whole = jax.lax.all_gather(share.astype(dtype), "data", axis=spec.index("data"), tiled=True)
        return whole.astype(share.dtype)[None]

    return _on_shares(gather, spec, _of_copies(spec))(weight)


def _forward(spec: P, dtype: Any, weight: Array) -> tuple[Array, None]:
    return _copies(spec, dtype, weight), None


def _backward(spec: P, dtype: Any, saved: None, cotangents: Array) -> tuple[Array]:
    def add(cotangent: Array) -> Array:
        if "data" not in spec:
            return jax.lax.psum(cotangent[0], "data")
        return jax.lax.psum_scatter(cotangent[0], "data", scatter_dimension=spec.index("data"), tiled=True)

    return (_on_shares(add, _of_copies(spec), spec)(cotangents),)


_copies.defvjp(_forward, _backward)


def _of_copies(spec: P) -> P:
    return P("data", *("model" if entry == "model" else None for entry in spec))


def _on_shares(function: Callable[[Array], Array], given: P, result: P) -> Callable[[Array], Array]:
    """Runs on each device's share: the partitioner would not split what explicit collectives read."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.shard_map(function, mesh=mesh, in_specs=given, out_specs=result, check_vma=False)
