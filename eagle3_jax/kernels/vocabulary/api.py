"""Products with one row per token of a vocabulary, and the tokens that come out best."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, Float, Int

from eagle3_jax.kernels.dispatch import Implementation, cores, default_implementation, over_mesh, split_axes
from eagle3_jax.kernels.linear import cpu as linear_cpu
from eagle3_jax.kernels.linear.cpu import Panels
from eagle3_jax.kernels.linear.few_rows import Padded
from eagle3_jax.kernels.vocabulary import tpu

_HIGHEST = jax.lax.Precision.HIGHEST

_LONGEST = 32  # of a list that the kernel for TPU keeps in registers


def vocabulary_logits(
    x: Float[Array, "*batch h"], rows: Float[Array, "v h"] | Panels | Padded
) -> Float[Array, "*batch v"]:
    """x @ rows.T in float32; rows are one per token, as embeddings are stored, or in panels (of their transpose)."""
    flat = x.reshape(-1, x.shape[-1])
    if isinstance(rows, Panels):
        return linear_cpu.product(flat, rows).reshape(*x.shape[:-1], -1)
    if isinstance(rows, Padded):
        return rows.apply(vocabulary_logits, flat).reshape(*x.shape[:-1], -1)
    rows = rows.astype(x.dtype)
    product = jnp.einsum("mh,vh->mv", flat, rows, precision=_HIGHEST, preferred_element_type=jnp.float32)
    return product.reshape(*x.shape[:-1], -1)


def argmax(x: Float[Array, "*batch v"]) -> Int[Array, "*batch"]:
    """jnp.argmax over the last axis, int32: the first of the greatest."""
    return jax.lax.platform_dependent(x, cpu=_argmax_of_blocks, default=lambda x: jnp.argmax(x, axis=-1)).astype(
        jnp.int32
    )


def _argmax_of_blocks(x: Float[Array, "*batch v"]) -> Int[Array, "*batch"]:
    """In two levels (the block that holds the maximum, then the place in it): a CPU reduces values in vectors but
    indices one by one, which over a vocabulary costs as much as a layer.
    """
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 128)], constant_values=-jnp.inf)
    blocks = padded.reshape(*x.shape[:-1], -1, 128)
    block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
    inside = jnp.argmax(jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :], axis=-1)
    return block * 128 + inside


def vocabulary_top_k(
    x: Float[Array, "*batch h"],
    rows: Float[Array, "v h"] | Panels | Padded,
    k: int,
    *,
    implementation: Implementation | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"]]:
    """The k most probable tokens of softmax(x @ rows.T), best first, ties to the lowest.

    Args:
        implementation: the default is "pallas" on a TPU for k up to 32, and "xla" elsewhere.
        interpret: runs the kernel without a TPU, `pltpu.InterpretParams` included.

    Returns:
        Log-probabilities, float32, at most 0 also after rounding; and tokens, int32.

    Raises:
        ValueError: the vocabulary has less than k tokens.
    """
    size = rows.columns if isinstance(rows, Panels) else rows.shape[0]
    if not 1 <= k <= size:
        raise ValueError(f"k: got {k}, expected 1 to the vocabulary's {size}")
    if isinstance(rows, Panels | Padded):
        return top_k_of_logits(vocabulary_logits(x, rows), k)
    default = default_implementation() if k <= _LONGEST else "xla"
    if (implementation or default) == "xla":
        return top_k_of_logits(vocabulary_logits(x, rows), k)
    flat = x.reshape(-1, x.shape[-1])
    sizes = {"data": flat.shape[0], "model": rows.shape[0]}

    def local(x: Array, rows: Array) -> tuple[Array, Array]:
        found = tpu.top_k(x, rows, k, parts=cores(), interpret=interpret)
        return _merged(*(_gathered(*found, rows.shape[0]) if "model" in split_axes(sizes) else found))

    best, tokens = over_mesh(local, (flat, rows), (P("data"), P("model")), (P("data"), P("data")), sizes)
    return best.reshape(*x.shape[:-1], k), tokens.reshape(*x.shape[:-1], k)


def top_k_of_logits(
    logits: Float[Array, "*batch v"], k: int
) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"]]:
    """`vocabulary_top_k` where the logits are there already."""
    tokens = []
    masked = logits
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    for _ in range(k):  # k passes of argmax: on a CPU, top_k sorts the whole vocabulary
        tokens.append(argmax(masked))
        masked = jnp.where(column == tokens[-1][..., None], -jnp.inf, masked)
    best = jnp.stack(tokens, axis=-1)
    normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return jnp.minimum(jnp.take_along_axis(logits, best, axis=-1) - normalizer, 0.0), best


def _gathered(
    values: Float[Array, "p m k"], tokens: Int[Array, "p m k"], normalizers: Float[Array, "p m 1"], rows: int
) -> tuple[Float[Array, "q m k"], Int[Array, "q m k"], Float[Array, "q m 1"]]:
    """What each device of the model axis found in its `rows` of the vocabulary: one collective, of bits."""
    k = tokens.shape[-1]
    tokens += jax.lax.axis_index("model") * rows
    floats = jax.lax.bitcast_convert_type(jnp.concatenate([values, normalizers], axis=-1), jnp.int32)
    bits = jax.lax.all_gather(jnp.concatenate([floats, tokens], axis=-1), "model", tiled=True)
    floats = jax.lax.bitcast_convert_type(bits[..., : k + 1], jnp.float32)
    return floats[..., :k], bits[..., k + 1 :], floats[..., k:]


def _merged(
    values: Float[Array, "p m k"], tokens: Int[Array, "p m k"], normalizers: Float[Array, "p m 1"]
) -> tuple[Float[Array, "m k"], Int[Array, "m k"]]:
    """One list from those of consecutive parts of a vocabulary, and log-probabilities from logits."""
    parts, m, k = values.shape
    if parts == 1:
        return jnp.minimum(values[0] - normalizers[0], 0.0), tokens[0]
    values, tokens = (jnp.moveaxis(x, 0, 1).reshape(m, -1) for x in (values, tokens))
    # Each has as many in front of it as are better, or equal and of a lower part: on a TPU a sort and a gather of so
    # few take longer.
    mine, other = values[:, :, None], values[:, None, :]
    earlier = jnp.tri(parts * k, k=-1, dtype=bool)[None]
    place = jnp.sum((other > mine) | ((other == mine) & earlier), axis=-1)
    chosen = place[:, None] == jnp.arange(k)[None, :, None]
    best = jnp.sum(jnp.where(chosen, values[:, None], 0.0), axis=-1)
    normalizer = jax.nn.logsumexp(normalizers, axis=0)
    return jnp.minimum(best - normalizer, 0.0), jnp.sum(jnp.where(chosen, tokens[:, None], 0), axis=-1)
