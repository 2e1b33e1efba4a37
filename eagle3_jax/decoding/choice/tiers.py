"""Tiers, the ways to run a round, and the choice among them for each dispatch.

A fixed tree is one tier. Otherwise there are several, vanilla decoding among them. Their costs are measured when an
engine warms up; the policy then chooses for every dispatch.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding.choice.policy import Acceptance, Promise, TierPolicy
from eagle3_jax.decoding.params import is_number
from eagle3_jax.decoding.rounds.tree import scratch_tokens
from eagle3_jax.models.drafts.dflash import DFlash
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.target import ModelConfig

# Largest share of its drafts that a tier may need accepted to pay (2 of a chain of 3). A tier that needs more is not
# compiled.
_MOST = 2 / 3
# Acceptance length below which a head is useless, and the rounds of single requests that show it.
USELESS = 1.05
_ROUNDS_TO_TELL = 256

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Tier:
    """A way to run a round.

    Attributes:
        tree: shape of the draft; None is vanilla decoding.
        head: whether the head drafts; it rests otherwise.
        simulated: for benchmarks: the probability with which each draft is accepted; None asks the target.
    """

    tree: DraftTree | None
    head: bool
    simulated: float | None = None

    @property
    def name(self) -> str:
        """Its name: "vanilla", "lookup 8", "chain 3", "tree 3, 3, 8", "tree 3, 3, 8 and lookup 7"."""
        if self.tree is None:
            return "vanilla"
        steps, topk, size, copied = (
            getattr(self.tree, field) for field in ("num_steps", "topk", "num_draft_tokens", "lookup_tokens")
        )
        if not self.head:
            return f"lookup {copied}"
        name = f"chain {steps}" if topk == 1 and not copied else f"tree {steps}, {topk}, {size}"
        return f"{name} and lookup {copied}" if copied else name

    @property
    def copies_alone(self) -> bool:
        """True if it drafts from the text without the head; its round without a match is vanilla decoding's."""
        return self.tree is not None and not self.head

    @property
    def topk(self) -> int:
        return 1 if self.tree is None else self.tree.topk

    @property
    def promise(self) -> Promise:
        """The guess of its acceptance, from heads for small targets (docs/benchmarks.md)."""
        if self.tree is None:
            return Promise(0.0, 0, "none", wakes=False, drafts=1.0)
        copies = 0.3 if self.tree.lookup_tokens else 0.0
        if not self.head:
            return Promise(copies, self.tree.depth, "text", wakes=False, drafts=0.5)
        first = 0.45 + 0.1 * math.log2(self.tree.topk)
        guess = sum(first**depth for depth in range(1, self.tree.num_steps + 1))
        return Promise(guess + copies, self.tree.depth, "head", wakes=True, drafts=1.0)


VANILLA = Tier(None, head=False)
LOOKUP = Tier(DraftTree(num_steps=8, num_draft_tokens=9, lookup_tokens=8), head=False)
CHAIN = Tier(DraftTree(num_steps=3, num_draft_tokens=4), head=True)
WITH_LOOKUP = (VANILLA, Tier(DraftTree(num_steps=3, num_draft_tokens=4, lookup_tokens=3), head=False), LOOKUP)
WITH_HEAD = (
    VANILLA,
    LOOKUP,
    Tier(DraftTree(num_steps=1, num_draft_tokens=2), head=True),
    CHAIN,
    Tier(DraftTree(num_steps=3, topk=3, num_draft_tokens=8, lookup_tokens=7), head=True),
    Tier(DraftTree(num_steps=5, topk=4, num_draft_tokens=16, lookup_tokens=8), head=True),
)


