"""The choice of a tier, against simulated requests: no engine, no device."""

import dataclasses

import numpy as np
import pytest

from eagle3_jax.decoding.choice.policy import Acceptance, HeadDebt, TierPolicy
from eagle3_jax.decoding.choice.tiers import WITH_HEAD
from eagle3_jax.decoding.tier import Promise

# (drafts in a row, siblings, rows that the target verifies) of each tier that drafts with a head.
TREES = [tier.tree for tier in WITH_HEAD if tier.head and tier.tree]
SHAPES = [(tree.num_steps, tree.topk, tree.num_draft_tokens) for tree in TREES]
ROUNDS = 4
VANILLA = Promise(0.0, 0, "none", wakes=False, drafts=1.0)


def accepting(depth, siblings, quality):
    """Drafts a round, where the best one is right with probability `quality` and each sibling with a little."""
    right = min(quality * (1 + 0.35 * np.log2(siblings)), 0.97)
    return [right ** (i + 1) for i in range(depth)]


def tiers_for(batch):
    """Tiers, and their costs on a machine that reads its weights in the time of 24 rows' products."""

    def cost(rows, drafts):
        return max(1.0, batch * rows / 24) + drafts * (0.05 + 0.002 * batch)

    tiers, costs = [VANILLA], [cost(1, 0)]
    for depth, siblings, rows in SHAPES:
        guess = float(sum(accepting(depth, siblings, 0.5)))
        tiers.append(Promise(guess, depth, "head", wakes=True, drafts=1.0))
        costs.append(cost(rows, depth))
    return tiers, dict(enumerate(costs))


@dataclasses.dataclass
class Simulated:
    quality: float
    left: int
    known: Acceptance = dataclasses.field(default_factory=Acceptance)
    unread: int = 0


def simulate(batch, waiting, choose, tiers, costs, waking, policy=None):
    """Tokens a second while requests wait. What a dispatch accepted is known one dispatch later."""
    random, waiting = np.random.default_rng(1), [dataclasses.replace(request) for request in waiting]
    for request in waiting:
        request.known = Acceptance()
    running, tokens, seconds, late = [waiting.pop() for _ in range(batch)], 0, 0.0, None
    while waiting:
        behind = any(request.unread for request in running)
        tier = choose([request.known for request in running], behind)
        promise = tiers[tier]
        seconds += ROUNDS * costs[tier]
        if promise.wakes and behind:
            seconds += waking
            for request in running:
                request.unread = 0
        learned = []
        for request in running:
            accepted = 0
            if tier and not request.known.debt.lost:
                depth, siblings, _ = SHAPES[tier - 1]
                right = accepting(depth, siblings, request.quality)[0]
                accepted = sum(int(np.cumprod(x).sum()) for x in random.random((ROUNDS, depth)) < right)
            learned.append((request.known, ROUNDS, accepted))
            tokens += ROUNDS + accepted
            request.left -= ROUNDS + accepted
            request.unread += 0 if promise.wakes else ROUNDS
            request.known.debt.tokens = max(request.known.debt.tokens, request.unread)  # a lost request stays lost
        running = [request if request.left > 0 or not waiting else waiting.pop() for request in running]
        if policy is not None:
            if late is not None:
                policy.learn(*late)
            late = tier, learned, ROUNDS * len(learned)
    return tokens / seconds


HEADS = {
    "useless": lambda random: 0.0,
    "weak": lambda random: 0.25,
    "good": lambda random: 0.7,
    "for some": lambda random: 0.75 if random.random() < 0.3 else 0.1,
}


