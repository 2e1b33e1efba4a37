"""Tiers in the engine: whichever a dispatch takes, the tokens are vanilla decoding's."""

import collections
import dataclasses
import itertools
import logging
from typing import Any

import jax
import numpy as np
import pytest
from toy import SMALL, Tokenizer, make

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding.choice import costs, tiers
from eagle3_jax.decoding.choice.costs import Costs
from eagle3_jax.decoding.choice.policy import Acceptance
from eagle3_jax.decoding.choice.tiers import TierChoice
from eagle3_jax.decoding.device.shapes import Sizes
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.params import SamplingParams

FEW = (tiers.VANILLA, tiers.CHAIN)
ORDER = [tiers.VANILLA, tiers.CHAIN, tiers.LOOKUP, tiers.CHAIN, tiers.VANILLA, tiers.LOOKUP]


def take_turns(engine, monkeypatch, order=ORDER):
    """The engine takes these tiers, whatever the policy says."""
    turns = itertools.cycle(order)
    monkeypatch.setattr(engine.tiers, "choose", lambda *args, **kwargs: next(turns))


@pytest.fixture(scope="module")
def vanilla(toy):
    return make(toy, None)


@pytest.fixture(scope="module")
def engine(toy):
    return Engine(toy.target, Tokenizer(), toy.good, **SMALL)


def requests(count, seed=0):
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 24, 60).tolist()
    prompts = [shared[: rng.integers(1, 60)] + rng.integers(0, 24, rng.integers(1, 9)).tolist() for _ in range(count)]
    return prompts, [SamplingParams(max_tokens=int(rng.integers(1, 90))) for _ in prompts]


@pytest.mark.long
def test_a_tier_for_every_dispatch_and_the_tokens_are_vanilla_s(engine, vanilla, monkeypatch):
    """Drafts accepted after each rest, requests that join while the head rests, prefixes reused."""
    take_turns(engine, monkeypatch)
    prompts, params = requests(14)
    got, expected = engine.generate(prompts, params), vanilla.generate(prompts, params)
    assert [answer.token_ids for answer in got] == [answer.token_ids for answer in expected]
    reused = [sum(answer.stats.cached_tokens for answer in answers) for answers in (got, expected)]
    assert reused[0] == reused[1] > 0
    assert max(answer.stats.acceptance_length for answer in got) > 1.3


@pytest.mark.slow
def test_a_head_that_drafts_has_read_everything(engine, monkeypatch):
    """Whoever was decoded without it, and joined or left meanwhile."""
    take_turns(engine, monkeypatch, [tiers.VANILLA, tiers.LOOKUP, tiers.CHAIN])
    run, unread = engine.own_runner.run, collections.defaultdict(list)

    def watched(call):
        if call.name == "decode":
            state = engine.own_runner._state
            unread[call.form["tier"].name] += np.asarray(state.unread.count)[~np.asarray(state.done)].tolist()
        return run(call)

    monkeypatch.setattr(engine.own_runner, "run", watched)
    engine.generate(*requests(16, seed=3))
    assert len(unread["chain 3"]) > 10 and not any(unread["chain 3"])
    assert any(unread["lookup 8"])


@pytest.mark.slow
def test_pages_that_the_head_never_read_are_shared_but_not_drafted_from(toy, vanilla, monkeypatch):
    """The next turn of a conversation finds the same pages as in vanilla decoding, and knows that it is lost."""
    engine = Engine(toy.target, Tokenizer(), toy.good, **SMALL)
    take_turns(engine, monkeypatch, [tiers.VANILLA])
    first = SamplingParams(max_tokens=60)
    prompt = [1, 2, 3]
    answer = engine.generate([prompt], first)[0].token_ids
    assert answer == vanilla.generate([prompt], first)[0].token_ids
    take_turns(engine, monkeypatch, [tiers.CHAIN])
    second = prompt + answer + [5]
    request = engine.submit(second, SamplingParams(max_tokens=20))
    expected = vanilla.generate([second], SamplingParams(max_tokens=20))[0]
    got = request.result()
    assert got.token_ids == expected.token_ids
    assert got.stats.cached_tokens == expected.stats.cached_tokens > 0
    assert request.acceptance.lost
    # One whose head read everything is not.
    engine.generate([[7, 8, 9]], first)
    third = engine.submit([7, 8, 9] * 20, SamplingParams(max_tokens=20))
    third.result()
    assert not third.acceptance.lost


