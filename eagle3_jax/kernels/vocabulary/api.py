"""Products with the rows of a vocabulary, and the best tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.dispatch import Implementation, choose
from eagle3_jax.kernels.linear.api import multiply
from eagle3_jax.kernels.linear.layouts import Padded, Panels, Quantised

LONGEST = 32  # tokens of the longest list that the TPU's kernel keeps in registers
_HIGHEST = jax.lax.Precision.HIGHEST


def vocabulary_logits(
    x: Float[Array, "*batch h"], rows: Float[Array, "v h"] | Panels | Padded | Quantised
) -> Float[Array, "*batch v"]:
    """Computes x @ rows.T in float32. Rows are one per token, as embeddings are stored; panels hold their transpose."""

    def dense(x: Array, rows: Array) -> Array:
        rows = rows.astype(x.dtype)
        return jnp.einsum("mh,vh->mv", x, rows, precision=_HIGHEST, preferred_element_type=jnp.float32)

    return multiply(x.reshape(-1, x.shape[-1]), rows, dense).reshape(*x.shape[:-1], -1)


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
    """Returns the k most probable tokens of softmax(x @ rows.T), best first; ties go to the lower id.

    Args:
        implementation: the default is "pallas" on a TPU for k up to `LONGEST`, and "xla" elsewhere.
        interpret: runs the Pallas kernel without a TPU; `pltpu.InterpretParams` included.

    Returns:
        Log-probabilities, float32, at most 0 even after rounding; and tokens, int32.

    Raises:
        ValueError: the vocabulary has fewer than k tokens.
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
    tokens = []
    masked = logits
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    for _ in range(k):  # k passes of argmax: on a CPU, top_k sorts the whole vocabulary
        tokens.append(argmax(masked))
        masked = jnp.where(column == tokens[-1][..., None], -jnp.inf, masked)
    best = jnp.stack(tokens, axis=-1)
    normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return jnp.minimum(jnp.take_along_axis(logits, best, axis=-1) - normalizer, 0.0), best
