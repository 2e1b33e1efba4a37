"""The tiers of an engine: those of its trees, or the default ones of its draft.

A fixed tree is one tier. Otherwise there are several, vanilla decoding among them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from eagle3_jax.config import DraftTree
from eagle3_jax.config.checks import require
from eagle3_jax.decoding.choice.tier_choice import TierChoice
from eagle3_jax.decoding.params import is_number
from eagle3_jax.decoding.tier import VANILLA, Tier
from eagle3_jax.models.drafts.head import CHAIN as FIRST
from eagle3_jax.models.drafts.head import TREES, Draft, Head
from eagle3_jax.models.target_config import ModelConfig

_log = logging.getLogger(__name__)

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
