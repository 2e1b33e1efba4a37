"""The policy that chooses each dispatch's tier: most expected tokens a second, with a budget for trying others.

A tier is a way to run a round: without drafts, with a chain, with a tree. The cost of its round was measured, at each
width; its acceptance is learned while requests run. Other tiers are tried now and then, for a fixed share of the time:
acceptance changes with the text. All is arithmetic on the host with the measured costs as its clock, so that all
processes of a mesh decide alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from eagle3_jax.decoding.rounds.unread import ROOM
from eagle3_jax.decoding.tier import Tier

# Share of the time for tiers believed to be slower, and the part of it lent at the start.
EXPLORED = 0.01
_LENT = 8  # rounds of the first tier
# Dispatches of a tier after which an observation counts half as much.
_HALF_LIFE = 32
_FORGETTING = 0.5 ** (1 / _HALF_LIFE)
# Weights of the prior beliefs: about a tier in rounds, about one request in accepted drafts.
_PRIOR_ROUNDS = 16
_PRIOR_DRAFTS = 3
# Factor by which another tier must promise more, or dispatches would alternate between equals.
_HYSTERESIS = 0.02
# Rounds over which the price of waking a resting head is spread.
_AHEAD = 64


class Price(NamedTuple):
    """Seconds of a round with drafts: of sequences with `length` tokens, and for each token more."""

    seconds: float
    growth: float = 0.0
    length: int = 0

    def at(self, length: float) -> float:
        return self.seconds + self.growth * max(length - self.length, 0.0)


@dataclasses.dataclass
class Acceptance:
    """What is known of one request's drafts."""

    unread: int = 0  # tokens decoded while the head rested, at the last report
    resting: bool = False  # whether rounds were dispatched without the head, and no catch-up since
    in_prefix: bool = False  # whether the request shares pages of an earlier one that the head never read
    accepted: dict[str, float] = dataclasses.field(default_factory=dict)  # drafts, by source
    expected: dict[str, float] = dataclasses.field(default_factory=dict)  # those of an average request, by source

    @property
    def lost(self) -> bool:
        """True if the head can no longer draft for the request."""
        return self.in_prefix or self.unread > ROOM

    def factor(self, tier: Tier) -> float:
        """Returns the acceptance relative to an average request's."""
        if self.lost and tier.head:
            return 0.0
        accepted, expected = self.accepted.get(tier.source, 0.0), self.expected.get(tier.source, 0.0)
        return (accepted + _PRIOR_DRAFTS) / (expected + _PRIOR_DRAFTS)


