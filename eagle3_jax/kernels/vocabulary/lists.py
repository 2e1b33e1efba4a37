"""Lists of the best tokens of a vocabulary's parts, and how they are merged."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


class Lists(NamedTuple):
    """The best k tokens of each of p consecutive parts of a vocabulary, best first, for m queries.

    `normalizers` are logarithms of the parts' sums of exponentials; `ranks` (None: the logits) order, relative to them.
    """

    logits: Float[Array, "p m k"]
    tokens: Int[Array, "p m k"]
    normalizers: Float[Array, "p m 1"]
    ranks: Float[Array, "p m k"] | None = None


def gathered(lists: Lists, rows: int) -> Lists:
    """Gathers the lists of the model axis, each device's for its own `rows` of the vocabulary, in one collective."""
    lists = lists._replace(tokens=lists.tokens + jax.lax.axis_index("model") * rows)
    leaves, structure = jax.tree.flatten(lists)
    each = [jax.lax.bitcast_convert_type(x, jnp.int32) for x in leaves]
    bits = jax.lax.all_gather(jnp.concatenate(each, axis=-1), "model", tiled=True)
    each = jnp.split(bits, np.cumsum([x.shape[-1] for x in leaves])[:-1], axis=-1)
    floats = [jax.lax.bitcast_convert_type(x, leaf.dtype) for x, leaf in zip(each, leaves, strict=True)]
    return jax.tree.unflatten(structure, floats)


def merged(lists: Lists, k: int) -> tuple[Float[Array, "m k"], Int[Array, "m k"], Float[Array, "m 1"]]:
    """Returns log-probabilities, at most 0, and tokens of the best k of all parts, and the vocabulary's normalizer."""
    logits, tokens, normalizers, ranks = lists
    parts, m, _ = tokens.shape
    if parts == 1:
        return jnp.minimum(logits[0] - normalizers[0], 0.0), tokens[0], normalizers[0]
    normalizer = jax.nn.logsumexp(normalizers, axis=0, keepdims=True)
    ranks = logits if ranks is None else ranks + (normalizers - normalizer)
    logits, tokens, ranks = (jnp.moveaxis(x, 0, 1).reshape(m, -1) for x in (logits, tokens, ranks))
    # An entry's place is the number of entries that are greater, or equal and earlier. On a TPU a sort and a gather of
    # so few take longer.
    mine, other = ranks[:, :, None], ranks[:, None, :]
    earlier = jnp.tri(ranks.shape[1], k=-1, dtype=bool)[None]
    place = jnp.sum((other > mine) | ((other == mine) & earlier), axis=-1)
    chosen = place[:, None] == jnp.arange(k)[None, :, None]
    best = jnp.sum(jnp.where(chosen, logits[:, None], 0.0), axis=-1)
    tokens = jnp.sum(jnp.where(chosen, tokens[:, None], 0), axis=-1)
    return jnp.minimum(best - normalizer[0], 0.0), tokens, normalizer[0]
