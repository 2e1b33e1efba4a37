"""Chooses the held-out prompts, stably by hash: from the lowest and highest hash of each category and of all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# The lowest and the highest `filters.opening_hash` of some prompts, and the same of `filters.content_hash`.
Bounds = tuple[str, str, str, str]


def by_category(prompts: Iterable[tuple[str, str, str]]) -> dict[str, Bounds]:
    """Returns the bounds of each category, of prompts given as (category, opening hash, content hash)."""
    return joined({category: (opening, opening, content, content)} for category, opening, content in prompts)


def joined(found: Iterable[Mapping[str, Bounds]]) -> dict[str, Bounds]:
    """Returns the bounds of each category of all prompts from those of their parts."""
    whole: dict[str, Bounds] = {}
    for category, own in (item for part in found for item in part.items()):
        low, high, first, last = whole.get(category, own)
        whole[category] = min(low, own[0]), max(high, own[1]), min(first, own[2]), max(last, own[3])
    return whole


class StratifiedSplit:
    """Chooses the held-out prompts by hash, so that a prompt keeps its side when others are added.

    Prompts that begin alike stay together; where all do, they are split by what follows. If hashing puts a small set on
    one side, its lowest hash is held out, or its highest is for training. So each category with two different prompts
    or more is on both sides, given its `bounds`. `held_out`: the average share.

    Raises ValueError: fewer than two different prompts.
    """

    def __init__(self, bounds: Mapping[str, Bounds], held_out: float) -> None:
        whole = joined({"": own} for own in bounds.values())
        if not whole or whole[""][2] == whole[""][3]:
            expected = "expected at least 2 (one to train, one held out)"
            raise ValueError(f"prepare: got {len(whole)} usable prompts, {expected}")
        self._whole, self._held_out = whole[""], held_out
        self._of = {category: own for category, own in bounds.items() if own[2] != own[3]}

    def holds_out(self, category: str, opening: str, content: str) -> bool:
        """Tells the side of the prompt with this category and these hashes."""
        digest, (lowest, highest, first, last) = opening, self._of.get(category, self._whole)
        if lowest == highest:  # one instruction begins all prompts
            digest, lowest, highest = content, first, last
        shares = (int(hash[:16], 16) / 2**64 for hash in (digest, lowest, highest))
        is_low, lowest_is, highest_is = (share < self._held_out for share in shares)
        if not lowest_is:
            return digest == lowest
        return digest != highest if highest_is else is_low