class TierPolicy:
    """Chooses tiers, and learns from accepted drafts. The first tier is vanilla decoding.

    `costs`: width -> tier -> price of a round with drafts, for the tiers in use there, vanilla decoding always.
    `waking`: width -> seconds that a rested head needs to read the tokens it missed.
    """

    def __init__(
        self, tiers: Sequence[Tier], costs: Mapping[int, Mapping[int, Price]], waking: Mapping[int, float]
    ) -> None:
        self.tiers, self.costs, self.waking = list(tiers), costs, waking
        self.current = 0
        self._rounds = [0.0] * len(tiers)  # rounds of single requests, old ones discounted
        self._accepted = [0.0] * len(tiers)
        # Those of `_asked` with drafts, discounted. The text often has no match: half of the rounds, as a guess.
        self._drafted = [_PRIOR_ROUNDS * (0.5 if tier.copies_alone else 1.0) for tier in tiers]
        self._asked = [float(_PRIOR_ROUNDS)] * len(tiers)
        self._tried = [0] * len(tiers)  # the latest dispatch of each
        self._dispatches = 0
        self._budget: float | None = None  # set at the first dispatch, whose width it depends on

    def price(self, costs: Mapping[int, Mapping[int, Price]], waking: Mapping[int, float]) -> None:
        """Sets the costs of some widths, from any thread; what was learned stays."""
        self.waking = {**self.waking, **waking}
        self.costs = {**self.costs, **costs}  # last: a width with costs is taken

    def accepted(self, tier: int) -> float:
        """Estimates the drafts a round that an average request accepts, by guesses and its source's observations."""
        source = self.tiers[tier].source
        seen = [i for i, other in enumerate(self.tiers) if other.source == source]
        guessed = sum(self._rounds[i] * self.tiers[i].guess for i in seen)
        prior = _PRIOR_ROUNDS * self.tiers[tier].guess
        quality = (sum(self._accepted[i] for i in seen) + prior) / (guessed + prior) if prior else 0.0
        return (self._accepted[tier] + prior * quality) / (self._rounds[tier] + _PRIOR_ROUNDS)

    def choose(
        self,
        requests: Sequence[Acceptance],
        *,
        behind: bool,
        rounds: int,
        width: int,
        length: float = 0.0,
        retired: Collection[str] = (),
    ) -> int:
        """Chooses the tier of the next dispatch, of so many rounds in `width` rows, but none of a `retired` source.

        `behind`: the head has not read all tokens of the requests. `length`: their mean number of tokens, with prompts.
        """
        self._dispatches += 1
        known = self.known(width, length)
        rates = {
            i: _AHEAD * self._tokens(i, requests) / self._seconds(i, known, behind=behind, rounds=_AHEAD, width=width)
            for i in known
            if self.tiers[i].source not in retired
        }
        best = max(rates, key=lambda i: rates[i] * (1 + _HYSTERESIS * (i == self.current)))
        budget = _LENT * known[0] if self._budget is None else self._budget
        dearest = rounds * max(known.values()) + self.waking[width]  # the budget holds one try of the dearest tier
        budget = min(budget + EXPLORED * rounds * self.cost(best, known), max(budget, dearest))
        self.current = best
        other = self._to_try(requests, rates, best, known)
        if other is not None:
            # Extra time compared with the best tier, for the same number of tokens.
            wasted = self._seconds(other, known, behind=behind, rounds=rounds, width=width)
            wasted -= self._tokens(other, requests) * rounds / (rates[best] or 1)
            if wasted <= budget:
                budget -= max(wasted, 0)
                best = other
                if wasted <= 0:  # not slower, so no try: hysteresis alone kept the current tier
                    self.current = other
        self._budget = budget
        self._tried[best] = self._dispatches
        return best

    def known(self, width: int, length: float) -> dict[int, float]:
        """Returns seconds of a round with drafts, by tier, beside contexts of so many tokens."""
        return {tier: price.at(length) for tier, price in self.costs[width].items()}

    def cost(self, tier: int, known: Mapping[int, float]) -> float:
        """Returns the expected seconds of a round, with drafts or without; for `known` see above."""
        share = self._drafted[tier] / self._asked[tier]
        return share * known[tier] + (1 - share) * known[0]

    def learn(self, tier: int, seen: Sequence[tuple[Acceptance, int, int]], drafted: int) -> None:
        """Learns from a dispatch, see `TierChoice.learn`."""
        taken = self.tiers[tier]
        self._drafted[tier] = _FORGETTING * self._drafted[tier] + drafted
        self._asked[tier] = _FORGETTING * self._asked[tier] + sum(rounds for _, rounds, _ in seen)
        seen = [x for x in seen if not (x[0].lost and taken.head)]
        if not taken.depth or not seen:
            return
        mean = self.accepted(tier)
        self._rounds[tier] *= _FORGETTING
        self._accepted[tier] *= _FORGETTING
        for request, rounds, accepted in seen:
            # A request that is known to accept little counts less against the tier.
            self._rounds[tier] += rounds * request.factor(taken)
            self._accepted[tier] += accepted
            for counts, value in ((request.accepted, accepted), (request.expected, rounds * mean)):
                counts[taken.source] = counts.get(taken.source, 0.0) + value

    def _tokens(self, tier: int, requests: Sequence[Acceptance]) -> float:
        taken, mean = self.tiers[tier], self.accepted(tier)
        return sum((1 + min(mean * request.factor(taken), taken.depth) for request in requests), 0.0)

    def _seconds(self, tier: int, known: Mapping[int, float], *, behind: bool, rounds: int, width: int) -> float:
        waking = self.waking[width] if behind and self.tiers[tier].head else 0.0
        return rounds * self.cost(tier, known) + waking

    def _to_try(
        self, requests: Sequence[Acceptance], rates: Mapping[int, float], best: int, known: Mapping[int, float]
    ) -> int | None:
        """Returns the tier not tried for longest among those that could beat the best one."""

        def could_be_better(tier: int) -> bool:
            taken = self.tiers[tier]
            most = sum(1 + (taken.depth if request.factor(taken) else 0) for request in requests)
            return most / known[tier] > rates[best]

        others = [i for i in rates if i != best and could_be_better(i)]
        return min(others, key=lambda i: self._tried[i], default=None)
