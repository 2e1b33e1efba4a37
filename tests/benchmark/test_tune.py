"""The race: which sizes leave and when, by drawn times; the verb on a tiny target, whose YAML other verbs read."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from eagle3_jax.acceptance import AcceptanceCounts
from eagle3_jax.benchmark import decode, tune
from eagle3_jax.config import DraftTree, run_file
from eagle3_jax.decoding.choice import tiers
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.tier import Tier
from eagle3_jax.runs import command_line
from eagle3_jax.serve import __main__ as serve

CHAIN_OF_2 = DraftTree(num_steps=2, num_draft_tokens=3)


def raced(
    seconds: dict[str, float], noise: float, seed: int, turns: int = 12
) -> tuple[dict[str, list[float]], list[str]]:
    """A race of sizes that take so long a token, on a machine whose speed drifts and jitters; and who is left."""
    rng, race, running = np.random.default_rng(seed), {name: [] for name in seconds}, list(seconds)
    for _ in range(turns):
        pace = rng.uniform(1, 1.5)  # of the whole turn
        for name in running:
            race[name].append(seconds[name] * pace * float(np.exp(noise * rng.standard_normal())))
        running = tune.left({name: race[name] for name in running})
        if len(running) == 1:
            break
    return race, running


@pytest.mark.slow
@given(st.integers(0, 10_000))
def test_the_fastest_wins_and_the_slow_leave_early(seed):
    race, running = raced({"slow": 2.0, "fast": 1.0, "slower": 3.0, "near": 1.02}, 0.02, seed)
    best = tune.leader({name: race[name] for name in running})
    assert "fast" in running or tune.ratio(race[best], race["fast"])[0] > 0.97  # wrong by a hair at most
    assert "slow" not in running and "slower" not in running
    assert len(race["slow"]) <= 4 and len(race["slower"]) <= 4


def test_nobody_leaves_by_one_turn():
    race = {"a": [1.0, 1.0], "b": [9.0, 9.1]}
    assert tune.left(race) == ["a", "b"]
    race["a"].append(1.0)
    race["b"].append(9.2)
    assert tune.left(race) == ["a"]


@pytest.mark.slow
@given(st.integers(0, 10_000), st.floats(0.5, 2.0))
def test_a_ratio_s_interval_holds_what_is_true_in_nearly_all_races(seed, ratio):
    inside = []
    for i in range(40):
        race, _ = raced({"a": 1.0, "b": ratio}, 0.05, seed + i, turns=3)
        mean, low, high = tune.ratio(race["a"], race["b"])
        assert low <= mean <= high
        inside.append(low <= ratio <= high)
    assert np.mean(inside) >= 0.75
    # The machine took twice as long from the second turn on; who left before that is not the faster for it.
    assert tune.ratio([0.9, 1.8, 1.8], [1.0])[0] == pytest.approx(1 / 0.9)


@dataclasses.dataclass
class Measured:
    """A race without decoding. Attributes: asked, engines: by name, what each was asked and who answers."""

    report: dict[str, Any]
    asked: dict[str, list[list[int]]]
    engines: dict[str, set[Engine]]
    warm: list[Engine]


@pytest.fixture
def measured(monkeypatch, config, target) -> Callable[..., Measured]:
    """Races sizes whose seconds a token are given, by name and turn."""

    def measure(seconds: Callable[[str, int], float], **settings: Any) -> Measured:
        asked: dict[str, list[list[int]]] = collections.defaultdict(list)
        engines: dict[str, set[Engine]] = collections.defaultdict(set)
        warm: list[Engine] = []

        def decoding(engine: Engine, tier: Tier | None, prompts: list[list[int]], _: Any) -> decode.Way:
            name = decode.AUTO if tier is None else tier.name
            engines[name].add(engine)
            asked[name].append([ids[0] for ids in prompts])
            took = seconds(name, len(asked[name]) - 2)  # -1: the turn that wakes caches
            return lambda: decode.Answers([[0]] * len(prompts), took * len(prompts), AcceptanceCounts(1))

        monkeypatch.setattr(decode, "decoding", decoding)
        monkeypatch.setattr(Engine, "warm_up", lambda self, **_: warm.append(self))
        benchmark = dataclasses.replace(config.benchmark, requests=2, tune_turns=4, **settings)
        what = decode.Material(target, str(benchmark.draft), [[i] for i in range(100)], {})
        report = tune.race(dataclasses.replace(config, benchmark=benchmark), what, 1)
        return Measured(report, asked, engines, warm)

    return measure


@pytest.mark.slow
def test_the_winner_s_lead_is_measured_anew(measured):
    """It won by luck: in the turns that chose it; in those behind them it is as fast as the default."""
    race = measured(lambda name, turn: 0.5 if name == "chain 2" and turn < 3 else 1.0 + turn / 100, trees=(CHAIN_OF_2,))
    report, asked = race.report, race.asked
    assert report["best"] == "chain 2" and len(asked["vanilla"]) == 1 + 3
    ratio, (low, high) = report["over_auto"]["ratio"], report["over_auto"]["interval"]
    assert ratio == pytest.approx(1) and low <= 1 <= high
    assert "1.00 times as fast as the default" in tune.table({"batches": [report]})
    for name in ("chain 2", "auto"):
        assert asked[name] == [[0, 1], *([2 * turn, 2 * turn + 1] for turn in range(3 + tune.FRESH_TURNS))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft", "sizes", "every", "trees"),
    [
        ({}, tune.CHAINS + tune.TREES, tiers.WITH_HEAD, ()),
        ({}, (), tiers.WITH_HEAD, (CHAIN_OF_2,)),
        ({"draft": "lookup"}, tune.CHAINS, tiers.WITH_LOOKUP, ()),
    ],
    ids=["head", "named", "lookup"],
)
def test_the_default_is_an_engine_of_its_own_over_the_same_weights(measured, draft, sizes, every, trees):
    """What who names no size has, whatever is raced; nobody races trees of a draft that has none."""
    race = measured(lambda *_: 1.0, trees=trees, **draft)
    (default,) = race.engines.pop(decode.AUTO)
    (racing,) = set.union(*race.engines.values())
    assert default.tiers.tiers == tuple(every)
    raced = [size["num_draft_tokens"] for size in race.report["sizes"]]
    assert raced == [0, *(tree.num_draft_tokens for tree in trees or sizes)]
    assert race.warm == [racing, default]
    ours, theirs = (jax.tree.leaves((engine.target, engine.draft)) for engine in (default, racing))
    assert all(a is b for a, b in zip(ours, theirs, strict=True))
    assert (default.batch_size, default.max_length) == (racing.batch_size, racing.max_length)


@pytest.mark.long
def test_the_verb_writes_a_config_that_the_others_read(config, target, prompts, monkeypatch):
    monkeypatch.setattr(tiers, "of_head", lambda head: (tiers.VANILLA, tiers.CHAIN))  # the default's: fewer to compile
    report = tune.run(config, prompts, target)
    assert [batch["batch_size"] for batch in report["batches"]] == [1, 2]
    for batch in report["batches"]:
        assert {size["name"] for size in batch["sizes"]} == {"vanilla", "chain 2", "tree 2, 2, 4"}
        vanilla = next(size for size in batch["sizes"] if size["name"] == "vanilla")
        assert vanilla["speedup"] == 1 and vanilla["acc_length"] == 1
    folder = pathlib.Path(config.run_dir, "benchmark")
    read = run_file.load(folder / "tuned.yaml")
    assert dataclasses.replace(read, evaluate=config.evaluate, serve=config.serve) == config
    assert "fastest:" in tune.table(report)


def test_the_config_has_the_size_of_the_nearest_batch(config, tmp_path):
    def size(name: str, tree: DraftTree | None) -> dict[str, object]:
        return {"name": name, **decode.size(Tier(tree, head=True))}

    sizes = [size("vanilla", None), size("chain 2", CHAIN_OF_2)]
    best = {1: "chain 2", 32: "vanilla"}
    ahead = {"sizes": sizes, "over_auto": {"ratio": 1.1}}
    batches = [{"batch_size": batch, "best": name, **ahead} for batch, name in best.items()]
    alone = run_file.from_dict(tune.tuned(config, {"batches": batches}))
    assert alone.evaluate.tree == CHAIN_OF_2
    assert alone.serve.trees == (alone.evaluate.tree,)  # of batch 8, which is nearer to 1 than to 32
    path = tmp_path / "tuned.yaml"
    path.write_text(yaml.safe_dump(tune.tuned(config, {"batches": batches})))
    assert serve.configure(["--config", str(path)]) == alone
    words = ["--config", str(path), "--prompts", "prompts.jsonl", "--output", "report.json"]
    assert command_line.read("evaluate", words)[0] == alone
    many = dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, batch_size=30))
    assert yaml.safe_load(yaml.safe_dump(tune.tuned(many, {"batches": batches})))["evaluate"]["tree"] == "auto"
    slower = tune.tuned(config, {"batches": [batches[0] | {"over_auto": {"ratio": 0.9}}]})
    assert slower["evaluate"]["tree"] == "auto" and slower["serve"]["trees"] == []


@pytest.mark.parametrize(("draft", "token_map"), [("a/head", "a/map.pt"), (None, None)])
def test_the_config_has_the_draft_that_was_raced(config, draft, token_map):
    benchmark = dataclasses.replace(config.benchmark, draft=draft, token_map=token_map)
    others = {verb: dataclasses.replace(getattr(config, verb), draft="b/head") for verb in ("serve", "evaluate")}
    sizes = [{"name": "chain 2", **decode.size(Tier(CHAIN_OF_2, head=True))}]
    for ratio, expected in ((1.1, (draft, token_map)), (0.9, ("b/head", None))):
        batch = {"batch_size": 1, "best": "chain 2", "sizes": sizes, "over_auto": {"ratio": ratio}}
        raced = dataclasses.replace(config, benchmark=benchmark, **others)
        tuned = run_file.from_dict(tune.tuned(raced, {"batches": [batch]}))
        for verb in (tuned.serve, tuned.evaluate):
            assert (verb.draft, verb.token_map) == expected
