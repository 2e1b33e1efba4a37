"""The tiers of an engine: those of its trees, or the default ones of its draft.

A fixed tree is one tier. Otherwise there are several, vanilla decoding among them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding.choice.tier_choice import TierChoice
from eagle3_jax.decoding.params import is_number
from eagle3_jax.decoding.tier import VANILLA, Tier
from eagle3_jax.models.drafts.dflash import DFlash
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.target import ModelConfig

_log = logging.getLogger(__name__)


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
