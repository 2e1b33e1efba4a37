"""The tiers of an engine, and the choice of each dispatch's: the policy's where costs are known, else the default.

A fixed tree is one tier; else there are vanilla decoding and those of its trees or its draft.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from eagle3_jax.config import DraftTree
from eagle3_jax.config.checks import require
from eagle3_jax.decoding.choice.costs import Costs
from eagle3_jax.decoding.choice.policy import Acceptance, Price, TierPolicy
from eagle3_jax.decoding.params import is_number
from eagle3_jax.decoding.tier import VANILLA, Tier
from eagle3_jax.models.drafts.head import CHAIN as FIRST
from eagle3_jax.models.drafts.head import TREES, Draft, Head
from eagle3_jax.models.target_config import ModelConfig

_log = logging.getLogger(__name__)

# Largest share of its drafts that a tier may need accepted to pay (2 of a chain of 3). A tier that needs more is not
# compiled.
_MOST = 2 / 3
# Acceptance length below which a head is useless, and the rounds of single requests that show it.
USELESS = 1.05
_ROUNDS_TO_TELL = 256
_MANY = 2**20  # tokens of a context whose attention takes all the time

LOOKUP = Tier(DraftTree(num_steps=8, num_draft_tokens=9, lookup_tokens=8), head=False)
CHAIN = Tier(FIRST, head=True)
WITH_LOOKUP = (VANILLA, Tier(DraftTree(num_steps=3, num_draft_tokens=4, lookup_tokens=3), head=False), LOOKUP)
WITH_HEAD = (VANILLA, LOOKUP, *(Tier(tree, head=True) for tree in TREES))


def of_head(head: Head) -> tuple[Tier, ...]:
    """Makes the tiers of the sizes that a head drafts in unless others are asked for."""
    return (VANILLA, LOOKUP, *(Tier(tree, head=True) for tree in head.trees))


def choice_for(
    target: ModelConfig,
    draft: Draft | Literal["lookup"] | None,
    tree: DraftTree | Sequence[DraftTree] | Literal["auto"],
    simulated: float | None = None,
    *,
    sample_drafts: bool = True,
) -> TierChoice:
    """Makes the tiers of an engine, see `Engine`. Raises ValueError: a draft that does not fit, or a tree the draft."""
    trees: list[Any] = [] if tree == "auto" else list(tree) if isinstance(tree, list | tuple) else [tree]
    known = (trees or tree == "auto") and all(isinstance(x, DraftTree) for x in trees)
    require(bool(known), "tree", tree, "a DraftTree, a list of them, or 'auto'")
    drafts = draft is None or isinstance(draft, Draft) or draft == "lookup"
    require(drafts, "draft", draft, "a loaded head or 'lookup'; `Engine.load` takes folders")
    if draft is None:
        require(not trees and simulated is None, "draft", None, f"a draft head or 'lookup' for {tree}")
        return TierChoice([VANILLA], VANILLA)
    is_share = simulated is None or (is_number(simulated) and 0 <= simulated <= 1)
    require(is_share, "simulated_acceptance", simulated, "0 to 1, or None")
    if isinstance(draft, str):
        every, default = WITH_LOOKUP, LOOKUP
        for x in trees:
            is_chain = x.topk == 1 and x.num_draft_tokens == x.num_steps + 1
            require(is_chain, "tree", x, "a chain (topk=1) for draft='lookup'")
        own = [Tier(replace(x, lookup_tokens=x.num_steps), head=False) for x in trees]
    else:
        _check(draft, target, trees)
        every, default = of_head(draft.head), Tier(draft.head.first_tree, head=True)
        own = [Tier(x, head=True) for x in trees]
    if own:
        every, default = own if isinstance(tree, DraftTree) else [VANILLA, *own], own[0]
    require(len({tier.name for tier in every}) == len(every), "tree", tree, "different sizes")
    if not sample_drafts:
        every = [replace(x, tree=x.tree and replace(x.tree, sample_drafts=False)) for x in every]
    if simulated is not None:
        _log.warning("acceptance is simulated (%s): answers are not the target's, only times mean something", simulated)
        every = [x if x.tree is None else replace(x, simulated=simulated) for x in every]
    return TierChoice(every, next(x for x in every if x.name == default.name))


def _check(draft: Draft, target: ModelConfig, trees: Sequence[DraftTree]) -> None:
    head = draft.head.config
    for field in ("vocab_size", "aux_layers"):
        got, expected = getattr(head, field), getattr(target, field)
        require(got == expected, f"draft.{field}", got, f"the target's {expected}")
    if head.aux_layers and head.hidden_size != target.hidden_size:  # such a head reads the target's embeddings too
        raise ValueError(f"draft.hidden_size: got {head.hidden_size}, expected {target.hidden_size}")
    most, deepest = draft.head.most_children, draft.head.drafts
    name = "the draft vocabulary" if most == head.draft_vocab_size else "the head's candidates"
    for tree in trees:
        require(tree.topk <= most, "tree.topk", tree.topk, f"at most {name}, {most}")
        fits = deepest is None or tree.num_steps <= deepest
        require(fits, "tree.num_steps", tree.num_steps, f"at most the head's {deepest}")


class TierChoice:
    """The choice of each dispatch's tier: vanilla decoding first, where there are several.

    `default` is the tier until costs are known; any thread may set it.
    """

    def __init__(self, tiers: Sequence[Tier], default: Tier) -> None:
        self.tiers, self.default = tuple(tiers), default
        self.dispatches = {tier.name: 0 for tier in tiers}  # their number
        self.pinned: Tier | None = None  # of all dispatches, for measurements; None leaves the choice
        self.latest: str | None = None  # name of the latest tier
        self._policies: dict[bool, TierPolicy] = {}  # by whether all requests are greedy; empty without costs
        self.renew()

    def renew(self) -> None:
        """Forgets the acceptance of the replaced head, and lets the new one draft."""
        self._drafted_rounds = self._accepted = 0
        self._told = False
        self._retired: set[str] = set()  # sources of drafts; kept here, since there may be no policies yet

    def price(self, costs: Mapping[int, Costs], *, greedy: bool) -> None:
        """Sets tiers' costs at some widths, of greedy requests or others; there tiers without any are not taken."""
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
        """Keeps the tiers that, with most drafts accepted, beat vanilla decoding beside a short or a long context."""

        def pays(tier: Tier, tokens: int) -> bool:
            fastest, seconds = (
                known[name] + costs.growth.get(name, 0.0) * tokens for name in (self.tiers[0].name, tier.name)
            )
            return seconds <= fastest * (1 + _MOST * tier.depth)

        known = costs.rounds
        kept = {x.name for x in self.tiers if x.name in known and any(pays(x, tokens) for tokens in (0, _MANY))}
        return replace(costs, rounds={name: seconds for name, seconds in known.items() if name in kept})

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
        """Learns from a dispatch: each request's acceptance, rounds, accepted drafts; the `drafted` rounds of all."""
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
