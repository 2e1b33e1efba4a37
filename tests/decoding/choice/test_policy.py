"""The choice of a tier, against simulated requests: no engine, no device."""

import dataclasses

import numpy as np
import pytest

from eagle3_jax.decoding.choice.policy import Acceptance, Price, TierPolicy
from eagle3_jax.decoding.choice.tiers import CHAIN, LOOKUP, VANILLA, WITH_HEAD

HEAD = [VANILLA, *(tier for tier in WITH_HEAD if tier.head)]
ROUNDS = 4


def accepting(depth, siblings, quality):
    """Drafts a round, where the best one is right with probability `quality` and each sibling with a little."""
    right = min(quality * (1 + 0.35 * np.log2(siblings)), 0.97)
    return [right ** (i + 1) for i in range(depth)]


def costs_for(batch):
    """On a machine that reads its weights in the time of 24 rows' products."""
    drafting = [max(1.0, batch * tier.nodes / 24) + tier.depth * (0.05 + 0.002 * batch) for tier in HEAD]
    return dict(enumerate(drafting))


@dataclasses.dataclass
class Simulated:
    quality: float
    left: int
    known: Acceptance = dataclasses.field(default_factory=Acceptance)
    unread: int = 0


def simulate(batch, waiting, choose, costs, waking, policy=None):
    """Tokens a second while requests wait. What a dispatch accepted is known one dispatch later."""
    random, waiting = np.random.default_rng(1), [dataclasses.replace(request) for request in waiting]
    for request in waiting:
        request.known = Acceptance()
    running, tokens, seconds, late = [waiting.pop() for _ in range(batch)], 0, 0.0, None
    while waiting:
        behind = any(request.unread for request in running)
        tier = choose([request.known for request in running], behind)
        seconds += ROUNDS * costs[tier]
        if tier and behind:
            seconds += waking
            for request in running:
                request.unread = 0
        learned = []
        for request in running:
            accepted = 0
            if tier and not request.known.lost:
                depth, tree = HEAD[tier].depth, HEAD[tier].tree
                right = accepting(depth, tree.topk, request.quality)[0]
                accepted = sum(int(np.cumprod(x).sum()) for x in random.random((ROUNDS, depth)) < right)
            learned.append((request.known, ROUNDS, accepted))
            tokens += ROUNDS + accepted
            request.left -= ROUNDS + accepted
            request.unread += 0 if tier else ROUNDS
            request.known.unread = max(request.known.unread, request.unread)  # a lost request stays lost
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


def prices(costs):
    return {width: {tier: Price(seconds) for tier, seconds in known.items()} for width, known in costs.items()}


def rates(batch, head, seed=0):
    """Of the policy, of vanilla decoding, and of the best tier that is always taken."""
    costs, waking, random = costs_for(batch), 1.0, np.random.default_rng(seed)
    count, longest = (160, 300) if batch < 64 else (3 * batch, 100)
    waiting = [Simulated(HEADS[head](random), int(random.integers(20, longest))) for _ in range(count)]
    policy = TierPolicy(HEAD, prices({batch: costs}), {batch: waking})

    def choose(known, behind):
        return policy.choose(known, behind=behind, rounds=ROUNDS, width=batch)

    ours = simulate(batch, waiting, choose, costs, waking, policy)
    fixed = [simulate(batch, waiting, lambda known, behind, i=i: i, costs, waking) for i in costs]
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
    policy = TierPolicy([VANILLA, LOOKUP], prices({1: {0: 1.0, 1: 3.0}}), {1: 0.0})
    for _ in range(300):
        policy.learn(1, [(Acceptance(), 10, 6)], round(10 * found))
    assert policy.cost(1, policy.known(1, 0)) == pytest.approx(found * 3.0 + (1 - found), abs=0.01)
    taken = [policy.choose([Acceptance()], behind=False, rounds=ROUNDS, width=1) for _ in range(100)]
    assert (sum(taken) > 90) is chosen


@pytest.mark.slow
def test_what_is_learned_in_one_width_is_known_in_another():
    """A head that fits the text drafts where it pays, and not in the width where it costs too much or has no price."""
    costs = {1: {0: 1.0, 1: 1.2}, 4: {0: 1.1, 1: 3.0}, 8: {0: 1.3}}
    policy = TierPolicy([VANILLA, CHAIN], prices(costs), dict.fromkeys(costs, 0.1))

    def taken(width):
        return [policy.choose([Acceptance()] * width, behind=False, rounds=ROUNDS, width=width) for _ in range(100)]

    assert sum(taken(1)) > 90 and sum(taken(4)) < 10 and not sum(taken(8))
    for _ in range(100):
        policy.learn(1, [(Acceptance(), ROUNDS, 0)] * 4, 4 * ROUNDS)
    assert sum(taken(1)) < 20, "a few tries for what was saved in the wider one"


@pytest.mark.slow
def test_of_two_tiers_the_one_that_was_of_no_use_is_tried_again():
    """Its rate is so near vanilla decoding's that hysteresis keeps it, while the other one is free to try."""
    policy = TierPolicy([VANILLA, CHAIN], prices({1: {0: 1.0, 1: 1.1}}), {1: 0.1})
    taken = []
    for turn in range(1000):
        tier = policy.choose([Acceptance()], behind=False, rounds=ROUNDS, width=1)
        taken.append(tier)
        policy.learn(tier, [(Acceptance(), ROUNDS, 2 * ROUNDS * tier * (turn >= 300))], ROUNDS * tier)
    assert sum(taken[200:300]) < 20 and sum(taken[-500:]) > 450


@pytest.mark.parametrize("accepted", [0.5, 1.2, 2.5])
def test_drafts_rest_beside_contexts_that_make_them_lose(accepted):
    """A chain's round grows four times as fast as vanilla decoding's, as where attention is computed, not read."""
    known = {1: {0: Price(1.0, 0.0005, 256), 1: Price(1.4, 0.002, 256)}}

    def seconds(tier, length):  # of the simulated clock
        return (1.0, 1.4)[tier] + (0.0005, 0.002)[tier] * (length - 256)

    for length in (256, 1024, 2048, 4096, 8000, 128_000):
        policy, spent, tokens = TierPolicy([VANILLA, CHAIN], known, {1: 0.0}), 0.0, 0.0
        for _ in range(2000):
            tier = policy.choose([Acceptance()], behind=False, rounds=ROUNDS, width=1, length=length)
            spent += ROUNDS * seconds(tier, length)
            tokens += ROUNDS * (1 + accepted * tier)
            policy.learn(tier, [(Acceptance(), ROUNDS, ROUNDS * accepted * tier)], ROUNDS * tier)
        rates = [(1 + accepted * i) / seconds(i, length) for i in (0, 1)]
        assert tokens / spent >= 0.97 * max(rates)
        assert policy.current == rates.index(max(rates))