def rates(batch, head, seed=0):
    """Of the policy, of vanilla decoding, and of the best tier that is always taken."""
    (tiers, costs), waking, random = tiers_for(batch), 1.0, np.random.default_rng(seed)
    count, longest = (160, 300) if batch < 64 else (3 * batch, 100)
    waiting = [Simulated(HEADS[head](random), int(random.integers(20, longest))) for _ in range(count)]
    policy = TierPolicy(tiers, {batch: costs}, {batch: waking})

    def choose(known, behind):
        return policy.choose(known, behind=behind, rounds=ROUNDS, width=batch)

    ours = simulate(batch, waiting, choose, tiers, costs, waking, policy)
    fixed = [simulate(batch, waiting, lambda known, behind, i=i: i, tiers, costs, waking) for i in range(len(tiers))]
    return ours, fixed[0], max(fixed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "batch"),
    [
        pytest.param(head, batch, marks=() if head == "useless" and batch == 4 else pytest.mark.long)
        for head in HEADS
        for batch in (1, 4, 64, 512)
    ],
)
def test_never_slower_than_vanilla_nor_much_than_the_best_tier(head, batch):
    """Whatever the head is worth, and however wide the batch."""
    ours, vanilla, best = rates(batch, head)
    assert ours >= 0.98 * vanilla
    assert ours >= 0.95 * best


@pytest.mark.parametrize(("found", "chosen"), [(0.2, True), (1.0, False)])
def test_a_round_without_drafts_costs_what_vanilla_decoding_does(found, chosen):
    """Copies that are right in one round of five: worth their price only if the other rounds do not pay it too."""
    lookup = Promise(0.3, 8, "text", wakes=False, drafts=0.5)
    policy = TierPolicy([VANILLA, lookup], {1: {0: 1.0, 1: 3.0}}, {1: 0.0})
    for _ in range(300):
        policy.learn(1, [(Acceptance(), 10, 6)], round(10 * found))
    assert policy.cost(1, width=1) == pytest.approx(found * 3.0 + (1 - found), abs=0.01)
    taken = [policy.choose([Acceptance()], behind=False, rounds=ROUNDS, width=1) for _ in range(100)]
    assert (sum(taken) > 90) is chosen


@pytest.mark.long
def test_a_long_rest_saves_no_credit_for_many_tries():
    head = Promise(0.1, 3, "head", wakes=True, drafts=1.0)
    policy = TierPolicy([VANILLA, head], {1: {0: 1.0, 1: 2.0}}, {1: 1.0})
    known, new = [Acceptance(HeadDebt(in_prefix=True))], [Acceptance()]
    assert all(policy.choose(known, behind=True, rounds=ROUNDS, width=1) == 0 for _ in range(5000)), "lost to the head"
    assert 1 <= sum(policy.choose(new, behind=True, rounds=ROUNDS, width=1) for _ in range(200)) <= 3


@pytest.mark.slow
def test_what_is_learned_in_one_width_is_known_in_another():
    """A head that fits the text drafts where it pays, and not in the width where it costs too much or has no price."""
    head = Promise(1.0, 3, "head", wakes=True, drafts=1.0)
    costs = {1: {0: 1.0, 1: 1.2}, 4: {0: 1.1, 1: 3.0}, 8: {0: 1.3}}
    policy = TierPolicy([VANILLA, head], costs, dict.fromkeys(costs, 0.1))

    def taken(width):
        return [policy.choose([Acceptance()] * width, behind=False, rounds=ROUNDS, width=width) for _ in range(100)]

    assert sum(taken(1)) > 90 and sum(taken(4)) < 10 and not sum(taken(8))
    for _ in range(100):
        policy.learn(1, [(Acceptance(), ROUNDS, 0)] * 4, 4 * ROUNDS)
    assert sum(taken(1)) < 20, "a few tries for what was saved in the wider one"


@pytest.mark.slow
def test_of_two_tiers_the_one_that_was_of_no_use_is_tried_again():
    """Its rate is so near vanilla decoding's that hysteresis keeps it, while the other one is free to try."""
    policy = TierPolicy([VANILLA, Promise(1.0, 3, "head", wakes=True, drafts=1.0)], {1: {0: 1.0, 1: 1.1}}, {1: 0.1})
    taken = []
    for turn in range(1000):
        tier = policy.choose([Acceptance()], behind=False, rounds=ROUNDS, width=1)
        taken.append(tier)
        policy.learn(tier, [(Acceptance(), ROUNDS, 2 * ROUNDS * tier * (turn >= 300))], ROUNDS * tier)
    assert sum(taken[200:300]) < 20 and sum(taken[-500:]) > 450
