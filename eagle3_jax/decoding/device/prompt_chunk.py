"""Stretches of prompts, the input of a prefill program."""

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
class PromptChunk:
    """A stretch of a prompt in each of r rows, and the settings of its request.

    A row may continue the one before it with the next stretch of the same prompt.

    Attributes:
        slots: slot of each request; the batch's size for no request.
        tokens: the stretch, padded on the right, and one more column: the token after each.
        starts: first position.
        counts: tokens of the stretch.
        ends: whether the prompt ends with it; only then the request joins the state.
        page_table: pages of each request; `TRASH` after its pages.
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
        slot: int,
        prompt: Sequence[int],
        start: int,
        pages: Sequence[int],
        request: RequestRows,
        stop: int | None = None,
    ) -> PromptChunk:
        """Makes one row, on the host: `length` tokens of a prompt from `start` on, fewer before `stop` or its end."""
        end = min(start + length, len(prompt) if stop is None else stop)
        part = prompt[start : start + length + 1]
        return cls(
            slots=entry(slot, np.int32),
            tokens=entry([*part, *[0] * (length + 1 - len(part))], np.int32),
            starts=entry(start, np.int32),
            counts=entry(end - start, np.int32),
            ends=entry(0 < len(prompt) <= end, bool),
            page_table=entry([*pages, *[TRASH] * (sizes.columns - len(pages))], np.int32),
            requests=request,
        )

    @classmethod
    def of(cls, stretches: Sequence[PromptChunk], rows: int, length: int, sizes: Sizes) -> PromptChunk:
        """Joins stretches of up to `length` tokens, and fills up with rows of no request."""
        nobody = RequestRows.nobody()
        blank = cls.stretch(sizes, length, slot=sizes.batch, prompt=(), start=0, pages=(), request=nobody)
        padded = [*stretches, *[blank] * (rows - len(stretches))]
        return jax.tree.map(lambda *parts: np.concatenate(parts), *padded)
