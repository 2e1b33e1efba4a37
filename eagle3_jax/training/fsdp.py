"""Sharding of the training state (FSDP), and loops whose weights are gathered once, before them.

Weights and moments are split over the data axis too. Left to the partitioner, a loop would gather each weight, and sum
each gradient, over all chips of a pod in every iteration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array

from eagle3_jax.mesh import shardings

TRAINED_SHARDING_RULES = (
    (r"lm_head|markov_(in|out)|predecessors|successors", P(("model", "data"), None)),
    (r"expert_(gate|up)$", P(None, "data", "model")),
    (r"expert_down$", P(None, "model", "data")),
    (r"attention/(qkv|q|q_up)$|layers/\d+/(q|kv)$|(mlp|shared)/(gate|up)$|(^|/)fc$|taps$", P("data", "model")),
    (r"attention/o$|layers/\d+/o$|(mlp|shared)/down$", P("model", "data")),
    (r"attention/(q|kv)_down$|selector$", P("data", None)),
    (r"attention/kv_up$", P("model", None, "data")),
)


def on_own_rows(
    f: Callable[..., Any], weights: Any, rows: Any, dtype: Any, *, frozen: Any = (), tables: bool = True, axis: int = 0
) -> Any:
    """Calls `f(weights, rows, frozen)` with the rows of each data shard, and whole weights gathered once.

    The backward pass sums the weights' gradients over the data axis once, in float32. Weights are split over it by
    `TRAINED_SHARDING_RULES`, and gathered in `dtype`; `f` reads tables of a row per token only with `tables`. Rows are
    split by dimension `axis`, `frozen` arrays are whole. Results [x, rows, ...] are split as the rows.
    """
    mesh = jax.sharding.get_abstract_mesh()
    ways = mesh.shape.get("data", 1)
    if ways == 1 or any(x.shape[axis] % ways for x in jax.tree.leaves(rows)):
        return f(weights, rows, frozen)
    leaves, structure = jax.tree.flatten(weights)
    specs = [where.spec for where in jax.tree.leaves(shardings(weights, mesh, TRAINED_SHARDING_RULES))]
    read = [i for i, spec in enumerate(specs) if tables or ("model", "data") not in spec]

    def local(copies: list[Array], own: Any, frozen: Any) -> Any:
        whole: list[Any] = [jnp.zeros(())] * len(leaves)
        for i, copy in zip(read, copies, strict=True):
            whole[i] = copy[0]
        return f(jax.tree.unflatten(structure, whole), own, frozen)

    places = {"in_specs": (P("data"), P(*[None] * axis, "data"), P()), "out_specs": P(None, "data")}
    run = jax.shard_map(local, mesh=mesh, axis_names={"data"}, check_vma=False, **places)
    return run([_copies(specs[i], jnp.dtype(dtype), leaves[i]) for i in read], rows, frozen)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _copies(spec: P, dtype: Any, weight: Array) -> Array:
    """Copies a weight to each data shard, [shards, *weight]; the gradient is the sum over the copies, in float32."""

    def gather(share: Array) -> Array:
        if (axis := _over_data(spec)) is None:
            return share[None]
        whole = jax.lax.all_gather(share.astype(dtype), "data", axis=axis, tiled=True)
        return whole.astype(share.dtype)[None]

    return _on_shares(gather, spec, _of_copies(spec))(weight)


def _forward(spec: P, dtype: Any, weight: Array) -> tuple[Array, None]:
    return _copies(spec, dtype, weight), None


def _backward(spec: P, dtype: Any, saved: None, cotangents: Array) -> tuple[Array]:
    def add(cotangent: Array) -> Array:
        if (axis := _over_data(spec)) is None:
            return jax.lax.psum(cotangent[0], "data")
        return jax.lax.psum_scatter(cotangent[0], "data", scatter_dimension=axis, tiled=True)

    return (_on_shares(add, _of_copies(spec), spec)(cotangents),)


_copies.defvjp(_forward, _backward)


def _over_data(spec: P) -> int | None:
    return next((i for i, entry in enumerate(spec) if "data" in _axes(entry)), None)


def _of_copies(spec: P) -> P:
    return P("data", *("model" if "model" in _axes(entry) else None for entry in spec))


def _axes(entry: Any) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else (entry,)


def _on_shares(function: Callable[[Array], Array], given: P, result: P) -> Callable[[Array], Array]:
    """Runs on each device's share: the partitioner would not split what explicit collectives read."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.shard_map(function, mesh=mesh, in_specs=given, out_specs=result, check_vma=False)
