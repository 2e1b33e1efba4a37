"""Sampling: makes a request's distribution from the target's logits, and draws from it.

Penalties, bias and forbidden stops come first, then temperature, top-k, top-p, min-p (SGLang's order). Temperature 0 is
the argmax, in the same program. Nothing sorts the vocabulary: filters find their threshold by bisection over the bits
of a float32, only in rows with filters.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt

from eagle3_jax.decoding.params import MAX_BIASED, SamplingParams
from eagle3_jax.kernels.vocabulary.api import argmax

# Purposes of a round's random numbers. Siblings are drawn by the noise of `DRAFTS` plus their parent's depth.
COINS, BONUS, DRAFTS = range(3)

# Made on the host, read by a program. Type checkers see the program's type.
if TYPE_CHECKING:
    Rows = Array
else:
    Rows = Array | np.ndarray


def entry(value: Any, dtype: Any) -> Any:
    """Makes an array of one entry, on the host."""
    return np.array([value], dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenCounts:
    """Tokens of each sequence's text; maintained for sequences with penalties.

    Attributes:
        in_prompt: whether the prompt has each token.
        in_answer: how often the answer has each token.
    """

    in_prompt: Bool[Array, "b v"]
    in_answer: Int[Array, "b v"]

    def add(self, tokens: Int[Array, "b t"], taken: Bool[Array, "b t"]) -> TokenCounts:
        """Adds tokens to the answers."""
        rows = jnp.arange(tokens.shape[0])[:, None]
        return dataclasses.replace(self, in_answer=self.in_answer.at[rows, tokens].add(taken.astype(jnp.int32)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogitRules:
    """Changes of the logits before sampling, an entry per sequence.

    Attributes:
        bias_tokens: tokens with a bias.
        bias: what is added to the logits of `bias_tokens`.
        first_stop: no stop token is chosen before this position.
    """

    repetition: Float[Rows, " b"]
    presence: Float[Rows, " b"]
    frequency: Float[Rows, " b"]
    bias_tokens: Int[Rows, "b k"]
    bias: Float[Rows, "b k"]
    first_stop: Int[Rows, " b"]

    @classmethod
    def of(cls, params: SamplingParams, first_stop: int) -> LogitRules:
        """Makes one entry, on the host."""
        unused = [0] * (MAX_BIASED - len(params.logit_bias))
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        return cls(
            *(entry(penalty, np.float32) for penalty in penalties),
            bias_tokens=entry([*params.logit_bias.keys(), *unused], np.int32),
            bias=entry([*params.logit_bias.values(), *unused], np.float32),
            first_stop=entry(first_stop, np.int32),
        )

    def apply(
        self,
        logits: Float[Array, "b v"],
        counts: TokenCounts,
        stop_ids: Int[Rows, "b stops"],
        positions: Int[Array, " b"],
    ) -> Float[Array, "b v"]:
        """Changes the logits of the tokens at these positions; of `stop_ids` -1 is no token."""
        column, times = self.repetition[:, None], counts.in_answer.astype(jnp.float32)
        appeared = counts.in_prompt | (counts.in_answer > 0)
        repeated = jnp.where(logits > 0, logits / column, logits * column)
        logits = jnp.where(appeared, repeated, logits)
        logits -= self.presence[:, None] * jnp.minimum(times, 1) + self.frequency[:, None] * times
        rows = jnp.arange(logits.shape[0])[:, None]
        logits = logits.at[rows, self.bias_tokens].add(self.bias)
        too_early = jnp.where(positions[:, None] < self.first_stop[:, None], stop_ids, -1)
        return logits.at[rows, jnp.where(too_early < 0, logits.shape[1], too_early)].set(-jnp.inf, mode="drop")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """`SamplingParams` as arrays, an entry per sequence.

    Attributes:
        key: one per sequence, so that its samples do not depend on its neighbours. Before `with_keys`, the two numbers
            that the key is made of.
        rules: None if no request changes logits.
    """

    temperature: Float[Rows, " b"]
    top_k: Int[Rows, " b"]
    top_p: Float[Rows, " b"]
    min_p: Float[Rows, " b"]
    key: Key[Array, " b"] | UInt[Rows, "b 2"]
    rules: LogitRules | None = None

    @classmethod
    def of(cls, params: SamplingParams, digest: int = 0, first_stop: int = 0) -> Sampling:
        """Makes one entry, on the host; 32 bits (`digest`) distinguish requests with the same seed."""
        temperature, top_p, min_p = (entry(x, np.float32) for x in (params.temperature, params.top_p, params.min_p))
        top_k, key = entry(params.top_k, np.int32), entry([params.seed_bits, digest], np.uint32)
        return cls(temperature, top_k, top_p, min_p, key, LogitRules.of(params, first_stop))

    @classmethod
    def greedy(cls, batch: int) -> Sampling:
        """Makes the batch of `SamplingParams()`, without rules; each sequence has its own key."""
        one = dataclasses.replace(cls.of(SamplingParams()), rules=None)
        rows = jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x), batch, axis=0), one)
        return dataclasses.replace(rows, key=jax.random.split(jax.random.key(0), batch))

    def with_keys(self) -> Sampling:
        """Makes the keys from their numbers, on the device."""
        keys = jax.vmap(lambda pair: jax.random.fold_in(jax.random.key(pair[0]), pair[1]))(self.key)
        return dataclasses.replace(self, key=keys)

    def uniform(self, lengths: Int[Array, " b"], purpose: int, *shape: int) -> Float[Array, "b *shape"]:
        """Draws random numbers in [0, 1) for the round that starts at these committed lengths.

        Lengths grow, so no number repeats.
        """
        return self._each(lengths, purpose, lambda key: jax.random.uniform(key, shape))

    def gumbel(self, lengths: Int[Array, " b"], purpose: int, *shape: int) -> Float[Array, "b *shape"]:
        """Draws Gumbel noise likewise, of 32 bits each.

        A rare token wins by numbers near 0: those of `uniform` are multiples of 2**-23, too coarse for a vocabulary.
        """
        bits = self._each(lengths, purpose, lambda key: jax.random.bits(key, shape))
        chance = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
        return -jnp.log(-jnp.log1p(-chance))

    def _each(self, lengths: Int[Array, " b"], purpose: int, make: Callable[[Array], Array]) -> Array:
        def of_one(key: Array, length: Array) -> Array:
            return make(jax.random.fold_in(jax.random.fold_in(key, length), purpose))

        return jax.vmap(of_one)(self.key, lengths)


def probabilities(logits: Float[Array, "b v"], sampling: Sampling) -> Float[Array, "b v"]:
    """Returns the distribution to sample from: softmax(logits / T), cut to top-k, top-p, min-p, renormalised each time.

    Tokens that tie with the last kept one are kept too. Temperature 0 puts all mass on the argmax.
    """
    temperature = sampling.temperature[:, None]
    shifted = logits - logits.max(axis=-1, keepdims=True)
    probs = jax.nn.softmax(shifted / jnp.where(temperature > 0, temperature, 1.0), axis=-1)
    top_k, top_p, min_p = filters = sampling.top_k, sampling.top_p, sampling.min_p
    asks = (sampling.temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))  # for filters

    def each(probs: Array) -> Array:  # row by row: rows without filters cost nothing
        return jax.lax.map(
            lambda row: jax.lax.cond(row[0], _filter, lambda p, *_: p, *row[1:]), (asks, probs, *filters)
        )

    probs = jax.lax.cond(asks.any(), each, lambda p: p, probs)
    greedy = jax.nn.one_hot(argmax(logits), logits.shape[-1], dtype=probs.dtype)
    return jnp.where(temperature > 0, probs, greedy)


def _filter(probs: Float[Array, " v"], top_k: Array, top_p: Array, min_p: Array) -> Float[Array, " v"]:
    k = jnp.where(top_k > 0, jnp.minimum(top_k, probs.shape[0]), probs.shape[0])
    probs = jnp.where(probs >= _threshold(lambda least: (probs >= least).sum() >= k), probs, 0.0)
    mass = top_p * probs.sum()
    least = _threshold(lambda least: jnp.where(probs >= least, probs, 0.0).sum() >= mass)
    probs = jnp.where((probs >= least) | (top_p >= 1), probs, 0.0)  # rounding makes a sum reach the mass too early
    probs = jnp.where(probs >= min_p * probs.max(), probs, 0.0)
    return probs / probs.sum()


def _threshold(holds: Callable[[Array], Array]) -> Float[Array, ""]:
    """Bisects for the greatest float32 in [0, 2) for which `holds`, which is true up to there and false beyond."""

    def bit(i: Array, bits: Array) -> Array:
        tried = bits | (jnp.int32(1) << (29 - i))
        return jnp.where(holds(jax.lax.bitcast_convert_type(tried, jnp.float32)), tried, bits)

    return jax.lax.bitcast_convert_type(jax.lax.fori_loop(0, 30, bit, jnp.int32(0)), jnp.float32)


def draw(coins: Float[Array, "b 2"], weights: Float[Array, "b v"]) -> Int[Array, " b"]:
    """Draws one token per row with probability proportional to its weight; a weight of 0 is never drawn.

    Draws a block of the vocabulary, then a token in it: two random numbers in [0, 1) per row, where Gumbel noise takes
    one per token.
    """
    size = weights.shape[-1]
    width = block_width(size)
    blocks = jnp.pad(weights, ((0, 0), (0, -size % width))).reshape(weights.shape[0], -1, width)
    block = _invert(blocks.sum(axis=-1), coins[:, 0])
    inside = _invert(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], coins[:, 1])
    return (block * width + inside).astype(jnp.int32)


def block_width(size: int) -> int:
    """Returns the tokens of a block in `draw`: about as many as there are blocks."""
    return math.isqrt(size)


def _invert(weights: Array, coins: Array) -> Array:
    """Finds the first entry of each row at which the running sum exceeds coin * total."""
    sums = jnp.cumsum(weights, axis=-1)
    exceeds = (sums > coins[:, None] * sums[:, -1:]) & (weights > 0)
    # Rounding may leave none; then the last entry with a weight.
    last = weights.shape[-1] - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=-1)
    return jnp.where(exceeds.any(axis=-1), jnp.argmax(exceeds, axis=-1), last)
