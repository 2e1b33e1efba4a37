"""Where the training state lies on a mesh, and loops whose weights are gathered once, in front of them.

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
        dtype: in which weights are read, and travel.

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
    split = {i: specs[i].index("data") for i in read if "data" in specs[i]}

    def local(shares: list[Array], *own: Array) -> Array:
        gathered: list[Any] = [jnp.zeros(())] * len(leaves)
        for i, share in zip(read, shares, strict=True):
            gathered[i] = _gathered(split[i], jnp.dtype(dtype), share) if i in split else share
        return function(jax.tree.unflatten(structure, gathered), *own)

    return jax.shard_map(
        local,
        mesh=mesh,
        axis_names={"data"},
        in_specs=([P(*[None] * split[i], "data") if i in split else P() for i in read], *[P("data")] * len(rows)),
        out_specs=P(None, "data"),
        check_vma=False,
    )([leaves[i] for i in read], *rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(axis: int, dtype: Any, share: Array) -> Array:
    """The whole of a weight that lies split along a dimension; what travels has `dtype`, gradients are float32."""
    return jax.lax.all_gather(share.astype(dtype), "data", axis=axis, tiled=True).astype(share.dtype)


def _forward(axis: int, dtype: Any, share: Array) -> tuple[Array, None]:
    return _gathered(axis, dtype, share), None


def _backward(axis: int, dtype: Any, saved: None, cotangent: Array) -> tuple[Array]:
    return (jax.lax.psum_scatter(cotangent, "data", scatter_dimension=axis, tiled=True),)


_gathered.defvjp(_forward, _backward)
