"""How a token is chosen: the request's parameters, and the distribution they make of the target's logits.

Temperature first, then top-k, then top-p (EAGLE3_SPEC section 5.5). Temperature 0 is the argmax, in the same program.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from eagle3_jax.kernels.vocabulary import argmax


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What one request asks for. Raises ValueError for a value out of range.

    Attributes:
        temperature: 0 is greedy.
        top_p: keep the most probable tokens that together hold this mass; 1 keeps all.
        top_k: keep the k most probable tokens; 0 keeps all.
        max_tokens: answer at most this many tokens.
        seed: in float32 the answer is a function of the prompt, these parameters and the models alone: other requests
            that are answered at the same time do not matter. In bfloat16 they may turn a near-tie, since shapes decide
            how sums are rounded. Ask with several seeds for several samples of one prompt.
        ignore_eos: go on after an end-of-sequence token (for measurements of speed).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 128
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checks = (
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or more, finite"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("seed", 0 <= self.seed < 2**32, "0 to 2**32 - 1"),
        )
        for field, holds, expected in checks:
            if not holds:
                raise ValueError(f"{field}: got {getattr(self, field)!r}, expected {expected}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """The same on the device, one entry a sequence.

    Attributes:
        key: each sequence has its own, so that its samples do not depend on its neighbours.
    """

    temperature: Float[Array, " b"]
    top_k: Int[Array, " b"]
    top_p: Float[Array, " b"]
    key: Key[Array, " b"]

    def keys(self, lengths: Int[Array, " b"]) -> Key[Array, " b"]:
        """Fresh keys for the round that starts at these committed lengths (they grow, so no key comes twice)."""
        return jax.vmap(jax.random.fold_in)(self.key, lengths)


def probabilities(logits: Float[Array, "b n v"], sampling: Sampling) -> Float[Array, "b n v"]:
    """The distribution a request samples from: softmax(logits / T), cut to top-k, then to top-p, renormalised.

    Tokens that tie with the last one kept are kept too. Temperature 0 gives all mass to the argmax.
    """
    temperature = sampling.temperature[:, None, None]
    shifted = logits - logits.max(axis=-1, keepdims=True)
    probs = jax.nn.softmax(shifted / jnp.where(temperature > 0, temperature, 1.0), axis=-1)
    filtered = jnp.any((sampling.temperature > 0) & ((sampling.top_k > 0) | (sampling.top_p < 1)))
    probs = jax.lax.cond(filtered, lambda p: _filter(p, sampling), lambda p: p, probs)
    greedy = jax.nn.one_hot(argmax(logits), logits.shape[-1], dtype=probs.dtype)
    return jnp.where(temperature > 0, probs, greedy)


def _filter(probs: Array, sampling: Sampling) -> Array:
    """Top-k, renormalise, top-p, renormalise; needs the vocabulary sorted, so it runs only where one asks for it."""
    vocabulary = probs.shape[-1]
    ordered = jnp.sort(probs, axis=-1, descending=True)
    k = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, vocabulary), vocabulary)[:, None, None]
    ordered = jnp.where(jnp.arange(vocabulary)[None, None] < k, ordered, 0.0)
    mass = ordered.sum(axis=-1, keepdims=True)
    before = jnp.cumsum(ordered, axis=-1) - ordered  # mass of the tokens in front of each
    top_p = sampling.top_p[:, None, None]
    kept = (ordered > 0) & ((before < top_p * mass) | (top_p >= 1))  # rounding makes `before` reach the mass too early
    smallest = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    probs = jnp.where(probs >= smallest, probs, 0.0)
    return probs / probs.sum(axis=-1, keepdims=True)


def draw(keys: Key[Array, " b"], weights: Float[Array, "b v"]) -> Int[Array, " b"]:
    """One token of each row with probability proportional to its weight; a weight of 0 is never drawn.

    First a block of the vocabulary, then a token in it: two random numbers a row, where Gumbel noise takes one a token.
    """
    size = weights.shape[-1]
    width = math.isqrt(size)
    blocks = jnp.pad(weights, ((0, 0), (0, -size % width))).reshape(weights.shape[0], -1, width)
    coins = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
    block = _invert(blocks.sum(axis=-1), coins[:, 0])
    inside = _invert(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], coins[:, 1])
    return (block * width + inside).astype(jnp.int32)


def _invert(weights: Array, coins: Array) -> Array:
    """The first entry of each row at which the running sum exceeds coin * total."""
    sums = jnp.cumsum(weights, axis=-1)
    exceeds = (sums > coins[:, None] * sums[:, -1:]) & (weights > 0)
    # Rounding may leave none: then the last entry that has weight.
    last = weights.shape[-1] - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=-1)
    return jnp.where(exceeds.any(axis=-1), jnp.argmax(exceeds, axis=-1), last)


def first_token(
    logits: Float[Array, "b v"], sampling: Sampling, lengths: Int[Array, " b"], *, greedy: bool
) -> Int[Array, " b"]:
    """The token that follows a prompt, from the logits at its last position."""
    if greedy:
        return argmax(logits)
    # A prompt's own length belongs to the first round.
    return draw(sampling.keys(lengths - 1), probabilities(logits[:, None], sampling)[:, 0])
