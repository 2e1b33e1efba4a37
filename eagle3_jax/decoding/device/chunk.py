"""Stretches of prompts, as a prefill program reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Bool, Int

from eagle3_jax.decoding.device.shapes import Sizes
from eagle3_jax.decoding.rounds.sampling import Rows, entry
from eagle3_jax.decoding.rounds.state import TRASH, RequestRows


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
    """

    slots: Int[Rows, " r"]
    tokens: Int[Rows, "r t"]
    starts: Int[Rows, " r"]
    counts: Int[Rows, " r"]
    ends: Bool[Rows, " r"]
    page_table: Int[Rows, "r pages"]
    requests: RequestRows

    @classmethod
    def stretch(
        cls,
        sizes: Sizes,
        length: int,
        *,
        slot: int,
        prompt: Sequence[int],
        start: int,
        pages: Sequence[int],
        request: RequestRows,
    ) -> Chunk:
        """One row, on the host: `length` tokens of a prompt from `start` on, fewer where it ends."""
        part = prompt[start : start + length + 1]
        return cls(
            slots=entry(slot, np.int32),
            tokens=entry([*part, *[0] * (length + 1 - len(part))], np.int32),
            starts=entry(start, np.int32),
            counts=entry(min(len(part), length), np.int32),
            ends=entry(0 < len(prompt) <= start + length, bool),
            page_table=entry([*pages, *[TRASH] * (sizes.columns - len(pages))], np.int32),
            requests=request,
        )

    @classmethod
    def of(cls, stretches: Sequence[Chunk], rows: int, length: int, sizes: Sizes) -> Chunk:
        """Stretches of up to `length` tokens, with rows of no request behind them."""
        nobody = RequestRows.nobody()
        blank = cls.stretch(sizes, length, slot=sizes.batch, prompt=(), start=0, pages=(), request=nobody)
        padded = [*stretches, *[blank] * (rows - len(stretches))]
        return jax.tree.map(lambda *parts: np.concatenate(parts), *padded)
