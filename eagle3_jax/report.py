"""`python -m eagle3_jax.report`: a run's measurements as table, `report.json` and picture; or its data, as tables."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from eagle3_jax.config import FOLDERS, RunConfig
from eagle3_jax.runs import command, command_line, disk, manifest, processes

_KEYS = ("identity", "config", "categories", "seconds", "hardware", "versions")
_NUMBERS = ("tau", "alpha", "speedup", "tokens_per_second", "identical", "prompts", "rounds", "tokens")
_SETTINGS = ("temperature", "max_tokens", "batch_size")
_UPRIGHT = 7  # most categories with room for names and numbers side by side


def run(config: RunConfig) -> dict[str, Any]:
    """Writes `report.json` and `report.png` into the run's folder; returns the former's content.

    It has `drafts` (one entry per file of the evaluation folder, e.g. "chain", each overall and per category, with its
    `draft`, `settings`, `hardware` and `versions`), `stages` (manifests' results and seconds), `target`,
    `prompts_file`. Raises ValueError: no evaluation yet, or evaluations of different targets or prompts.
    """
    folder = config.run_folder
    evaluations = _evaluations(config.folder("evaluate"))
    report = assemble(evaluations, _stages(config))
    with disk.lock(folder / "report.json"), disk.lock(folder / "report.png"):
        disk.write_json(folder / "report.json", report)
        with disk.atomic(folder / "report.png") as temporary:
            draw(report, temporary)
    return report


def data(config: RunConfig) -> str:
    """Formats tables of what the run learns from, by its stages' manifests. Raises ManifestError: no `prepare` yet."""
    prompts = manifest.read(config.folder("prepare"), "prepare", verify=False)["results"]
    later = {verb: stage["results"] for verb, stage in _stages(config).items() if "results" in stage}
    answers, features = (later.get(verb, {}).get("train", {}) for verb in ("regenerate", "extract"))

    def licences(found: dict[str, dict[str, int]]) -> dict[str, int]:
        return {f"{source}, {license}": count for source, of in found.items() for license, count in of.items()}

    def medians(found: dict[str, dict[str, int]]) -> dict[str, int]:
        return {category: _middle(counts) for category, counts in found.items()}

    tables: dict[str, dict[str, dict[str, int]]] = {
        "prompts": {"": {"read": sum(prompts["sources"].values()), **prompts["prompts"]}},
        "left out": {"prompts": prompts["rejected"]},
        "category": {
            "to train": prompts["categories"]["train"],
            "held out": prompts["categories"]["held_out"],
            "tokens of answers": features.get("categories", {}),
            "characters, median": medians(prompts["characters"]),
            "tokens of an answer, median": medians(answers.get("answer_lengths", {})),
        },
        "personal data": {"findings": prompts["personal_data"]},
        "source, licence": {
            "prompts": licences(prompts["provenance"]),
            "conversations to train": licences(features.get("provenance", {})),
        },
    }
    lines = []
    for title, columns in tables.items():
        columns = {name: counts for name, counts in columns.items() if counts}
        names = dict.fromkeys(name for counts in columns.values() for name in counts)
        rows = [(name, *(f"{counts.get(name, 0):,}" for counts in columns.values())) for name in names]
        lines += [*command.aligned([(title, *columns), *rows]), ""] if rows else []
    if coverage := later.get("extract", {}).get("draft_vocabulary_coverage"):
        lines.append(f"the draft vocabulary holds {100 * coverage:.2f} % of the tokens of answers")
    return "\n".join(lines)


def _middle(counts: dict[str, int]) -> int:
    ordered = sorted((int(bound), count) for bound, count in counts.items())
    seen = itertools.accumulate(count for _, count in ordered)
    return next(bound for (bound, _), n in zip(ordered, seen, strict=True) if 2 * n >= sum(counts.values()))


def assemble(evaluations: dict[str, dict[str, Any]], stages: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Puts evaluation reports (name -> report of `evaluate`) and stages together. Raises ValueError: they differ."""
    first = next(iter(evaluations.values()))
    for name, evaluation in evaluations.items():
        for field in ("target", "prompts_file"):
            found, expected = evaluation["identity"][field], first["identity"][field]
            if found != expected:
                raise ValueError(f"evaluation/{name}.json: {field}: found {found!r}, expected {expected!r}")

    def picked(part: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
        return {key: part[key] for key in keys}

    def draft(evaluation: dict[str, Any]) -> dict[str, Any]:
        asked = evaluation["config"]["evaluate"]
        return {
            **picked(evaluation, (*_NUMBERS, "hardware", "versions")),
            "tree": asked["tree"],
            "draft": evaluation["identity"]["draft"],
            "settings": picked(asked, _SETTINGS),
            "categories": {name: picked(part, _NUMBERS) for name, part in evaluation["categories"].items()},
        }

    return {
        "drafts": {name: draft(evaluation) for name, evaluation in evaluations.items()},
        "target": first["identity"]["target"],
        "prompts_file": first["identity"]["prompts_file"],
        "stages": stages,
    }


def headline(report: dict[str, Any]) -> str | None:
    """Names the speed-up of the evaluation with the engine's own choice of draft size; None without one."""
    chosen = next((draft for draft in report["drafts"].values() if draft["tree"] == "auto"), None)
    speedup = chosen and chosen["speedup"]
    return None if speedup is None else f"{speedup:.2f} times as fast as vanilla decoding"


def table(report: dict[str, Any]) -> str:
    """Formats the report as fixed-width text: stages, rows for each draft, its settings, and the headline."""
    lines = []
    timed = {name: stage["seconds"] for name, stage in report["stages"].items() if stage.get("seconds") is not None}
    if timed:
        lines += command.aligned([("stage", "minutes"), *((name, f"{s / 60:.1f}") for name, s in timed.items())])
        lines += [f"total {sum(timed.values()) / 60:.1f} minutes", ""]
    for name, draft in report["drafts"].items():
        rows: list[tuple[str, ...]] = [
            (f"{name} ({_size(draft['tree'])})", "vanilla tok/s", f"{name} tok/s", "speed-up", "tau", "identical")
        ]
        several = draft["categories"].items() if len(draft["categories"]) > 1 else ()
        for category, part in [*several, ("all", draft)]:
            rates = [_number(part["tokens_per_second"][way], 1) for way in ("vanilla", "speculative")]
            rows.append((category, *rates, _number(part["speedup"], 2, "x"), _number(part["tau"], 2), _identical(part)))
        lines += command.aligned(rows)
        shares = "  ".join(_number(share, 2) for share in draft["alpha"]) or "-"
        lines += [f"accepted per draft position, of those that got there: {shares}", ""]
    target = f"{report['target']['name']} in {report['target']['dtype']}"
    for words in (_drafted_by, _settings, lambda draft: f"{target} on {_machine(draft)}"):
        lines += _of_each(report["drafts"], words)
    if (summary := headline(report)) is not None:
        lines.append(f"{summary}, with what the engine chose")
    return "\n".join(lines)


def draw(report: dict[str, Any], path: pathlib.Path) -> None:
    """Draws the speed-up per category (left) and acceptance per draft position (right) as a PNG."""
    from matplotlib.figure import Figure  # pyplot would choose a backend for the whole process

    drafts = report["drafts"]
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    sides = figure.subplots(1, 2, width_ratios=(2.3, 1))
    for draw_side, axes in zip((_draw_speedups, _draw_acceptance), sides, strict=True):
        draw_side(axes, drafts)
        axes.legend(loc="upper right", frameon=False, ncols=3)
        axes.spines[["top", "right"]].set_visible(False)
    title = ": ".join(filter(None, [f"{report['target']['name']} with drafts", headline(report)]))
    figure.suptitle(f"{title}\n", x=0.012, ha="left", weight="bold", fontsize=13)
    numbers = "      ".join(
        f"{name}: speed-up {_number(x['speedup'], 2, 'x')}, tau {_number(x['tau'], 2)}, identical {_identical(x)}"
        for name, x in drafts.items()
    )
    figure.text(0.012, 0.925, numbers, ha="left", va="top", fontsize=min(10.5, 26 / len(drafts)))
    machines = _of_each(drafts, lambda draft: f"{_machine(draft)}, {report['target']['dtype']}")
    figure.supxlabel("\n".join([*machines, *_of_each(drafts, _settings)]), fontsize=8.5, color="gray")
    figure.savefig(path, dpi=150, format="png")


def _draw_speedups(axes: Any, drafts: dict[str, Any]) -> None:
    categories = list(dict.fromkeys(category for draft in drafts.values() for category in draft["categories"]))
    width, crowded = 0.8 / len(drafts), len(categories) > _UPRIGHT
    for number, (name, draft) in enumerate(drafts.items()):
        parts = [draft, *map(draft["categories"].get, categories)]  # an evaluation of few prompts may lack a category
        speedups = [part["speedup"] if part and part["speedup"] else math.nan for part in parts]
        offset = (number - (len(drafts) - 1) / 2) * width
        bars = axes.bar([place + offset for place in range(len(parts))], speedups, width * 0.94, label=name)
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=7, rotation=90 if crowded else 0)
    labels = [label.replace("_", "\n") for label in ("all prompts", *categories)]
    axes.set_xticks(range(len(labels)), labels, rotation=35 if crowded else 0)
    axes.set_ylabel("tokens per second, vanilla decoding = 1")
    axes.axhline(1, color="gray", linewidth=1, linestyle="--")
    axes.margins(x=0.02, y=0.2)


def _draw_acceptance(axes: Any, drafts: dict[str, Any]) -> None:
    # Where the engine chose among draft sizes, few rounds had the later positions at all.
    fixed = {name: draft for name, draft in drafts.items() if draft["tree"] != "auto"} or drafts
    longest = max(1, *(len(draft["alpha"]) for draft in fixed.values()))
    for number, name in enumerate(drafts):
        if name in fixed:
            shares = [math.nan if share is None else 100 * share for share in fixed[name]["alpha"]]
            axes.plot(range(1, len(shares) + 1), shares, "o-", color=f"C{number}", label=name)
    axes.set(ylim=(0, 100), xlim=(0.7, longest + 0.3), xticks=range(1, longest + 1))
    axes.yaxis.set_major_formatter("{x:.0f} %")
    axes.set_xlabel("draft position")
    axes.set_ylabel("accepted, of those that got there")
    axes.grid(axis="y", alpha=0.4)  # bars on the left are labelled


def _evaluations(folder: disk.Path) -> dict[str, dict[str, Any]]:
    """Reads every report in the evaluation folder, by name, "chain" and "tree" first."""
    paths = sorted(folder.glob("*.json"), key=lambda path: (path.stem not in ("chain", "tree"), path.stem))
    if not paths:
        raise ValueError(f"{folder}: no *.json, expected the output of `python -m eagle3_jax.evaluate`")
    found = {}
    for path in paths:
        found[path.stem] = disk.read_json(path)
        if missing := [key for key in _KEYS if key not in found[path.stem]]:
            expected = "expected a report of `python -m eagle3_jax.evaluate`"
            raise ValueError(f"{path}: got no {', '.join(missing)}, {expected}")
    return found


def _stages(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Reads each stage's results (from its manifest) and seconds (from `stages.json`, where that exists)."""
    clock = config.run_folder / "stages.json"
    seconds = json.loads(clock.read_text()) if clock.exists() else {}
    stages: dict[str, dict[str, Any]] = {name: {"seconds": taken} for name, taken in seconds.items()}
    for verb in FOLDERS:
        with contextlib.suppress(manifest.ManifestError):  # not run, or still running
            results = manifest.read(config.folder(verb), made_by=verb, verify=False)["results"]
            stages.setdefault(verb, {})["results"] = results
    return stages


def _size(tree: dict[str, int] | str) -> str:
    if isinstance(tree, str):
        return "chosen by the engine"
    copied = f", {tree['lookup_tokens']} copied" if tree.get("lookup_tokens") else ""
    return f"depth {tree['num_steps']}{copied}, {tree['num_draft_tokens']} tokens"


def _of_each(drafts: dict[str, dict[str, Any]], words: Callable[[dict[str, Any]], str]) -> list[str]:
    """Describes evaluations: one text if it is the same for all, else one for each name."""
    texts = {name: words(draft) for name, draft in drafts.items()}
    same = set(texts.values())
    return list(same) if len(same) == 1 else [f"{name}: {one}" for name, one in texts.items()]


def _drafted_by(draft: dict[str, Any]) -> str:
    digests = ", ".join(f"{name} {digest[:8]}" for name, digest in (draft["draft"]["files"] or {}).items())
    return f"drafted by {draft['draft']['folder']}" + f" (sha256: {digests})" * bool(digests)


def _settings(draft: dict[str, Any]) -> str:
    temperature, tokens, batch = (draft["settings"][key] for key in _SETTINGS)
    return f"temperature {temperature:g}, batch {batch}, {tokens} tokens per prompt"


def _machine(draft: dict[str, Any]) -> str:
    hardware = draft["hardware"]
    return f"{hardware['accelerator'] or hardware['cpu']}, {hardware['cores']} cores"


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def _identical(part: dict[str, Any]) -> str:
    return "-" if part["identical"] is None else f"{part['identical']}/{part['prompts']}"


def main(argv: Sequence[str] | None = None) -> None:
    config, asked = command_line.read("report", argv)
    command.require(*(["report"] if not asked.data else []))
    with command.run("report"):
        if processes.index() == 0 and asked.data:
            print(data(config))
        elif processes.index() == 0:  # other processes wait at the barrier
            with processes.among([0]):
                report = run(config)
            print(table(report))
            print(f"\n{config.run_folder / 'report.json'}\n{config.run_folder / 'report.png'}")


if __name__ == "__main__":
    main()
