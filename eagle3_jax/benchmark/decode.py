"""`python -m eagle3_jax.benchmark decode`: the speed of every draft size at every batch size, on this machine.

Vanilla decoding, every draft size and the engine's own choice ("auto") answer the same prompts in turns, in other
orders, within one engine for each batch size. `<run_dir>/benchmark` gets `decode.jsonl`, a record for each batch and
draft size in the format of SGLang's bench_speculative.py; `decode.json`, all measurements; `decode.png`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from eagle3_jax.acceptance import AcceptanceCounts
from eagle3_jax.config import BenchmarkConfig, RunConfig, run_file
from eagle3_jax.data import sources
from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.decoding.measure import profile
from eagle3_jax.decoding.measure.compare import timed
from eagle3_jax.decoding.text import end_ids
from eagle3_jax.decoding.tier import Tier
from eagle3_jax.formats.packaged import chosen_draft, draft_identity
from eagle3_jax.mesh import Replica, make_mesh, own_replica
from eagle3_jax.models.checkpoint.fetch import Target, load_target
from eagle3_jax.runs import command, disk, machine, processes

AUTO, VANILLA = "auto", "vanilla"
TRANSFORMERS, ASSISTED = "transformers", "transformers, prompt lookup"
# Field of a `DraftTree` -> key of a record, as SGLang's bench_speculative.py has it.
SIZE = {"num_steps": "steps"} | {name: name for name in ("topk", "num_draft_tokens", "lookup_tokens")}


@dataclasses.dataclass(frozen=True)
class Answers:
    """Token ids of answers, and their seconds; their rounds and accepted drafts; dispatches by draft mode."""

    texts: list[list[int]]
    seconds: float
    counts: AcceptanceCounts = dataclasses.field(default_factory=AcceptanceCounts)
    tiers: dict[str, int] = dataclasses.field(default_factory=dict)


Way = Callable[[], Answers]


def run(
    config: RunConfig, prompts_path: str | disk.Path, compare: str | None = None, target: Target | None = None
) -> dict[str, Any]:
    """Measures, writes the files, and returns the content of `decode.json`.

    The figures of a batch size are kept in `decode_<batch>.json`; a later run does not measure them again.
    `compare="transformers"` measures Hugging Face transformers too, plain and with prompt lookup (batch 1). Raises
    ManifestError: no draft, or one for another target. ValueError: no usable prompts, or no comparison.
    """
    settings, folder = config.benchmark, config.folder("benchmark")
    if compare is not None and importlib.util.find_spec("torch") is None:
        raise ValueError("--compare transformers: got no PyTorch, expected the extra `reference`")
    if compare is not None and settings.temperature > 0:
        got = f"got benchmark.temperature {settings.temperature}"
        raise ValueError(f"--compare transformers: {got}, expected 0 (greedy)")

    def measure(what: Material) -> None:
        identity = what.identity | {"compare": compare}
        batches = []
        for batch in settings.batch_sizes:
            command.stop_point()
            path = folder / f"decode_{batch}.json"
            with disk.lock(path):
                kept = processes.agree(lambda path=path: disk.kept(path, identity))
                if kept is None:
                    kept = {"identity": identity, "measured": measure_batch(config, what, batch, compare)}
                    processes.agree(lambda path=path, kept=kept: disk.write_json(path, kept))
            batches.append(kept["measured"])
        report = {**identity, "batches": batches, "config": run_file.to_dict(config)}
        processes.agree(lambda: _write(folder, report))

    on_one_replica(config, disk.path_of(prompts_path), target, measure)
    return disk.read_json(folder / "decode.json")


def on_one_replica(
    config: RunConfig, prompts_path: disk.Path, target: Target | None, measure: Callable[[Material], None]
) -> None:
    """Measures on the replica of process 0; the other processes wait for its end."""
    replica = own_replica(make_mesh(config.mesh))
    if 0 in replica.processes:
        with processes.among(replica.processes):
            measure(Material.of(config, prompts_path, target, replica))
    processes.barrier()


@dataclasses.dataclass(frozen=True)
class Material:
    """The target, draft (as `Engine.load` takes it) and prompts (token ids) of a measurement."""

    target: Target
    draft: str
    prompts: list[list[int]]
    identity: dict[str, Any]  # everything that the figures depend on

    @classmethod
    def of(cls, config: RunConfig, prompts_path: disk.Path, target: Target | None, replica: Replica) -> Material:
        """Loads the target and encodes the prompts. Raises ValueError: no usable prompts; ManifestError: no head."""
        settings = config.benchmark
        asked = sources.spread(sources.read_file(prompts_path)[0], None)
        target = target or load_target(config.target, replica.rows[0])
        draft, folder = chosen_draft(settings.draft, config.folder("export"), target)
        longest = target.model.config.max_position_embeddings - settings.max_tokens
        fitting, left_out = sources.encode(asked, target.tokenizer, longest, f"--prompts {prompts_path}")
        if any(left_out.values()):
            long, refused = f"{left_out['too_long']} longer than {longest} tokens", left_out["refused"]
            processes.say(f"{prompts_path}: left out: {long}, {refused} refused by the template")
        identity = {
            "benchmark": run_file.to_dict(dataclasses.replace(settings, batch_sizes=(1,))),
            "target": target.identity,
            "draft": draft_identity(draft, folder, settings.token_map),
            "prompts_file": {"name": prompts_path.name, "sha256": disk.digest(prompts_path)},
            **machine.timed_on(config.mesh.model),
        }
        return cls(target, draft, [prompt["prompt"] for prompt in fitting], identity)

    def asked(self, count: int, start: int = 0) -> list[list[int]]:
        """Returns `count` prompts from number `start` on, and begins anew behind the last."""
        return [self.prompts[i % len(self.prompts)] for i in range(start, start + count)]

    def engine(
        self, prompts: list[list[int]], trees: Any, batch: int, settings: BenchmarkConfig, **options: Any
    ) -> Engine:
        """Loads an engine for these prompts, which repeat: reading them is part of what is measured."""
        options |= {"token_map": settings.token_map, "prefix_cache": False}
        length = max(map(len, prompts)) + settings.max_tokens
        return Engine.load(self.target, self.draft, trees, batch, length, **options)


def measure_batch(config: RunConfig, what: Material, batch: int, compare: str | None) -> dict[str, Any]:
    """Measures one batch size: all ways answer the prompts in turns. `bandwidth` is measured, in bytes a second."""
    settings = config.benchmark
    params = SamplingParams(temperature=settings.temperature, max_tokens=settings.max_tokens, seed=config.seed)
    prompts = what.asked(max(batch, settings.requests))
    simulated = settings.simulated_acceptance
    engine = what.engine(prompts, settings.trees or "auto", batch, settings, simulated_acceptance=simulated)
    engine.warm_up(greedy_alone=params.greedy)
    tiers = engine.tiers.tiers
    ways: dict[str, Way] = {tier.name: decoding(engine, tier, prompts, params) for tier in tiers}
    ways[AUTO] = decoding(engine, None, prompts, params)
    if compare is not None:
        ways |= transformers_ways(what.target, prompts, batch, settings.max_tokens)
    answers: dict[str, list[Answers]] = {name: [] for name in ways}
    with tqdm(total=settings.turns * len(ways), desc=f"batch {batch}", disable=processes.index() > 0) as bar:
        for turn in range(-1, settings.turns):
            for name in random.Random(turn).sample(list(ways), len(ways)):  # no way always follows the same other
                command.stop_point()
                found = ways[name]()
                if turn >= 0:  # before it is the warm-up: threads, allocators, caches, and what "auto" learns
                    answers[name].append(found)
                    bar.update()
    ceiling = profile.bandwidth()
    same = answers[VANILLA][-1].texts if params.greedy and simulated is None else None
    records: dict[str, dict[str, Any]] = {}
    for name, turns in answers.items():
        found, seconds = turns[-1], [of_turn.seconds for of_turn in turns]
        tokens = sum(map(len, found.texts))
        records[name] = {
            "completion_tokens": tokens,
            "acc_length": found.counts.tau if found.counts.rounds else None,
            "tokens_per_second": tokens / statistics.median(seconds),
            "seconds": seconds,
            "identical": None if same is None else sum(a == b for a, b in zip(found.texts, same, strict=True)),
            "tiers": found.tiers,
        }
    vanilla = records[VANILLA]
    for record in records.values():  # turn by turn: a machine that slows down slows all ways of a turn
        ratios = [ours / theirs for ours, theirs in zip(vanilla["seconds"], record["seconds"], strict=True)]
        record["speedup"] = statistics.median(ratios) * record["completion_tokens"] / vanilla["completion_tokens"]
    for tier in tiers:
        cost, record = engine.profile(tier), records[tier.name]
        speed = (record["acc_length"] or 1.0) / cost.seconds
        record |= size(tier) | {"step_time": cost.seconds, "speed": speed, "stages": cost.stages}
        record["bandwidth_share"] = cost.bytes_read / cost.seconds / ceiling
    ways_in_order = [{"name": name, **record} for name, record in records.items()]
    return {"batch_size": batch, "requests": len(prompts), "bandwidth": ceiling, "ways": ways_in_order}


def decoding(engine: Engine, tier: Tier | None, prompts: list[list[int]], params: SamplingParams) -> Way:
    """Makes a way of the engine, pinned to one tier; None lets it choose."""

    def answer() -> Answers:
        engine.tiers.pinned = tier
        before = engine.stats().tiers
        outputs, seconds = timed(engine, prompts, params)
        taken = {name: count - before[name] for name, count in engine.stats().tiers.items() if count > before[name]}
        counts = AcceptanceCounts.total(output.stats.counts for output in outputs)
        return Answers([output.token_ids for output in outputs], seconds, counts, taken)

    return answer


def transformers_ways(target: Target, prompts: list[list[int]], batch: int, max_tokens: int) -> dict[str, Way]:
    """Makes ways of Hugging Face transformers: greedy, in PyTorch, in the same process and on the same cores."""
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    folder = disk.local(target.folder)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ends = sorted(end_ids(target.model.config, target.tokenizer))

    def answer(**options: Any) -> Answers:
        texts, start = list[list[int]](), time.perf_counter()
        for first in range(0, len(prompts), batch):
            group = prompts[first : first + batch]
            longest = max(map(len, group))
            ids = torch.tensor([[0] * (longest - len(x)) + x for x in group])
            mask = torch.tensor([[0] * (longest - len(x)) + [1] * len(x) for x in group])
            how = {"do_sample": False, "max_new_tokens": max_tokens, "eos_token_id": ends or None, "pad_token_id": 0}
            with torch.inference_mode():
                found = model.generate(ids, attention_mask=mask, **how, **options)
            for row in found[:, longest:].tolist():  # behind its end an answer is padded
                texts.append(row[: 1 + next((i for i, token in enumerate(row) if token in ends), len(row))])
        return Answers(texts, time.perf_counter() - start)

    ways: dict[str, Way] = {TRANSFORMERS: answer}
    if batch == 1:  # transformers assists single requests alone
        ways[ASSISTED] = lambda: answer(prompt_lookup_num_tokens=8)
    return ways


def table(report: dict[str, Any]) -> str:
    """Formats the report as fixed-width text, with the fastest way at each batch size."""
    head = ("", "tokens/s", "speed-up", "acc_length", "round ms", *profile.STAGES, "host", "bandwidth", "identical")
    lines, best = [], []
    for batch in report["batches"]:
        rows: list[tuple[str, ...]] = [(f"batch {batch['batch_size']}", *head[1:])]
        for way in batch["ways"]:
            parts = [way.get("stages", {}).get(stage) for stage in (*profile.STAGES, "host")]
            share, same = way.get("bandwidth_share"), way["identical"]
            cells = [way["name"], f"{way['tokens_per_second']:.1f}", f"{way['speedup']:.2f}x"]
            cells.append("-" if way["acc_length"] is None else f"{way['acc_length']:.2f}")
            cells += ["-" if x is None else f"{1e3 * x:.2f}" for x in (way.get("step_time"), *parts)]
            cells.append("-" if share is None else f"{share:.0%}")
            rows.append((*cells, "-" if same is None else f"{same}/{batch['requests']}"))
        lines += [*command.aligned(rows), ""]
        fixed = [way for way in batch["ways"] if "steps" in way]
        fastest = max(fixed, key=lambda way: way["speedup"])
        (auto,) = [way for way in batch["ways"] if way["name"] == AUTO]
        share = auto["speedup"] / fastest["speedup"]
        taken = ", ".join(f"{tier} {count}" for tier, count in auto["tiers"].items())
        size = batch["batch_size"]
        best.append(f"batch {size}: {fastest['name']}; auto has {share:.2f} of it, in dispatches: {taken}")
    return "\n".join([*lines, "best:", *best])


def draw(report: dict[str, Any], path: pathlib.Path) -> None:
    """Draws each way's speed as a multiple of vanilla decoding's, over the batch size, as a PNG."""
    from matplotlib.figure import Figure  # pyplot would choose a backend for the whole process

    hardware, settings = report["hardware"], report["benchmark"]
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    axes = figure.subplots()
    speedups = [{way["name"]: way["speedup"] for way in batch["ways"]} for batch in report["batches"]]
    for number, name in enumerate(dict.fromkeys(name for of_batch in speedups for name in of_batch)):
        values = [of_batch.get(name, math.nan) for of_batch in speedups]  # some ways are of small batches alone
        axes.plot(values, marker="osD^vPX"[number % 7], linewidth=3 if name == AUTO else 1.4, label=name)
    axes.set_xticks(range(len(speedups)), [str(batch["batch_size"]) for batch in report["batches"]])
    axes.set_xlabel("batch size")
    axes.set_ylabel("tokens per second, vanilla decoding = 1")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.4)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    axes.set_title(f"{report['target']['name']}: every draft size, and the engine's choice", loc="left", weight="bold")
    simulated = settings["simulated_acceptance"]
    where = hardware["accelerator"] or f"{hardware['cpu']}, {hardware['cores']} cores"
    how = "" if simulated is None else f" · acceptance simulated: {simulated:g}"
    caption = f"{where} · {report['target']['dtype']} · temperature {settings['temperature']:g}{how}"
    figure.supxlabel(caption, fontsize=8.5, color="gray")
    figure.savefig(path, dpi=150, format="png")


def size(tier: Tier) -> dict[str, int]:
    """Returns the draft size as a record has it; all 0 for vanilla decoding."""
    return {key: 0 if tier.tree is None else getattr(tier.tree, field) for field, key in SIZE.items()}


def _write(folder: disk.Path, report: dict[str, Any]) -> None:
    with disk.lock(folder / "decode.json"):
        disk.write_json(folder / "decode.json", report)
        keys = (*SIZE.values(), "acc_length", "step_time", "speed", "completion_tokens")
        found = [(batch["batch_size"], way) for batch in report["batches"] for way in batch["ways"] if "steps" in way]
        records = [{"batch_size": batch} | {key: way[key] for key in keys} for batch, way in found]
        with disk.atomic(folder / "decode.jsonl") as temporary:  # vanilla decoding has sizes of 0
            temporary.write_text("".join(json.dumps(record) + "\n" for record in records))
        with disk.atomic(folder / "decode.png") as temporary:
            draw(report, temporary)
