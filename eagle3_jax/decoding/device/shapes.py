"""The shapes that an engine compiles programs for, and the sizes of its allocations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from eagle3_jax.decoding.tier import Tier

# Most rounds of one dispatch: requests join and leave between two dispatches.
ROUNDS = 4
# (rows, tokens of each) of the prefill programs. Short prompts are packed: each takes as many rows as it needs, one
# after the other. A long prompt is read alone, in one row.
PACKED = ((4, 16), (16, 16))
ALONE = ((1, 256), (1, 1024))
# Most tokens of prompts, padding included, between two dispatches of rounds.
MOST_READ = 1024
# Fixed cost of a dispatch, in tokens; padding costs as much as tokens.
_DISPATCH = 64
# Rows of the decode programs, beside the whole batch (batch buckets): a few requests in a large batch pay for few rows.
# On CPUs 2 and 4 rows cost as much as one with float32 weights; from 8 rows on, twice the rows cost at least 1.4 times
# as much.
WIDTHS = (1, 4, 8, 16, 32, 64, 128, 256)
MEASURED_LENGTH = 256


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of what an engine allocates once."""

    batch: int  # sequences decoded together
    max_length: int  # most tokens of prompt and answer
    pages: int  # of the caches, without `TRASH`
    page_size: int  # in tokens
    pages_per_sequence: int  # of the longest request, the scratch of a round included
    observed: int = 0  # newest tokens of each sequence whose states are kept (`Observed`); 0 keeps none
    kept_states: int | None = None  # copies of recurrent states, beside the batch's; None: the target has none
    tables: int = 0  # words of the tables of constraints; 0: no request has one

    @classmethod
    def plan(
        cls,
        batch: int,
        max_length: int,
        page_size: int,
        tiers: Sequence[Tier],
        kv_tokens: int | None = None,
        learned: int = 0,
        kept_states: int | None = None,
        tables: int = 0,
    ) -> Sizes:
        """Chooses the sizes; a head may learn from `learned` tokens of an ended request.

        `kv_tokens` are all requests' together; None lets each sequence of the batch be `max_length` long. Raises
        ValueError: no room for one request.
        """
        each = -(-(max_length + max(tier.scratch for tier in tiers)) // page_size)
        pages = each * batch if kv_tokens is None else kv_tokens // page_size
        if pages < each:
            raise ValueError(f"kv_tokens: got {kv_tokens}, expected at least {each * page_size}, room for one request")
        # The device may be two dispatches ahead of the host that ends a request.
        observed = learned and learned + 2 * ROUNDS * (max(tier.depth for tier in tiers) + 1)
        return cls(batch, max_length, pages, page_size, each, observed, kept_states, tables)

    @property
    def cache_length(self) -> int:
        """Slots of the longest request, in its pages."""
        return self.pages_per_sequence * self.page_size

    @property
    def measured_length(self) -> int:
        """Tokens of each sequence in measured rounds."""
        return min(self.max_length // 2, MEASURED_LENGTH)

    @property
    def measured_lengths(self) -> list[int]:
        """Numbers of such tokens that tell how costs grow with the context: short, middle, long."""
        short, long = self.measured_length, self.max_length * 7 // 8
        return [short, (short + long) // 2, long] if long > 2 * short else [short]

    @property
    def columns(self) -> int:
        """Columns of a chunk's page table: a prompt's last stretch is padded beyond its pages."""
        return self.pages_per_sequence + -(-max(length for _, length in self.prefill_shapes) // self.page_size)

    @property
    def prefill_shapes(self) -> list[tuple[int, int]]:
        """(rows, tokens of each) of the prefill programs that this engine uses."""
        alone = [shape for shape in ALONE if math.prod(shape) < 2 * self.max_length]
        together = [shape for shape in PACKED[1:] if math.prod(shape) < 2 * self.max_length * (self.batch - 1)]
        return [*alone, *PACKED[:1], *together]

    @property
    def widths(self) -> list[int]:
        """Rows of the decode programs, ascending."""
        return [width for width in WIDTHS if width < self.batch] + [self.batch]

    def prefill_shape_for(self, left: Sequence[int], among: Sequence[tuple[int, int]] = ()) -> tuple[int, int]:
        """Returns the prefill program, `among` these or all, with the least padding for prompts of `left` tokens."""

        def use(shape: tuple[int, int]) -> tuple[float, int]:
            free, length = shape
            read = 0
            for tokens in left:
                rows = min(-(-tokens // length), free)
                read, free = read + min(tokens, rows * length), free - rows
            return read / (math.prod(shape) + _DISPATCH), math.prod(shape)

        return max(among or self.prefill_shapes, key=use)
