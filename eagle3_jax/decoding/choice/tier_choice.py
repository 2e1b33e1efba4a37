"""The choice of each dispatch's tier: the policy's where costs are known, else the default."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from eagle3_jax.decoding.choice.costs import Costs
from eagle3_jax.decoding.choice.policy import Acceptance, Price, TierPolicy
from eagle3_jax.decoding.tier import VANILLA, Tier

# Largest share of its drafts that a tier may need accepted to pay (2 of a chain of 3). A tier that needs more is not
# compiled.
_MOST = 2 / 3
# Acceptance length below which a head is useless, and the rounds of single requests that show it.
USELESS = 1.05
_ROUNDS_TO_TELL = 256
_MANY = 2**20  # tokens of a context whose attention takes all the time

_log = logging.getLogger(__name__)


class TierChoice:
    """The choice of each dispatch's tier.

    Attributes:
        tiers: vanilla decoding first, where there are several.
        default: tier until costs are known; any thread may set it.
        pinned: tier of all dispatches, for measurements; None leaves the choice.
        dispatches: number of dispatches of each tier, by name.
        latest: name of the latest tier.
    """

    def __init__(self, tiers: Sequence[Tier], default: Tier) -> None:
        self.tiers, self.default = tuple(tiers), default
        self.dispatches = {tier.name: 0 for tier in tiers}
        self.pinned: Tier | None = None
        self.latest: str | None = None
        self._policies: dict[bool, TierPolicy] = {}  # by whether all requests are greedy; empty without costs
        self.renew()

    def renew(self) -> None:
        """Forgets the acceptance of the replaced head, and lets the new one draft."""
        self._drafted_rounds = self._accepted = 0
        self._told = False
        self._retired: set[str] = set()  # sources of drafts; kept here, since there may be no policies yet

    def price(self, costs: Mapping[int, Costs], *, greedy: bool) -> None:
        """Sets the tiers' costs at some widths, where all requests are greedy or where not.

        There tiers without costs are not taken, and the default is at widths without costs.
        """
        rounds = {
            width: {
                i: Price(known.rounds[tier.name], known.growth.get(tier.name, 0.0), known.length)
                for i, tier in enumerate(self.tiers)
                if tier.name in known.rounds
            }
            for width, known in costs.items()
        }
        waking = {width: known.waking for width, known in costs.items()}
        self._policies.setdefault(greedy, TierPolicy(self.tiers, {}, {})).price(rounds, waking)

    def useful(self, costs: Costs) -> Costs:
        """Keeps the tiers worth choosing: with most drafts accepted they are faster than vanilla decoding.

        A tier that is so beside a short context or a long one is kept.
        """

        def pays(tier: Tier, tokens: int) -> bool:
            fastest, seconds = (
                known[name] + costs.growth.get(name, 0.0) * tokens for name in (self.tiers[0].name, tier.name)
            )
            return seconds <= fastest * (1 + _MOST * tier.depth)

        known = costs.rounds
        kept = {x.name for x in self.tiers if x.name in known and any(pays(x, tokens) for tokens in (0, _MANY))}
        return dataclasses.replace(costs, rounds={name: seconds for name, seconds in known.items() if name in kept})

    def choose(
        self, requests: Sequence[Acceptance], *, greedy: bool, width: int, drafts: bool = True, **asked: Any
    ) -> Tier:
        """Chooses the tier of the next dispatch, see `TierPolicy.choose`; `drafts`: whether any request wants them."""
        if self.pinned is not None:
            tier = self.pinned
        elif not drafts:
            tier = VANILLA
        elif (policy := self._policies.get(greedy)) and width in policy.costs:
            tier = self.tiers[policy.choose(requests, width=width, retired=self._retired, **asked)]
        else:
            tier = VANILLA if self._retired else self.default
        self.dispatches[tier.name] += 1
        self.latest = tier.name
        return tier

    def learn(self, tier: Tier, seen: Sequence[tuple[Acceptance, int, int]], drafted: int, *, greedy: bool) -> None:
        """Learns from a dispatch; `seen`: of each request its acceptance, its rounds, and the drafts accepted in them.

        `drafted`: rounds with drafts, of all requests.
        """
        if self.pinned is None and (policy := self._policies.get(greedy)):
            policy.learn(self.tiers.index(tier), seen, drafted)
        if tier.head and not tier.copies and not self._told:
            self._watch([(rounds, accepted) for request, rounds, accepted in seen if not request.lost])

    def _watch(self, seen: Sequence[tuple[int, int]]) -> None:
        """Warns once of a useless head, and lets it rest where there is a choice."""
        self._drafted_rounds += sum(rounds for rounds, _ in seen)
        self._accepted += sum(accepted for _, accepted in seen)
        if self._drafted_rounds < _ROUNDS_TO_TELL:
            return
        self._told = True
        length = 1 + self._accepted / self._drafted_rounds
        if length >= USELESS:
            return
        if VANILLA in self.tiers:
            self._retired.add("head")
        _log.warning(
            "draft head: acceptance length %.2f over %d rounds, expected well above 1. Answers are right, but drafts "
            "are of no use: was the head trained for this target, its aux layers and its chat template? %s",
            length,
            self._drafted_rounds,
            "It rests from now on." if self._retired else "It goes on drafting: no other tier was asked for.",
        )
