"""Commit: moves the accepted path of a draft tree to the front of the tail, in the caches of all layers at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Int

from eagle3_jax.kernels.cache import xla
from eagle3_jax.kernels.dispatch import Implementation, choose


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
        path: int32 indices into the tail, ascending; the last may be repeated.
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
        from eagle3_jax.kernels.cache import tpu

        return tpu.commit(caches, lengths, path, page_table, interpret=interpret)
    return tuple(xla.commit(cache, lengths, path, page_table) for cache in caches)
