"""Stretches of prompts, as a prefill program reads them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from eagle3_jax.decoding.device.shapes import Sizes
from eagle3_jax.decoding.params import MAX_BIASED, MAX_STOP_IDS
from eagle3_jax.decoding.rounds.state import TRASH


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunk:
    """A stretch of a prompt in each of r rows, and what its request asks for.

    A row may continue the one before it: the next stretch of the same prompt.

    Attributes:
        slots: the place of each request in the batch; the batch's size where there is none.
        tokens: the stretch, padded on the right, and one column more: the token behind each.
        starts: first position. counts: tokens of the stretch.
        ends: the prompt ends with it; only then the request becomes part of the state.
        page_table: of each request; `TRASH` behind its pages.
        limits: most tokens to answer.
        seeds: a request's, and a digest of its prompt: different prompts under one seed get different random numbers,
            the same prompt always the same.
        asked: see `TokenLogprobs`.
        others: `Sampling` and `LogitRules` without what is filled in on the device.
    """

    slots: Int[Array, " r"]
    tokens: Int[Array, "r t"]
    starts: Int[Array, " r"]
    counts: Int[Array, " r"]
    ends: Bool[Array, " r"]
    page_table: Int[Array, "r pages"]
    limits: Int[Array, " r"]
    stop_ids: Int[Array, "r stops"]
    seeds: UInt[Array, "r 2"]
    asked: Int[Array, " r"]
    temperature: Float[Array, " r"]
    top_k: Int[Array, " r"]
    top_p: Float[Array, " r"]
    min_p: Float[Array, " r"]
    repetition: Float[Array, " r"]
    presence: Float[Array, " r"]
    frequency: Float[Array, " r"]
    bias_tokens: Int[Array, "r k"]
    bias: Float[Array, "r k"]
    first_stop: Int[Array, " r"]

    @staticmethod
    def blank(rows: int, length: int, sizes: Sizes) -> dict[str, np.ndarray]:
        """The same on the host, to be filled in: rows without a request."""

        def full(*shape: int, dtype: Any = np.int32, value: Any = 0) -> np.ndarray:
            return np.full((rows, *shape), value, dtype)

        return {
            "slots": full(value=sizes.batch),
            "tokens": full(length + 1),
            "starts": full(),
            "counts": full(),
            "ends": full(dtype=bool),
            "page_table": full(sizes.columns, value=TRASH),
            "limits": full(),
            "stop_ids": full(MAX_STOP_IDS, value=-1),
            "seeds": full(2, dtype=np.uint32),
            "asked": full(value=-1),
            "temperature": full(dtype=np.float32),
            "top_k": full(),
            "top_p": full(dtype=np.float32, value=1),
            "min_p": full(dtype=np.float32),
            "repetition": full(dtype=np.float32, value=1),
            "presence": full(dtype=np.float32),
            "frequency": full(dtype=np.float32),
            "bias_tokens": full(MAX_BIASED),
            "bias": full(MAX_BIASED, dtype=np.float32),
            "first_stop": full(),
        }
