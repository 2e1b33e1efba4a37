"""Caches change in two ways without attention: entries are appended, and an accepted path moves to the tail's front."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.cache import tpu, xla
from eagle3_jax.kernels.dispatch import Implementation, choose
from eagle3_jax.kernels.tree_attention.packed_heads import pack_heads


def append(
    cache: Array, new: Float[Array, "b t k d"], at: Int[Array, " b"], page_table: Int[Array, "b pages"] | None = None
) -> Array:
    """Writes t entries of each sequence from slot `at` on, into the keys or the values of one layer.

    Args:
        cache: contiguous or pages, as of `tree_attention`; donated, it is written in place.
        page_table: int32, the page of each page_size slots.
    """
    new = new.swapaxes(1, 2)
    if (cache.shape[1], cache.shape[3]) != (new.shape[1], new.shape[3]):
        new = pack_heads(new, cache.shape[1], cache.shape[3])
    return xla.write(cache, new, at, page_table)


def commit(
    caches: Sequence[Array],
    lengths: Int[Array, " b"],
    path: Int[Array, "b p"],
    *,
    page_table: Int[Array, "b pages"] | None = None,
    implementation: Implementation | None = None,
    interpret: Any = False,
) -> tuple[Array, ...]:
    """Moves slot length + path[j] to slot length + j; all other slots are unchanged.

    Args:
        caches: keys and values of every layer, all of one shape and dtype: [b, k, slots, d], contiguous; with a page
            table [pages, k, page_size, d]. Donated caches are written in place.
        lengths: int32, committed tokens of each sequence; length + p must not exceed the slots.
        path: int32 indices into the tail, ascending; neighbours may be equal.
        page_table: int32, the page of each page_size slots; entries beyond the tail may hold anything.
        implementation: the default is "pallas" on a TPU, one kernel for all layers, and "xla" elsewhere, a gather and a
            loop over the sequences for each layer.
        interpret: runs the Pallas kernel without a TPU; `pltpu.InterpretParams` included.

    Raises:
        ValueError: caches of different shapes or dtypes.
    """
    forms = {(cache.shape, cache.dtype) for cache in caches}
    if len(forms) != 1:
        raise ValueError(f"caches: got {forms}, expected one shape and dtype")
    if choose(implementation, pallas=True) == "pallas":
        return tpu.commit(caches, lengths, path, page_table, interpret=interpret)
    return tuple(xla.commit(cache, lengths, path, page_table) for cache in caches)
