"""Products with the rows of a vocabulary, and the best tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.dispatch import Implementation, choose, over_mesh, split_axes
from eagle3_jax.kernels.linear.api import multiply
from eagle3_jax.kernels.linear.layouts import Padded, Panels, Quantised
from eagle3_jax.kernels.vocabulary.lists import Lists, gathered, merged

LONGEST = 32  # tokens of the longest list that the TPU's kernel keeps in registers
_SPLIT = 1024  # tokens that are worth a collective; a block head's few candidates are not
_LEAST = -1e30  # rank of an impossible token, before one that was listed already
_HIGHEST = jax.lax.Precision.HIGHEST


def vocabulary_logits(
    x: Float[Array, "*batch h"], rows: Float[Array, "v h"] | Panels | Padded | Quantised
) -> Float[Array, "*batch v"]:
    """Computes x @ rows.T in float32. Rows are one per token, as embeddings are stored; panels hold their transpose."""

    def dense(x: Array, rows: Array) -> Array:
        rows = rows.astype(x.dtype)
        return jnp.einsum("mh,vh->mv", x, rows, precision=_HIGHEST, preferred_element_type=jnp.float32)

    return multiply(x.reshape(-1, x.shape[-1]), rows, dense).reshape(*x.shape[:-1], -1)


def capped(logits: Float[Array, "*batch v"], cap: float | None) -> Float[Array, "*batch v"]:
    """Bends logits so that none exceeds `cap`, which keeps their order; None leaves them."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def argmax(x: Float[Array, "*batch v"]) -> Int[Array, "*batch"]:
    """Returns the index of the maximum over the last axis, int32; the first of equal ones."""
    return jax.lax.platform_dependent(x, cpu=_argmax_of_blocks, default=lambda x: jnp.argmax(x, axis=-1)).astype(
        jnp.int32
    )


def _argmax_of_blocks(x: Float[Array, "*batch v"]) -> Int[Array, "*batch"]:
    """Finds the block that holds the maximum, then the index in it.

    A CPU reduces values in vectors but indices one by one, which over a vocabulary costs as much as a layer.
    """
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 128)], constant_values=-jnp.inf)
    blocks = padded.reshape(*x.shape[:-1], -1, 128)
    block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
    inside = jnp.argmax(jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :], axis=-1)
    return block * 128 + inside


def vocabulary_top_k(
    x: Float[Array, "*batch h"],
    rows: Float[Array, "v h"] | Panels | Padded | Quantised,
    k: int,
    *,
    implementation: Implementation | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"]]:
    """Returns the k most probable tokens of softmax(x @ rows.T), int32, best first; ties go to the lower id.

    Their log-probabilities are float32, at most 0 even after rounding. Raises ValueError: fewer than k tokens.

    Args:
        implementation: the default is "pallas" on a TPU for k up to `LONGEST`, and "xla" elsewhere.
        interpret: runs the Pallas kernel without a TPU; `pltpu.InterpretParams` included.
    """
    size = rows.columns if isinstance(rows, Panels) else rows.shape[0]
    if not 1 <= k <= size:
        raise ValueError(f"k: got {k}, expected 1 to the vocabulary's {size}")
    dense = rows.matrix if isinstance(rows, Padded) else rows  # the kernel pads its queries itself
    if isinstance(dense, Panels | Quantised) or choose(implementation, pallas=k <= LONGEST) == "xla":
        return top_k_of_logits(vocabulary_logits(x, rows), k)
    from eagle3_jax.kernels.vocabulary import tpu

    best, tokens = tpu.top_k(x.reshape(-1, x.shape[-1]), dense, k, interpret=interpret)
    return best.reshape(*x.shape[:-1], k), tokens.reshape(*x.shape[:-1], k)


def top_k_of_logits(
    logits: Float[Array, "*batch v"], k: int
) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"]]:
    """Computes `vocabulary_top_k` from given logits."""
    return ranked(logits, k)[:2]


def ranked(
    logits: Float[Array, "*batch v"], k: int, noise: Float[Array, "*batch v"] | None = None
) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"], Float[Array, "*batch 1"]]:
    """Returns the k tokens with the greatest log-probability plus noise, in this order; ties go to the lower id.

    On a mesh each device ranks its share of a vocabulary, and one collective merges their lists. Returned are the
    tokens' log-probabilities without noise, at most 0 even after rounding; the tokens; and the logarithm of the sum of
    exponentials.
    """
    size = logits.shape[-1]
    operands = [None if x is None else x.reshape(-1, size) for x in (logits, noise)]
    sizes = {"data": logits.size // size, "model": size if size >= _SPLIT else 1}
    split = "model" in split_axes(sizes)

    def local(logits: Array, noise: Array | None) -> tuple[Array, Array, Array]:
        normalizer, tokens = jax.nn.logsumexp(logits, axis=-1, keepdims=True), list[Array]()
        ranks = masked = jnp.maximum(logits if noise is None else logits - normalizer + noise, _LEAST)
        column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        for _ in range(k):  # k passes of argmax: on a CPU, top_k sorts the whole vocabulary
            tokens.append(argmax(masked)[:, None])
            masked = jnp.where(column == tokens[-1], -jnp.inf, masked)
        best = jnp.concatenate(tokens, axis=1)
        at = jnp.take_along_axis(logits, best, axis=1), best, normalizer
        found = Lists(*at) if noise is None else Lists(*at, jnp.take_along_axis(ranks, best, axis=1))
        found = jax.tree.map(lambda x: x[None], found)
        return merged(gathered(found, logits.shape[1]) if split else found, k)

    results = over_mesh(local, operands, (P("data", "model"),) * 2, (P("data"),) * 3, sizes)
    gained, tokens, normalizer = (x.reshape(*logits.shape[:-1], -1) for x in results)
    return gained, tokens, normalizer