def drafted(engine, run):
    """Dispatches with drafts of the head, of all, while it runs."""
    before = engine.stats().tiers
    run()
    counts = {name: count - before[name] for name, count in engine.stats().tiers.items()}
    return counts["chain 3"], sum(counts.values())


def told(caplog):
    return [record.getMessage() for record in caplog.records if "draft head" in record.getMessage()]


def test_requests_that_the_head_cannot_draft_for_say_nothing_of_it(caplog):
    choice = TierChoice(FEW, tiers.CHAIN)
    lost = [(Acceptance(in_prefix=True), 4, 0)] * 31
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            choice.learn(tiers.CHAIN, [*lost, (Acceptance(), 4, 6)], 4, greedy=True)
    assert not told(caplog)


@pytest.mark.slow
@pytest.mark.parametrize("first", [pytest.param("priced", marks=pytest.mark.long), "reported"])
def test_a_useless_head_is_reported_once_and_rests(toy, vanilla, caplog, monkeypatch, first):
    """Answers are right, so nobody would notice. Costs that come behind the report wake it no more."""
    monkeypatch.setattr(tiers, "of_head", lambda head: FEW)
    engine = Engine(toy.target, Tokenizer(), toy.plain, **SMALL)
    prompts, params = requests(24, seed=5)

    def price():  # as if drafts cost less than none: only the report can stop them
        for greedy in (True, False):
            engine.tiers.price({2: Costs({"vanilla": 1.0, "chain 3": 0.5}, 0.0)}, greedy=greedy)

    if first == "priced":
        price()
    with caplog.at_level(logging.WARNING):
        got = engine.generate(prompts, params)
    assert [x.token_ids for x in got] == [x.token_ids for x in vanilla.generate(prompts, params)]
    assert len(told(caplog)) == 1 and "It rests from now on" in told(caplog)[0]
    assert engine.stats().tiers["chain 3"] > 0
    if first == "reported":
        assert drafted(engine, lambda: engine.generate(prompts[:4], params[:4]))[0] == 0, "without costs, too"
        price()
    count, every = drafted(engine, lambda: engine.generate(prompts, params))
    assert count == 0 < every


@pytest.mark.long
def test_a_head_whose_numbers_are_none_is_reported_and_rests_until_there_is_another(toy, vanilla, caplog, monkeypatch):
    """Greedy answers stay vanilla's, drawn ones come to an end; a head that replaces it is judged anew."""
    monkeypatch.setattr(tiers, "of_head", lambda head: FEW)
    head = jax.tree.map(lambda x: x, toy.good.head)
    head.fc[...] *= np.nan
    prompts, params = requests(24, seed=5)
    expected = [x.token_ids for x in vanilla.generate(prompts, params)]
    counts = np.bincount(np.concatenate(expected), minlength=24)
    ids = toy.good.token_ids.at[0].set(int(counts.argmin()))  # what it always drafts: of 24 tokens another may be right
    engine = Engine(toy.target, Tokenizer(), dataclasses.replace(toy.good, head=head, token_ids=ids), **SMALL)
    with caplog.at_level(logging.WARNING):
        drawn = engine.generate(prompts[:2], SamplingParams(temperature=1.0, max_tokens=20))
        got = engine.generate(prompts, params)
    assert [x.finish_reason for x in drawn] == ["length"] * 2
    assert [x.token_ids for x in got] == expected
    assert len(told(caplog)) == 1 and "It rests from now on" in told(caplog)[0]
    assert drafted(engine, lambda: engine.generate(prompts[:2], params[:2]))[0] == 0
    engine.replace_draft(toy.good)
    count, every = drafted(engine, lambda: engine.generate(prompts[:2], params[:2]))
    assert count == every > 0


