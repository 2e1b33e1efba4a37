"""`python -m eagle3_jax.benchmark tune`: the fastest draft size for a head and kind of prompt, on this machine.

The sizes race (successive elimination). In each turn those still in the race answer the same next prompts, in an order
drawn anew; so does the default, an engine of its own with `tree="auto"`. A size that is slower than the leader beyond
doubt leaves. The winner's times flatter it: its lead over the default is measured anew, on the prompts that come next.
`<run_dir>/benchmark` gets `tune.json`, and `tuned.yaml`, a config for `serve` and `evaluate` with the fastest sizes.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import yaml
from scipy import special
from tqdm import tqdm

from eagle3_jax.acceptance import AcceptanceCounts
from eagle3_jax.benchmark import decode
from eagle3_jax.benchmark.decode import Material
from eagle3_jax.config import DraftTree, RunConfig, run_file
from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.decoding.tier import Tier
from eagle3_jax.formats.packaged import LOOKUP
from eagle3_jax.mesh import fetch, mesh_of
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.runs import command, disk, processes

# Default racers: chains, and for a head trees too.
CHAINS = tuple(DraftTree(num_steps=n, topk=1, num_draft_tokens=n + 1) for n in (1, 2, 3, 4, 5, 7))
TREES = tuple(
    DraftTree(num_steps=steps, topk=topk, num_draft_tokens=size)
    for steps, topk, size in ((2, 2, 4), (3, 2, 6), (3, 3, 8), (4, 3, 12), (5, 4, 16))
)
LEAST_TURNS = 3  # before any size leaves: fewer say nothing about the spread
FRESH_TURNS = 6  # behind the race, for its winner and the default alone
CONFIDENCE = 0.95


def ratio(seconds: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """Computes the speed-up over another size, from seconds a token in each turn: geometric mean and interval."""
    logs = np.log([other / own for own, other in zip(seconds, others, strict=False)])
    mean, half = float(np.mean(logs)), float("inf")
    if len(logs) > 1:
        half = float(special.stdtrit(len(logs) - 1, (1 + CONFIDENCE) / 2) * np.std(logs, ddof=1) / len(logs) ** 0.5)
    return float(np.exp(mean)), float(np.exp(mean - half)), float(np.exp(mean + half))


def leader(seconds: Mapping[str, Sequence[float]]) -> str:
    """Returns the fastest size, by the geometric mean over the turns that all of these had."""
    turns = min(map(len, seconds.values()))
    return min(seconds, key=lambda name: float(np.mean(np.log(seconds[name][:turns]))))


def left(seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """Returns the sizes that may still be the fastest: the leader, and those not slower beyond doubt."""
    best = seconds[leader(seconds)]
    if len(best) < LEAST_TURNS:
        return list(seconds)
    return [name for name, own in seconds.items() if own is best or ratio(own, best)[2] >= 1]


def run(config: RunConfig, prompts_path: str | disk.Path, target: Target | None = None) -> dict[str, Any]:
    """Races on one replica of the mesh, writes the files, and returns `tune.json`'s content. Raises as `decode.run`."""
    folder = config.folder("benchmark")

    def measure(what: Material) -> None:
        batches = [race(config, what, batch) for batch in config.benchmark.batch_sizes]
        report = {**what.identity, "batches": batches, "config": run_file.to_dict(config)}
        processes.agree(lambda: _write(folder, report, config))

    decode.on_one_replica(config, disk.path_of(prompts_path), target, measure)
    return disk.read_json(folder / "tune.json")