def of_block(drafts: int, topk: int) -> tuple[Tier, ...]:
    """Makes the tiers of a head that drafts a block in one pass: parts of the block, and trees over it.

    Args:
        drafts: tokens of the block, its anchor excluded.
        topk: most children of a node.
    """

    def chain(steps: int) -> Tier:
        return Tier(DraftTree(num_steps=steps, num_draft_tokens=steps + 1), head=True)

    def tree(nodes: int, copied: int) -> Tier:
        wide = min(4, topk)
        pool = 1 + wide + (drafts - 1) * wide**2
        return Tier(
            DraftTree(num_steps=drafts, topk=wide, num_draft_tokens=min(nodes, pool), lookup_tokens=copied), head=True
        )

    chains = [chain(steps) for steps in sorted({min(2, drafts), -(-drafts // 2), drafts})]
    trees = [tree(max(nodes, drafts + 1), copied) for nodes, copied in ((8, 7), (16, 8), (32, 8))] if topk > 1 else []
    return (VANILLA, LOOKUP, *chains, *dict.fromkeys(trees))


def depth_of(tiers: Sequence[Tier]) -> int:
    """Returns the most drafts that one round of any tier accepts."""
    return max(0 if tier.tree is None else tier.tree.depth for tier in tiers)


def nodes_of(tiers: Sequence[Tier]) -> int:
    """Returns the most nodes of a round's tree in any tier, the root included."""
    return max(1 if tier.tree is None else tier.tree.num_draft_tokens for tier in tiers)


def scratch_of(tiers: Sequence[Tier]) -> int:
    """Returns the most cache entries that a round of any tier writes behind the committed tokens."""
    return max(scratch_tokens(tier.tree) for tier in tiers)


def copies(tiers: Sequence[Tier]) -> bool:
    """Tells whether any tier copies drafts from the text."""
    return any(tier.tree is not None and tier.tree.lookup_tokens > 0 for tier in tiers)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds. Attributes: rounds: a round of each tier, by name. waking: a rested head reads the tokens it missed."""

    rounds: dict[str, float]
    waking: float


class TierChoice:
    """The choice of each dispatch's tier: the policy's where costs are known, else the default.

    Args:
        tiers: vanilla decoding first, where there are several.
        default: tier until costs are known.

    Attributes:
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

    @property
    def simulated(self) -> float | None:
        return self.tiers[-1].simulated

    def renew(self) -> None:
        """Forgets the acceptance of the replaced head, and lets the new one draft."""
        self._drafted_rounds = self._accepted = 0
        self._told = False
        self._retired: set[str] = set()  # sources of drafts; kept here, since there may be no policies yet

    def price(self, costs: Mapping[int, Costs], *, greedy: bool) -> None:
        """Sets the tiers' costs at some widths, where all requests are greedy or where not; there others are not taken.

        At widths without costs the default is taken.
        """
        rounds = {
            width: {i: known.rounds[tier.name] for i, tier in enumerate(self.tiers) if tier.name in known.rounds}
            for width, known in costs.items()
        }
        waking = {width: known.waking for width, known in costs.items()}
        if greedy in self._policies:
            self._policies[greedy].price(rounds, waking)
        else:
            self._policies[greedy] = TierPolicy([tier.promise for tier in self.tiers], rounds, waking)

    def useful(self, costs: Costs) -> Costs:
        """Keeps the tiers worth choosing: with most drafts accepted they are faster than vanilla decoding."""
        fastest, known = costs.rounds[self.tiers[0].name], costs.rounds
        kept = {x.name for x in self.tiers if known.get(x.name, math.inf) <= fastest * (1 + _MOST * x.promise.most)}
        return Costs({name: seconds for name, seconds in known.items() if name in kept}, costs.waking)

    def choose(
        self,
        requests: Sequence[Acceptance],
        *,
        greedy: bool,
        behind: bool,
        rounds: int,
        width: int,
        drafts: bool = True,
    ) -> Tier:
        """Chooses the tier of the next dispatch, see `TierPolicy.choose`; `drafts`: whether any request wants them."""
        if self.pinned is not None:
            tier = self.pinned
        elif not drafts:
            tier = VANILLA
        elif (policy := self._policies.get(greedy)) and width in policy.costs:
            retired = self._retired
            tier = self.tiers[policy.choose(requests, behind=behind, rounds=rounds, width=width, retired=retired)]
        else:
            tier = VANILLA if self._retired else self.default
        self.dispatches[tier.name] += 1
        self.latest = tier.name
        return tier

    def learn(self, tier: Tier, seen: Sequence[tuple[Acceptance, int, int]], drafted: int, *, greedy: bool) -> None:
        """Learns from a dispatch.

        Args:
            seen: for each request its acceptance, its rounds, and the drafts accepted in them.
            drafted: rounds with drafts, of all requests.
        """
        if self.pinned is None and (policy := self._policies.get(greedy)):
            policy.learn(self.tiers.index(tier), seen, drafted)
        if tier.head and tier.tree is not None and not tier.tree.lookup_tokens:
            drafting = [(rounds, accepted) for request, rounds, accepted in seen if not request.debt.lost]
            self._watch(sum(rounds for rounds, _ in drafting), sum(accepted for _, accepted in drafting))

    def _watch(self, rounds: int, accepted: int) -> None:
        """Warns once of a useless head, and lets it rest where there is a choice."""
        if self._told:
            return
        self._drafted_rounds += rounds
        self._accepted += accepted
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


def choice_for(
    target: ModelConfig,
    draft: Draft | Literal["lookup"] | None,
    tree: DraftTree | Sequence[DraftTree] | Literal["auto"],
    simulated: float | None = None,
    *,
    sample_drafts: bool = True,
) -> TierChoice:
    """Makes the tiers of an engine.

    Args:
        sample_drafts: False: no tree draws its drafts.

    Raises:
        ValueError: a draft that does not fit the target, or a tree the draft.
    """
    trees: list[Any] = [] if tree == "auto" else list(tree) if isinstance(tree, list | tuple) else [tree]
    if (not trees and tree != "auto") or not all(isinstance(x, DraftTree) for x in trees):
        raise ValueError(f"tree: got {tree!r}, expected a DraftTree, a list of them, or 'auto'")
    if draft is not None and not isinstance(draft, Draft) and draft != "lookup":
        raise ValueError(f"draft: got {draft!r}, expected a loaded head or 'lookup'; `Engine.load` takes folders")
    if draft is None and (trees or simulated is not None):
        raise ValueError(f"draft: got None, expected a draft head or 'lookup' for {tree}")
    if simulated is not None and not (is_number(simulated) and 0 <= simulated <= 1):
        raise ValueError(f"simulated_acceptance: got {simulated!r}, expected 0 to 1, or None")
    if draft is None:
        return TierChoice([VANILLA], VANILLA)
    if isinstance(draft, str):
        every, default = WITH_LOOKUP, LOOKUP
        for x in trees:
            if x.topk > 1 or x.num_draft_tokens != x.num_steps + 1:
                raise ValueError(f"tree: got {x}, expected a chain (topk=1) for draft='lookup'")
        own = [Tier(replace(x, lookup_tokens=x.num_steps), head=False) for x in trees]
    else:
        _check(draft, target, trees)
        every, default = [x for x in WITH_HEAD if x.topk <= draft.head.config.draft_vocab_size], CHAIN
        if isinstance(draft.head, DFlash):
            every = of_block(draft.head.drafts, draft.head.most_children)
            default = next(x for x in every if x.name == f"chain {draft.head.drafts}")
        own = [Tier(x, head=True) for x in trees]
    if own:
        every, default = own if isinstance(tree, DraftTree) else [VANILLA, *own], own[0]
    if len({tier.name for tier in every}) < len(every):
        raise ValueError(f"tree: got {tree}, expected different sizes")
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
        if got != expected:
            raise ValueError(f"draft.{field}: got {got}, expected the target's {expected}")
    if head.aux_layers and head.hidden_size != target.hidden_size:  # such a head reads the target's embeddings too
        raise ValueError(f"draft.hidden_size: got {head.hidden_size}, expected {target.hidden_size}")
    block = isinstance(draft.head, DFlash)
    most = draft.head.most_children if isinstance(draft.head, DFlash) else head.draft_vocab_size
    for tree in trees:
        if tree.topk > most:
            name = "the head's candidates" if block else "the draft vocabulary"
            raise ValueError(f"tree.topk: got {tree.topk}, expected at most {name}, {most}")
        if isinstance(draft.head, DFlash) and tree.num_steps > draft.head.drafts:
            raise ValueError(f"tree.num_steps: got {tree.num_steps}, expected at most the block's {draft.head.drafts}")