def test_a_server_of_eight_places_has_at_most_24_programs():
    """Those that read prompts, one of notes, one that wakes the head; rounds of each tier in each width."""
    sizes = Sizes.plan(8, 2048, 128, tiers.WITH_HEAD)
    assert len(sizes.prefill_shapes) + 2 + len(sizes.widths) * len(tiers.WITH_HEAD) <= 24
    for batch, widths in ((1, [1]), (4, [1, 4]), (8, [1, 4, 8]), (48, [1, 4, 8, 16, 32, 48])):
        assert Sizes.plan(batch, 64, 16, [tiers.VANILLA]).widths == widths


@pytest.mark.long
def test_warm_up_measures_once_a_machine_and_compiles_everything(toy, vanilla, tmp_path, monkeypatch):
    monkeypatch.setattr(tiers, "of_head", lambda head: FEW)
    before: Any = getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009
    sizes: dict[str, Any] = {**SMALL, "batch_size": 4}
    engine = Engine(toy.target, Tokenizer(), toy.good, **sizes)
    early = [1, 2, 3, *engine.generate([[1, 2, 3]], SamplingParams(max_tokens=40))[0].token_ids]
    engine.warm_up(tmp_path, progress=False)
    assert engine.generate([early], SamplingParams(max_tokens=9))[0].stats.cached_tokens == 0, "measuring wrote to them"
    priced = engine.tiers._policies[True].costs
    assert set(priced) == {1, 4} and all(price.seconds > 0 for known in priced.values() for price in known.values())
    assert len(list(tmp_path.glob("round_costs_*.json"))) == 4
    compiled = engine.stats().programs
    assert compiled <= 5 + 2 * (1 + len(FEW)) + 4, "of prompts and notes, of rounds, and what an early request compiled"
    prompts, params = requests(16, seed=1)
    params = [SamplingParams(max_tokens=p.max_tokens, temperature=0.5 * (i % 3 == 0)) for i, p in enumerate(params)]
    got, expected = engine.generate(prompts, params), vanilla.generate(prompts, params)
    same = [a.token_ids == b.token_ids for a, b, p in zip(got, expected, params, strict=True) if p.greedy]
    assert all(same)
    assert engine.stats().programs == compiled, "nothing is compiled after warm_up, whichever tier is taken"

    def never(*_, **__):
        raise AssertionError("measured again")

    again = Engine(toy.target, Tokenizer(), toy.good, **sizes)
    monkeypatch.setattr(costs, "round_costs", never)
    again.warm_up(tmp_path, progress=False)
    assert again.tiers._policies[True].costs == priced
    other = Engine(toy.target, Tokenizer(), toy.good, **(SMALL | {"batch_size": 3}))
    with pytest.raises(AssertionError, match="measured again"):  # other sizes cost something else
        other.warm_up(tmp_path, progress=False)
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.long
def test_several_trees_are_chosen_among(toy, vanilla):
    """The same answers from each, pinned one after the other; what has no known cost for sampled rounds stays out."""
    sizes = [DraftTree(num_steps=2, num_draft_tokens=3), DraftTree(num_steps=2, topk=2, num_draft_tokens=5)]
    engine = Engine(toy.target, Tokenizer(), toy.good, sizes, **SMALL)
    assert [tier.name for tier in engine.tiers.tiers] == ["vanilla", "chain 2", "tree 2, 2, 5"]
    prompts, params = requests(3)
    expected = [answer.token_ids for answer in vanilla.generate(prompts, params)]
    for tier in engine.tiers.tiers:
        engine.tiers.pinned = tier
        before = engine.stats().tiers[tier.name]
        assert [answer.token_ids for answer in engine.generate(prompts, params)] == expected
        assert engine.stats().tiers[tier.name] > before
    assert min(engine.stats().tiers.values()) > 0
    engine.tiers.pinned = None
    useful = engine.tiers.useful(Costs({"vanilla": 1.0, "chain 2": 9.0, "tree 2, 2, 5": 1.1}, 0.0))
    assert useful == Costs({"vanilla": 1.0, "tree 2, 2, 5": 1.1}, 0.0)
    engine.tiers.price({2: useful}, greedy=True)
    engine.tiers.price({2: Costs({"vanilla": 1.0, "tree 2, 2, 5": 0.5}, 0.0)}, greedy=False)
    before = engine.stats().tiers
    engine.generate(prompts, SamplingParams(temperature=1.0, max_tokens=8))
    assert engine.stats().tiers["tree 2, 2, 5"] > before["tree 2, 2, 5"]
    assert engine.stats().tiers["chain 2"] == before["chain 2"]
    for trees in ([], [sizes[0], sizes[0]]):
        with pytest.raises(ValueError, match="tree: got"):
            Engine(toy.target, Tokenizer(), toy.good, trees, **SMALL)


