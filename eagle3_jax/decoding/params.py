"""Sampling parameters of a request, checked when they are made."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from eagle3_jax.config.checks import require
from eagle3_jax.decoding.structured.params import StructuredOutputsParams

# Sizes of a batch's tables.
MAX_STOP_IDS = 16
MAX_BIASED = 64
MAX_LOGPROBS = 20

# The device has float32, where values beyond these are 0 or infinite.
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request. Raises ValueError for a value out of range.

    Attributes:
        temperature: divides the logits; 0 is greedy.
        top_p: keeps the most probable tokens that together hold this mass; 1 keeps all.
        top_k: keeps the k most probable tokens; 0 keeps all.
        min_p: keeps the tokens at least this many times as probable as the best one; 0 keeps all.
        max_tokens: most tokens of the answer.
        min_tokens: tokens before which neither an end of sequence, nor a stop token, nor a stop string ends the answer.
        seed: 64 bits, signed. In float32 and with one tier (a fixed `tree`, or none) the answer is a function of
            the prompt, these parameters and the models alone, whatever other requests run. One exception is a random
            number at the border between two tokens (one of some 10,000 drawn), where the rounding of sums depends on
            shapes. The other, in bfloat16 or on a TPU, is a near-tie of greedy tokens. Where the engine chooses among
            tiers ("auto", or several), the drawn tokens depend on its choices, their probabilities do not;
            without drawn drafts (`sample_drafts`) not even the tokens.
        n: answers to one prompt, each with random numbers of its own.
        ignore_eos: goes on after an end-of-sequence token (for measurements of speed).
        stop: strings that end the answer, wherever tokens begin and end; the text is cut in front of them.
        stop_token_ids: tokens that end the answer, beside the model's own; at most 16 with those.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or answer; 1 is off.
        presence_penalty: is subtracted once from the logit of each token in the answer; 0 is off.
        frequency_penalty: is subtracted from a token's logit for each time it stands in the answer; 0 is off.
        logit_bias: token id -> number added to its logit; at most 64 tokens.
        logprobs: number of best tokens, at most 20, whose log-probabilities come with each token's own (see `Logprob`);
            None leaves them out.
        skip_special_tokens: leaves special tokens out of the text. False keeps them, and gpt-oss's calls of functions
            as the model writes them, which are reasoning otherwise.
        structured: the shape of the answer, see `StructuredOutputsParams`; needs an engine with `structured_mib`.
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
    skip_special_tokens: bool = True
    structured: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for field in dataclasses.fields(self):
            if isinstance(value := getattr(self, field.name), np.generic):
                object.__setattr__(self, field.name, value.item())
        free = self.structured is None  # else the shape decides where an answer ends
        checks: dict[str, tuple[Callable[[Any], bool], str]] = {
            "temperature": (lambda x: is_number(x) and 0 <= x <= _LARGEST, "a finite number, 0 (greedy) or more"),
            "top_p": (lambda x: is_number(x) and _SMALLEST <= x <= 1, "a number in (0, 1]"),
            "top_k": (lambda x: is_whole(x) and 0 <= x < 2**31, "an integer, 0 (off) or more, below 2**31"),
            "min_p": (lambda x: is_number(x) and 0 <= x <= 1, "a number in [0, 1]"),
            "max_tokens": (lambda x: is_whole(x) and x >= 1, "an integer, at least 1"),
            "min_tokens": (
                lambda x: is_whole(x) and 0 <= x <= self.max_tokens * free,
                "an integer from 0 to max_tokens, 0 beside structured",
            ),
            "seed": (lambda x: is_whole(x) and -(2**63) <= x < 2**63, "an integer from -2**63 to 2**63 - 1"),
            "n": (lambda x: is_whole(x) and x >= 1, "an integer, at least 1"),
            "ignore_eos": (
                lambda x: isinstance(x, bool) and (free or not x),
                "True or False, False beside structured",
            ),
            "skip_special_tokens": (lambda x: isinstance(x, bool), "True or False"),
            "stop": (lambda x: _all(x, lambda s: isinstance(s, str) and s != ""), "strings that are not empty"),
            "stop_token_ids": (lambda x: _all(x, _is_id), "token ids"),
            "repetition_penalty": (lambda x: _is_finite(x) and x >= _SMALLEST, "a finite number above 0 (1 is off)"),
            "presence_penalty": (_is_finite, "a finite number"),
            "frequency_penalty": (_is_finite, "a finite number"),
            "logit_bias": (_is_bias, f"finite numbers by token id, {MAX_BIASED} at most"),
            "logprobs": (
                lambda x: x is None or (is_whole(x) and 0 <= x <= MAX_LOGPROBS),
                f"None or an integer from 0 to {MAX_LOGPROBS}",
            ),
            "structured": (
                lambda x: x is None or isinstance(x, StructuredOutputsParams),
                "StructuredOutputsParams, or None",
            ),
        }
        for field, (holds, expected) in checks.items():
            require(holds(value := getattr(self, field)), field, value, expected)

    @property
    def seed_bits(self) -> int:
        """The seed in the 32 bits of a key: unchanged where it fits, else a checksum."""
        held = 0 <= self.seed < 2**32
        return self.seed if held else zlib.crc32(self.seed.to_bytes(8, "little", signed=True))

    @property
    def greedy(self) -> bool:
        """True if the answer is the argmax of the target's plain logits."""
        return self.temperature == 0 and self.logprobs is None and not self.changes_logits

    @property
    def changes_logits(self) -> bool:
        return self.penalises or bool(self.logit_bias) or self.min_tokens > 0

    @property
    def penalises(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


def is_number(value: Any) -> bool:
    """Tells whether a value is a real number of Python or numpy."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Tells whether a value is an integer of Python or numpy."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return is_number(value) and abs(value if isinstance(value, int) else float(value)) <= _LARGEST


def _is_id(value: Any) -> bool:
    return is_whole(value) and value >= 0


def _all(values: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(values, tuple | list) and all(map(holds, values))


def _is_bias(value: Any) -> bool:
    are = isinstance(value, Mapping) and all(_is_id(token) and _is_finite(bias) for token, bias in value.items())
    return are and len(value) <= MAX_BIASED
