"""Which tier a dispatch takes: the one that promises most tokens a second, never one that costs more than it may.

A tier is a way to run a round: without drafts, with a chain, with a tree. What a round of each costs was measured; what
it accepts is learned while requests run. Expected tokens over cost decide. What is not the best by that belief is tried
now and then, for a fixed share of the time: acceptance changes with the text, and a belief that is never tested stays
wrong. A cost belongs to a width (rows of the program), acceptance to the text. Pure arithmetic on the host; time is the
costs' own, so that all processes of a mesh decide alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from eagle3_jax.decoding.device.catch_up import HeadDebt

# Share of the time that may go into tiers which are believed to be slower, and what may be lent of it at the start.
EXPLORED = 0.01
_LENT = 8  # rounds of the first tier
# What was seen counts half as much after so many dispatches that saw it again.
_HALF_LIFE = 32
_FORGETTING = 0.5 ** (1 / _HALF_LIFE)
# A belief without evidence weighs as much as so many rounds, that about one request as so many accepted drafts.
_PRIOR_ROUNDS = 16
_PRIOR_DRAFTS = 3
# Another tier must promise so much more, or dispatches would alternate between equals.
_HYSTERESIS = 0.02
# Rounds over which the price of waking a resting head is spread.
_AHEAD = 64


@dataclasses.dataclass(frozen=True)
class Promise:
    """What a tier is before anything is known of it.

    Attributes:
        accepted: drafts a round, as a guess. most: of them.
        source: of its drafts; tiers of one source are good or bad together.
        wakes: its drafts come from the head, which must have read what was decoded while it rested.
        drafts: share of its rounds in which there is something to draft, as a guess; the others are vanilla decoding's.
    """

    accepted: float
    most: int
    source: str
    wakes: bool
    drafts: float


@dataclasses.dataclass
class Acceptance:
    """How well drafts fit one request: accepted ones, and how many were expected of an average request, by source.

    Attributes:
        debt: what the head has not read of the request.
    """

    debt: HeadDebt = dataclasses.field(default_factory=HeadDebt)
    accepted: dict[str, float] = dataclasses.field(default_factory=dict)
    expected: dict[str, float] = dataclasses.field(default_factory=dict)

    def factor(self, tier: Promise) -> float:
        """Of what an average request accepts."""
        if self.debt.lost and tier.wakes:
            return 0.0
        accepted, expected = self.accepted.get(tier.source, 0.0), self.expected.get(tier.source, 0.0)
        return (accepted + _PRIOR_DRAFTS) / (expected + _PRIOR_DRAFTS)


class TierPolicy:
    """Chooses, and learns from what was accepted. The first tier is vanilla decoding.

    Args:
        costs: by width: seconds of a round with drafts, of each tier that is taken there; of vanilla decoding always.
        waking: by width: seconds to let a head that rested read what was decoded meanwhile.
    """

    def __init__(
        self, tiers: Sequence[Promise], costs: Mapping[int, Mapping[int, float]], waking: Mapping[int, float]
    ) -> None:
        self.tiers, self.costs, self.waking = list(tiers), costs, waking
        self.current = 0
        self._rounds = [0.0] * len(tiers)  # of single requests, old ones discounted
        self._accepted = [0.0] * len(tiers)
        self._drafted = [_PRIOR_ROUNDS * tier.drafts for tier in tiers]  # of `_asked` rounds, old ones discounted
        self._asked = [float(_PRIOR_ROUNDS)] * len(tiers)
        self._tried = [0] * len(tiers)  # the last dispatch of each
        self._dispatches = 0
        self._budget: float | None = None  # the first dispatch says how wide it is

    def accepted(self, tier: int) -> float:
        """Drafts a round that an average request is believed to accept.

        Of what was not seen the guess stands, times how right the guesses were for other tiers of the same source.
        """
        source = self.tiers[tier].source
        seen = [i for i, other in enumerate(self.tiers) if other.source == source]
        guessed = sum(self._rounds[i] * self.tiers[i].accepted for i in seen)
        prior = _PRIOR_ROUNDS * self.tiers[tier].accepted
        quality = (sum(self._accepted[i] for i in seen) + prior) / (guessed + prior) if prior else 0.0
        return (self._accepted[tier] + prior * quality) / (self._rounds[tier] + _PRIOR_ROUNDS)

    def choose(
        self, requests: Sequence[Acceptance], *, behind: bool, rounds: int, width: int, retired: Collection[str] = ()
    ) -> int:
        """The tier of the next dispatch.

        Args:
            requests: of the running requests.
            behind: the head has not read all that they decoded.
            rounds: that the dispatch will have. width: of its program.
            retired: sources whose tiers are not taken.
        """
        self._dispatches += 1
        known = self.costs[width]
        rates = {
            i: self._rate(i, requests, behind=behind, rounds=_AHEAD, width=width)
            for i in known
            if self.tiers[i].source not in retired
        }
        best = max(rates, key=lambda i: rates[i] * (1 + _HYSTERESIS * (i == self.current)))
        budget = _LENT * known[0] if self._budget is None else self._budget
        dearest = rounds * max(known.values()) + self.waking[width]  # no more than a try can take is saved
        budget = min(budget + EXPLORED * rounds * self.cost(best, width), max(budget, dearest))
        self.current = best
        other = self._to_try(requests, rates, best, known)
        if other is not None:
            # What the dispatch takes longer than the best tier would for as many tokens.
            wasted = self._seconds(other, behind=behind, rounds=rounds, width=width)
            wasted -= self._tokens(other, requests) * rounds / (rates[best] or 1)
            if wasted <= budget:
                budget -= max(wasted, 0)
                best = other
                if wasted <= 0:  # no try: kept by hysteresis alone, the current one would be shut out unseen
                    self.current = other
        self._budget = budget
        self._tried[best] = self._dispatches
        return best

    def cost(self, tier: int, width: int) -> float:
        """Seconds of a round, with drafts or without."""
        share = self._drafted[tier] / self._asked[tier]
        return share * self.costs[width][tier] + (1 - share) * self.costs[width][0]

    def learn(self, tier: int, seen: Sequence[tuple[Acceptance, int, int]], drafted: int) -> None:
        """Learns from a dispatch.

        Args:
            seen: of each request: its rounds and the drafts that they accepted.
            drafted: rounds with drafts, of all of them.
        """
        promise = self.tiers[tier]
        self._drafted[tier] = _FORGETTING * self._drafted[tier] + drafted
        self._asked[tier] = _FORGETTING * self._asked[tier] + sum(rounds for _, rounds, _ in seen)
        seen = [x for x in seen if not (x[0].debt.lost and promise.wakes)]
        if not promise.most or not seen:
            return
        mean = self.accepted(tier)
        self._rounds[tier] *= _FORGETTING
        self._accepted[tier] *= _FORGETTING
        for request, rounds, accepted in seen:
            # Few drafts of a request that is known to accept few say nothing against the tier.
            self._rounds[tier] += rounds * request.factor(promise)
            self._accepted[tier] += accepted
            for counts, value in ((request.accepted, accepted), (request.expected, rounds * mean)):
                counts[promise.source] = counts.get(promise.source, 0.0) + value

    def _tokens(self, tier: int, requests: Sequence[Acceptance]) -> float:
        """Expected of a round."""
        promise, mean = self.tiers[tier], self.accepted(tier)
        return sum((1 + min(mean * request.factor(promise), promise.most) for request in requests), 0.0)

    def _seconds(self, tier: int, *, behind: bool, rounds: int, width: int) -> float:
        waking = self.waking[width] if behind and self.tiers[tier].wakes else 0.0
        return rounds * self.cost(tier, width) + waking

    def _rate(self, tier: int, requests: Sequence[Acceptance], *, behind: bool, rounds: int, width: int) -> float:
        return rounds * self._tokens(tier, requests) / self._seconds(tier, behind=behind, rounds=rounds, width=width)

    def _to_try(
        self, requests: Sequence[Acceptance], rates: Mapping[int, float], best: int, known: Mapping[int, float]
    ) -> int | None:
        """The tier that was not tried for longest, of these that could be better than the best one."""

        def could_be_better(tier: int) -> bool:
            promise = self.tiers[tier]
            most = sum(1 + (promise.most if request.factor(promise) else 0) for request in requests)
            return most / known[tier] > rates[best]

        others = [i for i in rates if i != best and could_be_better(i)]
        return min(others, key=lambda i: self._tried[i], default=None)