@pytest.mark.slow
def test_simulated_acceptance_is_the_rate_and_no_ordinary_use(toy, caplog):
    tree = DraftTree(num_steps=2, topk=2, num_draft_tokens=5)
    engine = Engine(toy.target, Tokenizer(), toy.plain, tree, simulated_acceptance=0.5, **SMALL)
    assert "acceptance is simulated" in caplog.text
    answers = engine.generate([[1, 2], [3]], SamplingParams(max_tokens=200))
    rounds = sum(answer.stats.rounds for answer in answers)
    first, second = (sum(x) for x in zip(*(answer.stats.accepted_per_position for answer in answers), strict=True))
    assert first / rounds == pytest.approx(0.5, abs=0.15)
    assert second == pytest.approx(0.5 * first, abs=0.15 * rounds)
    with pytest.raises(RuntimeError, match="submit: got an engine with simulated_acceptance"):
        engine.submit([1])
    with pytest.raises(ValueError, match="simulated_acceptance: got 2"):
        Engine(toy.target, Tokenizer(), toy.plain, tree, simulated_acceptance=2.0, **SMALL)


@pytest.mark.slow
def test_copies_are_measured_where_there_is_something_to_copy(engine, monkeypatch):
    """Only in the first round of a dispatch: four of them would be three vanilla rounds in disguise."""
    asked, lengths = [], []

    def run(call):
        if call.name == "rehearse":
            lengths.append(int(call.sent.arguments()[0]))
        else:
            asked.append((call.form["tier"].name, int(call.sent.arguments()[2])))

    def timed(works, prepare, turns=None):
        prepare()
        for work in works[:4]:
            work()
        more = 0.04 * (lengths[-1] - 64)
        return [8.0 + more, 5.0 + more, 12.0 + 2 * more, 2.5 + more, 1.0]

    monkeypatch.setattr(engine.own_runner, "run", run)
    monkeypatch.setattr(type(engine.own_runner.sizes), "measured_lengths", property(lambda _: [64, 96, 128]))
    monkeypatch.setattr(costs.timing, "in_turns", timed)
    measured = costs.round_costs(engine.own_runner, [tiers.VANILLA, tiers.LOOKUP, tiers.CHAIN], greedy=True, width=2)
    assert asked[:4] == [("vanilla", 4), ("lookup 8", 1), ("chain 3", 4), ("vanilla", 1)] and lengths == [64, 96, 128]
    assert measured.rounds == {"vanilla": 2.0, "lookup 8": 2.0 + 5.0 - 2.5, "chain 3": 3.0} and measured.waking == 1.0
    assert measured.growth == pytest.approx({"vanilla": 0.01, "lookup 8": 0.01, "chain 3": 0.02})
