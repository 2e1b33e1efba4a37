"""Chooses the held-out prompts, stably by hash: from the lowest and highest hash of all and of each category."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

# The lowest and the highest `filters.opening_hash` of some prompts, and the same of `filters.content_hash`.
Bounds = tuple[str, str, str, str]


def widest(found: Iterable[Bounds]) -> Bounds | None:
    """Returns the bounds of all prompts from those of their parts; None where there are none."""
    if not (parts := list(found)):
        return None
    low, high, first, last = zip(*parts, strict=True)
    return min(low), max(high), min(first), max(last)


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Chooses the held-out prompts by hash, so that a prompt keeps its side when others are added.

    Prompts that begin alike stay together; where all do, they are split by what follows. If hashing puts a small set on
    one side, its lowest hash is held out, or its highest is for training. `held_out`: the average share.

    Raises ValueError: fewer than two different prompts.
    """

    bounds: Bounds | None
    held_out: float

    def __post_init__(self) -> None:
        if self.bounds is None or self.bounds[2] == self.bounds[3]:
            found = 0 if self.bounds is None else 1
            raise ValueError(f"prepare: got {found} usable prompts, expected at least 2 (one to train, one held out)")

    def holds_out(self, opening: str, content: str) -> bool:
        """Tells the side of the prompt with these hashes."""
        assert self.bounds is not None
        digest, (lowest, highest) = opening, self.bounds[:2]
        if lowest == highest:  # one instruction begins all prompts
            digest, (lowest, highest) = content, self.bounds[2:]
        shares = (int(hash[:16], 16) / 2**64 for hash in (digest, lowest, highest))
        is_low, lowest_is, highest_is = (share < self.held_out for share in shares)
        if not lowest_is:
            return digest == lowest
        return digest != highest if highest_is else is_low


def by_category(prompts: Iterable[tuple[str, str, str]]) -> dict[str, Bounds]:
    """Returns the bounds of each category, of prompts given as (category, opening hash, content hash)."""
    return joined({category: (opening, opening, content, content)} for category, opening, content in prompts)


def joined(found: Iterable[Mapping[str, Bounds]]) -> dict[str, Bounds]:
    """Returns the bounds of each category of all prompts from those of their parts."""
    whole: dict[str, Bounds] = {}
    for category, own in (item for part in found for item in part.items()):
        whole[category] = widest((whole.get(category, own), own)) or own
    return whole


class StratifiedSplit:
    """Splits each category, given its bounds, so that each with two different prompts or more is on both sides.

    Raises ValueError: fewer than two different prompts.
    """

    def __init__(self, bounds: Mapping[str, Bounds], held_out: float) -> None:
        self._whole = HeldOut(widest(bounds.values()), held_out)
        self._of = {category: HeldOut(own, held_out) for category, own in bounds.items() if own[2] != own[3]}

    def holds_out(self, category: str, opening: str, content: str) -> bool:
        """Tells the side of the prompt with this category and these hashes."""
        return self._of.get(category, self._whole).holds_out(opening, content)
