"""How a token is chosen: the request's parameters, and the distribution they make of the target's logits.

Penalties, bias and forbidden stops first, then temperature, top-k, top-p, min-p (SGLang's order). Temperature 0 is the
argmax, in the same program. Nothing sorts the vocabulary: the filters look for their threshold by bisection over the
bits of a float32, in rows that ask for one.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from eagle3_jax.kernels.vocabulary.api import argmax

# What a round's random numbers are for.
COINS, BONUS, DRAFTS = range(3)

# What fits in the tables of a batch.
MAX_STOP_IDS = 16
MAX_BIASED = 64
MAX_LOGPROBS = 20

# On the device they are float32, and 0 or infinity beyond these.
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What one request asks for. Raises ValueError for a value out of range.

    Attributes:
        temperature: 0 is greedy.
        top_p: keep the most probable tokens that together hold this mass; 1 keeps all.
        top_k: keep the k most probable tokens; 0 keeps all.
        min_p: keep the tokens at least this many times as probable as the best one; 0 keeps all.
        max_tokens: answer at most this many tokens.
        min_tokens: no end of sequence and no stop token before this many; stop strings are not looked for before.
        seed: of 64 bits, with its sign. In float32 and with one draft size (a fixed `tree`, or none) the answer is a
            function of the prompt, these parameters and the models alone: other requests that are answered at the same
            time do not matter. The exception is a random number that lies at the border between two tokens (one of some
            10,000 drawn), where sums, rounded as shapes decide, choose between them; in bfloat16, a near-tie of greedy
            tokens too. Where the engine chooses among draft sizes ("auto", several), drawn tokens depend on its
            choices: which token a random number chooses depends on what was drafted, its probability does not.
        n: answers to one prompt, each with random numbers of its own.
        ignore_eos: go on after an end-of-sequence token (for measurements of speed).
        stop: strings that end the answer, wherever tokens begin and end; the text is cut in front of them.
        stop_token_ids: tokens that end the answer, beside the model's own; at most 16 with those.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or answer (1 is off).
        presence_penalty, frequency_penalty: taken off the logits of tokens in the answer, once, and for each time.
        logit_bias: added to the logits of these tokens; at most 64.
        logprobs: log-probabilities (before penalties and filters) of each token, and of this many best ones; None
            leaves them out. At most 20.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 128
    min_tokens: int = 0
    seed: int = 0
    n: int = 1
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for field in dataclasses.fields(self):
            if isinstance(value := getattr(self, field.name), np.generic):
                object.__setattr__(self, field.name, value.item())
        checks: tuple[tuple[str, Callable[[Any], bool], Callable[[Any], bool], str], ...] = (
            ("temperature", _is_number, lambda x: 0 <= x <= _LARGEST, "0 (greedy) or more, finite"),
            ("top_p", _is_number, lambda x: _SMALLEST <= x <= 1, "in (0, 1]"),
            ("top_k", _is_int, lambda x: 0 <= x < 2**31, "0 (off) or more, below 2**31"),
            ("min_p", _is_number, lambda x: 0 <= x <= 1, "in [0, 1]"),
            ("max_tokens", _is_int, lambda x: x >= 1, "at least 1"),
            ("min_tokens", _is_int, lambda x: 0 <= x <= self.max_tokens, "0 to max_tokens"),
            ("seed", _is_int, lambda x: -(2**63) <= x < 2**63, "-2**63 to 2**63 - 1"),
            ("n", _is_int, lambda x: x >= 1, "at least 1"),
            ("ignore_eos", lambda x: isinstance(x, bool), lambda _: True, "True or False"),
            ("stop", lambda x: _all(x, lambda s: isinstance(s, str)), lambda x: all(x), "strings that are not empty"),
            ("stop_token_ids", lambda x: _all(x, _is_int), lambda x: all(i >= 0 for i in x), "token ids"),
            ("repetition_penalty", _is_number, lambda x: _SMALLEST <= x <= _LARGEST, "above 0 (1 is off), finite"),
            ("presence_penalty", _is_number, _is_finite, "a finite number"),
            ("frequency_penalty", _is_number, _is_finite, "a finite number"),
            (
                "logit_bias",
                _is_bias,
                lambda x: len(x) <= MAX_BIASED,
                f"finite numbers by token id, {MAX_BIASED} at most",
            ),
            ("logprobs", lambda x: x is None or _is_int(x), lambda x: 0 <= (x or 0) <= MAX_LOGPROBS, "None or 0 to 20"),
        )
        for field, is_type, holds, expected in checks:
            value = getattr(self, field)
            if not is_type(value):
                raise ValueError(f"{field}: got {value!r} ({type(value).__name__}), expected {expected}")
            if not holds(value):
                raise ValueError(f"{field}: got {value!r}, expected {expected}")

    @property
    def seed_bits(self) -> int:
        """The seed in the 32 bits of a key: what they hold as it is, all else as a checksum."""
        held = 0 <= self.seed < 2**32
        return self.seed if held else zlib.crc32(self.seed.to_bytes(8, "little", signed=True))

    @property
    def greedy(self) -> bool:
        """Whether the argmax of the target's plain logits is all it asks for."""
        return self.temperature == 0 and self.logprobs is None and not self.changes_logits

    @property
    def changes_logits(self) -> bool:
        return self.penalises or bool(self.logit_bias) or self.min_tokens > 0

    @property
    def penalises(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _is_finite(value: float | np.number) -> bool:
    return abs(float(value)) <= _LARGEST


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _all(values: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(values, tuple | list) and all(map(holds, values))


def _is_bias(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        _is_int(token) and token >= 0 and _is_number(bias) and _is_finite(bias) for token, bias in value.items()
    )


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
