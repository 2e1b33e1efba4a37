"""How a token is chosen: the distribution that a request's parameters make of the target's logits.

Penalties, bias and forbidden stops first, then temperature, top-k, top-p, min-p (SGLang's order). Temperature 0 is the
argmax, in the same program. Nothing sorts the vocabulary: the filters look for their threshold by bisection over the
bits of a float32, in rows that ask for one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from eagle3_jax.kernels.vocabulary.api import argmax

# What a round's random numbers are for.
COINS, BONUS, DRAFTS = range(3)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogitRules:
    """What changes the logits before they are sampled from, one entry a sequence.

    Attributes:
        bias_tokens, bias: added to the logits of these tokens; 0 elsewhere.
        first_stop: no stop token is chosen in front of this position.
        in_prompt: tokens of the prompt; counts: of the answer, how often. Right for sequences that ask for penalties.
    """

    repetition: Float[Array, " b"]
    presence: Float[Array, " b"]
    frequency: Float[Array, " b"]
    bias_tokens: Int[Array, "b k"]
    bias: Float[Array, "b k"]
    first_stop: Int[Array, " b"]
    in_prompt: Bool[Array, "b v"]
    counts: Int[Array, "b v"]

    def apply(
        self, logits: Float[Array, "b v"], stop_ids: Int[Array, "b stops"], positions: Int[Array, " b"]
    ) -> Float[Array, "b v"]:
        """Logits of the tokens at these positions.

        Args:
            stop_ids: -1 where there is none.
        """
        column, times = self.repetition[:, None], self.counts.astype(jnp.float32)
        appeared = self.in_prompt | (self.counts > 0)
        repeated = jnp.where(logits > 0, logits / column, logits * column)
        logits = jnp.where(appeared, repeated, logits)
        logits -= self.presence[:, None] * jnp.minimum(times, 1) + self.frequency[:, None] * times
        rows = jnp.arange(logits.shape[0])[:, None]
        logits = logits.at[rows, self.bias_tokens].add(self.bias)
        too_early = jnp.where(positions[:, None] < self.first_stop[:, None], stop_ids, -1)
        return logits.at[rows, jnp.where(too_early < 0, logits.shape[1], too_early)].set(-jnp.inf, mode="drop")

    def count(self, tokens: Int[Array, "b t"], taken: Bool[Array, "b t"]) -> LogitRules:
        """With tokens added to the answer."""
        rows = jnp.arange(tokens.shape[0])[:, None]
        return dataclasses.replace(self, counts=self.counts.at[rows, tokens].add(taken.astype(jnp.int32)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """`SamplingParams` on the device, one entry a sequence.

    Attributes:
        key: each sequence has its own, so that its samples do not depend on its neighbours.
        rules: None where nobody changes logits.
    """

    temperature: Float[Array, " b"]
    top_k: Int[Array, " b"]
    top_p: Float[Array, " b"]
    min_p: Float[Array, " b"]
    key: Key[Array, " b"]
    rules: LogitRules | None = None

    @classmethod
    def greedy(cls, batch: int) -> Sampling:
        nothing = jnp.zeros(batch)
        return cls(
            nothing, jnp.zeros(batch, jnp.int32), nothing + 1, nothing, jax.random.split(jax.random.key(0), batch)
        )

    def uniform(self, lengths: Int[Array, " b"], purpose: int, *shape: int) -> Float[Array, "b *shape"]:
        """Random numbers in [0, 1) for the round that starts at these committed lengths.

        Lengths grow, so no number comes twice.
        """

        def of_one(key: Array, length: Array) -> Array:
            return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, length), purpose), shape)

        return jax.vmap(of_one)(self.key, lengths)


def probabilities(logits: Float[Array, "b v"], sampling: Sampling) -> Float[Array, "b v"]:
    """The distribution a request samples from: softmax(logits / T), cut to top-k, top-p, min-p, renormalised each time.

    Tokens that tie with the last one kept are kept too. Temperature 0 gives all mass to the argmax.
    """
    temperature = sampling.temperature[:, None]
    shifted = logits - logits.max(axis=-1, keepdims=True)
    probs = jax.nn.softmax(shifted / jnp.where(temperature > 0, temperature, 1.0), axis=-1)
    filters = sampling.top_k, sampling.top_p, sampling.min_p
    asks = _asks(sampling)

    def each(probs: Array) -> Array:  # row by row: those that do not ask pay nothing
        return jax.lax.map(
            lambda row: jax.lax.cond(row[0], _filter, lambda p, *_: p, *row[1:]), (asks, probs, *filters)
        )

    probs = jax.lax.cond(asks.any(), each, lambda p: p, probs)
    greedy = jax.nn.one_hot(argmax(logits), logits.shape[-1], dtype=probs.dtype)
    return jnp.where(temperature > 0, probs, greedy)


def sample(logits: Float[Array, "b v"], sampling: Sampling, coins: Float[Array, "b 2"]) -> Int[Array, " b"]:
    """One token of each row: `draw` of its `probabilities`."""
    return draw(coins, probabilities(logits, sampling))


def _asks(sampling: Sampling) -> Bool[Array, " b"]:
    """Who wants filters."""
    return (sampling.temperature > 0) & ((sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0))


def _filter(probs: Float[Array, " v"], top_k: Array, top_p: Array, min_p: Array) -> Float[Array, " v"]:
    k = jnp.where(top_k > 0, jnp.minimum(top_k, probs.shape[0]), probs.shape[0])
    probs = jnp.where(probs >= _threshold(lambda least: (probs >= least).sum() >= k), probs, 0.0)
    mass = top_p * probs.sum()
    least = _threshold(lambda least: jnp.where(probs >= least, probs, 0.0).sum() >= mass)
    probs = jnp.where((probs >= least) | (top_p >= 1), probs, 0.0)  # rounding makes a sum reach the mass too early
    probs = jnp.where(probs >= min_p * probs.max(), probs, 0.0)
    return probs / probs.sum()


def _threshold(holds: Callable[[Array], Array]) -> Float[Array, ""]:
    """The greatest float32 in [0, 2) for which `holds`, which is true of 0 and falls once: by bisection, bit by bit."""

    def bit(i: Array, bits: Array) -> Array:
        tried = bits | (jnp.int32(1) << (29 - i))
        return jnp.where(holds(jax.lax.bitcast_convert_type(tried, jnp.float32)), tried, bits)

    return jax.lax.bitcast_convert_type(jax.lax.fori_loop(0, 30, bit, jnp.int32(0)), jnp.float32)


def draw(coins: Float[Array, "b 2"], weights: Float[Array, "b v"]) -> Int[Array, " b"]:
    """One token of each row with probability proportional to its weight; a weight of 0 is never drawn.

    First a block of the vocabulary, then a token in it: two random numbers a row, where Gumbel noise takes one a token.

    Args:
        coins: uniform in [0, 1).
    """
    size = weights.shape[-1]
    width = block_width(size)
    blocks = jnp.pad(weights, ((0, 0), (0, -size % width))).reshape(weights.shape[0], -1, width)
    block = _invert(blocks.sum(axis=-1), coins[:, 0])
    inside = _invert(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], coins[:, 1])
    return (block * width + inside).astype(jnp.int32)


def block_width(size: int) -> int:
    """Tokens of a block in `draw`: as many as there are blocks."""
    return math.isqrt(size)


def _invert(weights: Array, coins: Array) -> Array:
    """The first entry of each row at which the running sum exceeds coin * total."""
    sums = jnp.cumsum(weights, axis=-1)
    exceeds = (sums > coins[:, None] * sums[:, -1:]) & (weights > 0)
    # Rounding may leave none: then the last entry that has weight.
    last = weights.shape[-1] - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=-1)
    return jnp.where(exceeds.any(axis=-1), jnp.argmax(exceeds, axis=-1), last)
