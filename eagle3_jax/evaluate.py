"""`python -m eagle3_jax.evaluate`: acceptance, losslessness, and speed against vanilla decoding, as a JSON report."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from eagle3_jax.acceptance import AcceptanceCounts
from eagle3_jax.config import RunConfig, run_file
from eagle3_jax.data import sources
from eagle3_jax.decoding import data_parallel
from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.decoding.measure.compare import Tally, compare, total
from eagle3_jax.decoding.measure.near_tie import near_tie
from eagle3_jax.formats.packaged import chosen_draft, draft_identity
from eagle3_jax.mesh import Replica, make_mesh, own_replica
from eagle3_jax.models.checkpoint.fetch import Target, load_target
from eagle3_jax.runs import command, command_line, disk, machine, manifest, processes

Place = str | disk.Path


def run(
    config: RunConfig, prompts_path: Place, output: Place, target: Target | None = None, *, replace: bool = False
) -> dict[str, Any]:
    """Measures the draft of `config` on the prompts of a file, writes the report to `output` and returns it.

    Each row of the mesh has an engine of its own and a share of the prompts; rates are those of one engine. A report of
    the same measurement is returned unchanged; `replace` overwrites one of another. Raises ManifestError: no draft, or
    one for another target; `output` holds something else. ValueError: no usable prompts.
    """
    output = disk.path_of(output)
    replica = own_replica(make_mesh(config.mesh))
    settings = config.evaluate
    prompts, unusable = sources.read_file(prompts_path)
    rows = [target] if target else data_parallel.targets(load_target(config.target, replica.mesh), replica)
    target = rows[0]
    draft, folder = chosen_draft(settings.draft, config.folder("export"), target)
    identity = {
        "evaluate": run_file.to_dict(settings),
        "seed": config.seed,
        "target": target.identity,
        "draft": draft_identity(draft, folder, settings.token_map),
        "prompts_file": {"name": pathlib.Path(prompts_path).name, "sha256": disk.digest(prompts_path)},
        **machine.timed_on(config.mesh.model),
    }
    with disk.lock(output):
        if processes.agree(lambda: _finished(output, identity, replace)):
            processes.say(f"{output}: already finished, nothing to do (remove it to measure again)")
            return disk.read_json(output)
        measured = _measure(config, rows, replica, draft, prompts, prompts_path)
        report = {
            **measured,
            "left_out": measured["left_out"] | {"unusable": unusable},
            "identity": identity,
            "config": run_file.to_dict(config),
            "hardware": identity["hardware"],
            "versions": identity["versions"],
        }
        processes.agree(lambda: disk.write_json(output, report))
    return disk.read_json(output)


def _measure(
    config: RunConfig,
    targets: Sequence[Target],
    replica: Replica,
    draft: str,
    prompts: Sequence[sources.Prompt],
    prompts_path: Place,
) -> dict[str, Any]:
    settings, target = config.evaluate, targets[0]
    room = target.model.config.max_position_embeddings - settings.max_tokens
    fitting, left_out = sources.encode(prompts, target.tokenizer, room, f"--prompts {prompts_path}")
    measured = sources.spread(fitting, settings.limit)
    longest = max(len(prompt["prompt"]) for prompt in measured)
    shares = _shares(measured, replica.count * len(targets), settings.batch_size)
    params = SamplingParams(temperature=settings.temperature, max_tokens=settings.max_tokens, seed=config.seed)
    exact, works = settings.temperature == 0, []
    with processes.among(replica.processes):
        # One row behind the other: what rounds cost is measured.
        for number, row in enumerate(targets, start=replica.index * len(targets)):
            if number < len(shares):
                engines = _engines(config, row, draft, longest + settings.max_tokens, exact=exact)
                judge = functools.partial(near_tie, row.model) if exact else None
                asked = shares[number], params, settings.batch_size, judge
                works.append(functools.partial(compare, *engines, *asked, progress=number == 0))
        found = data_parallel.together(works) if works else []
    own = [{name: dataclasses.asdict(tally) for name, tally in tallies.items()} for tallies in found]
    # The processes of a replica count the same.
    gathered = processes.gather(own if processes.index() == replica.processes[0] else [])
    tallies = [
        {name: Tally(**tally | {"counts": AcceptanceCounts(**tally["counts"])}) for name, tally in row.items()}
        for rows in gathered
        for row in rows
    ]
    categories = {
        name: total([row[name] for row in tallies if name in row])
        for name in dict.fromkeys(prompt["category"] for prompt in measured)
    }
    return {
        **total(list(categories.values())).report(exact=exact),
        "categories": {name: tally.report(exact=exact) for name, tally in categories.items()},
        "left_out": left_out,
        "engines": len(shares),
    }


def _engines(config: RunConfig, target: Target, draft: str, length: int, *, exact: bool) -> tuple[Engine, Engine]:
    """Loads both engines, without prefix reuse: prompts repeat, and prefill is part of the measurement."""
    settings = config.evaluate
    sizes = settings.batch_size, length
    vanilla = Engine.load(target, None, "auto", *sizes, prefix_cache=False)
    speculative = Engine.load(target, draft, settings.tree, *sizes, token_map=settings.token_map, prefix_cache=False)
    if settings.tree == "auto":
        speculative.warm_up(greedy_alone=exact, progress=processes.index() == 0)
    return vanilla, speculative


def _shares(prompts: Sequence[Mapping[str, Any]], engines: int, batch_size: int) -> list[list[Mapping[str, Any]]]:
    """Deals prompts to engines, categories evenly; fewer engines where their batches would not be full."""
    counts = Counter(prompt["category"] for prompt in prompts)
    used = max(1, min(engines, math.ceil(min(counts.values()) / batch_size)))
    places = {category: place for place, category in enumerate(counts)}
    ordered = sorted(prompts, key=lambda prompt: places[prompt["category"]])
    return [list(ordered[number::used]) for number in range(used)]


def summary(report: dict[str, Any]) -> str:
    """Formats the report as a line for each category where there are several, and one for all."""
    rows: list[tuple[str, ...]] = [("", "tau", "speed-up", "vanilla", "speculative tok/s", "identical")]
    categories = report["categories"]
    for name, part in [*(categories.items() if len(categories) > 1 else ()), ("all", report)]:
        rates = part["tokens_per_second"]
        numbers = [part["tau"], part["speedup"], rates["vanilla"], rates["speculative"]]
        same = "-" if part["identical"] is None else f"{part['identical']}/{part['prompts']}"
        rows.append((name, *("-" if number is None else f"{number:.2f}" for number in numbers), same))
    return "\n".join(command.aligned(rows))


def _finished(output: disk.Path, identity: dict[str, Any], replace: bool) -> bool:
    """Tells whether `output` holds the report of this measurement. Raises ManifestError: it holds another file."""
    if not output.exists():
        return False
    try:
        report = disk.read_json(output)
        found, _ = report["identity"], report["config"]
    except (disk.JsonError, KeyError) as error:
        expected = "a report of `evaluate`; remove it, or choose another --output"
        raise manifest.ManifestError(f"{output}: got another file, expected {expected}") from error
    try:
        manifest.check_same(output, found, identity, "--output")
        return True
    except manifest.ManifestError:
        if replace:
            return False
        raise


def main(argv: Sequence[str] | None = None) -> None:
    config, arguments = command_line.read("evaluate", argv)
    with command.run("evaluate", resumes=False):
        report = run(config, arguments.prompts, arguments.output, replace=arguments.replace)
        if processes.index() == 0:
            print(summary(report))
        for mismatch in report["mismatches"] or []:
            processes.say(f"NOT identical: prompt {mismatch['id']}, from token {mismatch['position']} on")
        for tie in report["ties"] or []:
            apart = f"logits {tie['gap']:.2g} apart, where rounding moves them by up to {tie['bound'] / 2:.2g}"
            processes.say(f"near-tie: prompt {tie['id']}, token {tie['position']}: {apart}")


if __name__ == "__main__":
    main()