def race(config: RunConfig, what: Material, batch: int) -> dict[str, Any]:
    """Races the sizes at one batch size."""
    settings = config.benchmark
    params = SamplingParams(temperature=settings.temperature, max_tokens=settings.max_tokens, seed=config.seed)
    trees = settings.trees or (CHAINS if what.draft == LOOKUP else CHAINS + TREES)
    engine = what.engine(what.prompts, trees, batch, settings)
    on_mesh = mesh_of(engine.target.embed[...]) is not None
    draft = (fetch(engine.draft) if on_mesh else engine.draft) or LOOKUP  # an engine shards a draft that is whole here
    sizes = {"batch_size": engine.batch_size, "max_length": engine.max_length, "prefix_cache": False}
    default = Engine(engine.target, engine.tokenizer, draft, **sizes)  # of a user who names none, over the same weights
    for each in (engine, default):
        each.warm_up(greedy_alone=params.greedy)
    tiers = {tier.name: tier for tier in engine.tiers.tiers}
    racers: dict[str, tuple[Engine, Tier | None]] = {name: (engine, tier) for name, tier in tiers.items()}
    racers[decode.AUTO] = default, None
    count = max(batch, settings.requests)

    def take(turn: int, names: Sequence[str], race: dict[str, list[float]]) -> None:
        prompts = what.asked(count, turn * count)
        for name in random.Random(turn).sample(names, len(names)):
            command.stop_point()
            answered = decode.decoding(*racers[name], prompts, params)()
            race[name].append(answered.seconds / sum(map(len, answered.texts)))
            if race is found:
                counts[name].append(answered.counts)

    running: list[str] = list(tiers)
    found: dict[str, list[float]] = {name: [] for name in racers}
    counts: dict[str, list[AcceptanceCounts]] = {name: [] for name in racers}
    take(0, list(racers), {name: [] for name in racers})  # warm-up
    with tqdm(total=settings.tune_turns + FRESH_TURNS, desc=f"batch {batch}", disable=processes.index() > 0) as bar:
        for turn in range(settings.tune_turns):
            take(turn, [*running, decode.AUTO], found)
            bar.update()
            running = left({name: found[name] for name in running})
            if len(running) == 1:
                break
        best, raced = leader({name: found[name] for name in running}), len(found[decode.AUTO])
        lead: dict[str, list[float]] = {best: [], decode.AUTO: []}
        for turn in range(raced, raced + FRESH_TURNS):
            take(turn, list(lead), lead)
            bar.update()
    records: list[dict[str, Any]] = []
    for name, tier in tiers.items():
        counted, (speedup, *interval) = AcceptanceCounts.total(counts[name]), ratio(found[name], found[decode.VANILLA])
        record = {"name": name, **decode.size(tier), "turns": len(found[name]), "speedup": speedup}
        record |= {"acc_length": counted.tau if counted.rounds else None, "interval": interval}
        record |= {"tokens_per_second": 1 / statistics.median(found[name])}
        records.append(record | {"behind": ratio(found[best], found[name])[0]})
    over, *interval = ratio(*lead.values())
    return {"batch_size": batch, "best": best, "over_auto": {"ratio": over, "interval": interval}, "sizes": records}


def tuned(config: RunConfig, report: dict[str, Any]) -> dict[str, Any]:
    """Returns the run's config with each verb's fastest size, at the measured batch size nearest to its own, and draft.

    Where vanilla decoding or the default is the fastest, the verb keeps its draft and the engine chooses ("auto").
    """
    values = run_file.to_dict(config)
    for verb in ("serve", "evaluate"):
        near = min(report["batches"], key=lambda batch: abs(batch["batch_size"] - values[verb]["batch_size"]))
        best = next(size for size in near["sizes"] if size["name"] == near["best"])
        pays = best["steps"] and near["over_auto"]["ratio"] > 1
        tree = {field: best[key] for field, key in decode.SIZE.items()} if pays else None
        values[verb] |= {"trees": [tree] if tree else []} if verb == "serve" else {"tree": tree or "auto"}
        if pays:
            values[verb] |= {field: values["benchmark"][field] for field in ("draft", "token_map")}
    return values


def table(report: dict[str, Any]) -> str:
    """Formats the report as fixed-width text, with the fastest size at each batch size."""
    lines, best = [], []
    for batch in report["batches"]:
        rows: list[tuple[str, ...]] = [
            (f"batch {batch['batch_size']}", "turns", "tokens/s", "speed-up", "95 % interval", "acc_length")
        ]
        for size in sorted(batch["sizes"], key=lambda size: size["behind"]):
            cells = size["name"], str(size["turns"]), f"{size['tokens_per_second']:.1f}", f"{size['speedup']:.2f}x"
            tau = "-" if size["acc_length"] is None else f"{size['acc_length']:.2f}"
            rows.append((*cells, "{:.2f} to {:.2f}".format(*size["interval"]), tau))
        lines += [*command.aligned(rows), ""]
        over, (low, high) = batch["over_auto"]["ratio"], batch["over_auto"]["interval"]
        comparison = f"{over:.2f} times as fast as the default, the engine's own choice"
        best.append(f"batch {batch['batch_size']}: {batch['best']}, {comparison} (anew: {low:.2f} to {high:.2f})")
    return "\n".join([*lines, "fastest:", *best])


def _write(folder: disk.Path, report: dict[str, Any], config: RunConfig) -> None:
    with disk.lock(folder / "tune.json"):
        disk.write_json(folder / "tune.json", report)
        with disk.atomic(folder / "tuned.yaml") as temporary:
            temporary.write_text(yaml.safe_dump(tuned(config, report), sort_keys=False))
