"""`python -m eagle3_jax.report`: a run's measurements as a table, as `report.json` and as a picture.

With `--data`: a page about what the run learns from, `data.html`, once `prepare` has finished.
"""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from eagle3_jax.config import FOLDERS, RunConfig
from eagle3_jax.data import page
from eagle3_jax.runs import command, command_line, disk, manifest, processes

# Okabe and Ito's palette: distinct with any colour vision, and in grey by lightness.
COLOURS = {"vanilla": "#B8BCC2", "chain": "#56B4E9", "tree": "#0072B2"}
GREYS = (COLOURS["vanilla"], "#7D838C", "#4A4F57")  # groups of vanilla decoding with different settings
OTHERS = ("#E69F00", "#009E73", "#CC79A7", "#D55E00")
_KEYS = ("identity", "config", "categories", "seconds", "hardware", "versions")
_NUMBERS = ("tau", "alpha", "speedup", "tokens_per_second", "identical", "prompts", "rounds", "tokens")
_SETTINGS = ("temperature", "max_tokens", "batch_size")
_UPRIGHT = 7  # most categories with room for names and numbers side by side


def run(config: RunConfig) -> dict[str, Any]:
    """Writes `report.json` and `report.png` into the run's folder.

    Returns:
        The content of `report.json`: `drafts` (one entry per file of the evaluation folder, e.g. "chain", "tree", each
        overall and per category, with its `draft`, `settings`, `hardware` and `versions`), `vanilla` (see `assemble`),
        `stages` (manifests' results and seconds), `target`, `prompts_file`.

    Raises:
        ValueError: no evaluation yet, or evaluations of different targets or prompts.
    """
    folder = config.run_folder
    evaluations = _evaluations(config.folder("evaluate"))
    report = assemble(evaluations, _stages(config))
    with disk.lock(folder / "report.json"), disk.lock(folder / "report.png"):
        disk.write_json(folder / "report.json", report)
        with disk.atomic(folder / "report.png") as temporary:
            draw(report, temporary)
    return report


def data(config: RunConfig) -> disk.Path:
    """Writes `data.html` into the run's folder, from the manifests of the stages that have finished. Returns its path.

    Raises:
        ManifestError: `prepare` has not finished.
    """
    prepared = manifest.read(config.folder("prepare"), "prepare", verify=False)
    later: dict[str, dict[str, Any]] = {}
    for verb in ("regenerate", "extract"):
        with contextlib.suppress(manifest.ManifestError):  # not run, or still running
            later[verb] = manifest.read(config.folder(verb), verb, verify=False)
    path = config.run_folder / "data.html"
    with disk.lock(path), disk.atomic(path) as temporary:
        temporary.write_text(
            page.html(config.run_folder.name, prepared, later.get("regenerate"), later.get("extract")), encoding="utf-8"
        )
    return path


def assemble(evaluations: dict[str, dict[str, Any]], stages: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Puts evaluation reports (name -> report of `evaluate`) and stages together.

    `vanilla` has an entry for each group of evaluations (`of`) with the same settings, hardware and versions. Its rates
    are means over the group, weighted by time: each evaluation measured vanilla decoding anew, beside its own draft.

    Raises:
        ValueError: the evaluations measured different targets or prompts.
    """
    first = next(iter(evaluations.values()))
    for name, evaluation in evaluations.items():
        for field in ("target", "prompts_file"):
            found, expected = evaluation["identity"][field], first["identity"][field]
            if found != expected:
                raise ValueError(f"evaluation/{name}.json: {field}: found {found!r}, expected {expected!r}")

    def numbers(part: dict[str, Any]) -> dict[str, Any]:
        return {key: part[key] for key in _NUMBERS}

    def settings(evaluation: dict[str, Any]) -> dict[str, Any]:
        return {key: evaluation["config"]["evaluate"][key] for key in _SETTINGS}

    def mean(parts: Sequence[dict[str, Any]]) -> float:
        seconds = [part["seconds"]["vanilla"] for part in parts]
        rates = [part["tokens_per_second"]["vanilla"] for part in parts]
        return sum(r * s for r, s in zip(rates, seconds, strict=True)) / sum(seconds)

    def vanilla(names: Sequence[str]) -> dict[str, Any]:
        members = [evaluations[name] for name in names]
        measured = {category: None for member in members for category in member["categories"]}
        return {
            "of": list(names),
            "tokens_per_second": mean(members),
            "categories": {
                category: mean([m["categories"][category] for m in members if category in m["categories"]])
                for category in measured
            },
        }

    def machine(evaluation: dict[str, Any]) -> dict[str, Any]:
        return {key: evaluation[key] for key in ("hardware", "versions")}

    alike: dict[str, list[str]] = {}
    for name, evaluation in evaluations.items():
        alike.setdefault(json.dumps(settings(evaluation) | machine(evaluation), sort_keys=True), []).append(name)
    return {
        "vanilla": [vanilla(names) for names in alike.values()],
        "drafts": {
            name: numbers(evaluation)
            | machine(evaluation)
            | {
                "tree": evaluation["config"]["evaluate"]["tree"],
                "draft": evaluation["identity"]["draft"],
                "settings": settings(evaluation),
                "categories": {c: numbers(part) for c, part in evaluation["categories"].items()},
            }
            for name, evaluation in evaluations.items()
        },
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
        rows = [(f"{name} ({_size(draft['tree'])})", "vanilla tok/s", f"{name} tok/s", "speed-up", "tau", "identical")]
        several = draft["categories"].items() if len(draft["categories"]) > 1 else ()
        for category, part in [*several, ("all", draft)]:
            rates = part["tokens_per_second"]
            rows.append(
                (
                    category,
                    _number(rates["vanilla"], 1),
                    _number(rates["speculative"], 1),
                    _number(part["speedup"], 2, "x"),
                    _number(part["tau"], 2),
                    _identical(part),
                )
            )
        lines += command.aligned(rows)
        shares = "  ".join(_number(share, 2) for share in draft["alpha"]) or "-"
        lines += [f"accepted per draft position, of those that got there: {shares}", ""]
    lines += [*_of_each(report["drafts"], _draft), *_of_each(report["drafts"], _settings)]
    target = f"{report['target']['name']} in {report['target']['dtype']}"
    lines += _of_each(report["drafts"], lambda draft: f"{target} on {_machine(draft)}")
    if (said := headline(report)) is not None:
        lines.append(f"{said}, with what the engine chose")
    return "\n".join(lines)


def draw(report: dict[str, Any], path: pathlib.Path) -> None:
    """Draws tokens/s per category (left) and acceptance per draft position (right) as a PNG."""
    import matplotlib
    from matplotlib.figure import Figure  # pyplot would choose a backend for the whole process

    drafts = report["drafts"]
    colours = COLOURS | dict(zip([name for name in drafts if name not in COLOURS], OTHERS * 9, strict=False))
    style: dict[Any, Any] = {
        "font.size": 10,
        "font.family": "DejaVu Sans",
        "axes.edgecolor": "#8A8F98",
        "text.color": "#1F2328",
    }
    style |= {"axes.labelcolor": "#1F2328", "xtick.color": "#424A53", "ytick.color": "#424A53"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(11, 4.6), facecolor="white")
        left, right = figure.subplots(1, 2, width_ratios=(2.3, 1))
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.06, wspace=0.05)
        _draw_rates(left, report, colours)
        _draw_acceptance(right, drafts, colours)
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(length=0)
        right.grid(axis="y", color="#E6E8EB", linewidth=0.8)  # bars on the left are labelled
        numbers = "      ".join(
            f"{name}: speed-up {_number(draft['speedup'], 2, 'x')}, tau {_number(draft['tau'], 2)}, "
            f"identical {_identical(draft)}"
            for name, draft in drafts.items()
        )
        title = ": ".join(filter(None, [f"{report['target']['name']} with drafts", headline(report)]))
        figure.suptitle(f"{title}\n", x=0.012, ha="left", weight="bold", fontsize=13)
        figure.text(0.012, 0.925, numbers, ha="left", va="top", fontsize=min(10.5, 26 / len(drafts)))
        machines = _of_each(drafts, lambda draft: f"{_machine(draft)}, {report['target']['dtype']}")
        said = "\n".join([*machines, *_of_each(drafts, _settings)])
        figure.supxlabel(said, fontsize=8.5, color="#6E7781")
        figure.savefig(path, dpi=150, format="png")


def _draw_rates(axes: Any, report: dict[str, Any], colours: dict[str, str]) -> None:
    drafts, several = report["drafts"], len(report["vanilla"]) > 1
    categories = list(dict.fromkeys(category for draft in drafts.values() for category in draft["categories"]))
    bars = {}
    for vanilla, grey in zip(report["vanilla"], GREYS * 9, strict=False):
        name = f"vanilla, as {', '.join(vanilla['of'])}" if several else "vanilla"
        colours = colours | {name: grey}
        bars[name] = [vanilla["tokens_per_second"], *(vanilla["categories"].get(c, math.nan) for c in categories)]
    for name, draft in drafts.items():
        parts = [draft, *map(draft["categories"].get, categories)]  # an evaluation of few prompts may lack a category
        bars[name] = [part["tokens_per_second"]["speculative"] or 0.0 if part else math.nan for part in parts]
    width = 0.8 / len(bars)
    places = [0.0, *(1.25 + i for i in range(len(categories)))]  # a gap between all and the categories
    for i, (name, rates) in enumerate(bars.items()):
        offset = (i - (len(bars) - 1) / 2) * width
        drawn = axes.bar([place + offset for place in places], rates, width * 0.94, color=colours[name], label=name)
        room = {"fontsize": 8} if len(categories) <= _UPRIGHT else {"fontsize": 6, "rotation": 90}
        axes.bar_label(drawn, fmt="%.0f", padding=2, color="#424A53", **room)
    axes.set_xticks(places, [label.replace("_", "\n") for label in ("all prompts", *categories)])
    if len(categories) > _UPRIGHT:
        axes.tick_params("x", rotation=35)
    axes.get_xticklabels()[0].set_weight("bold")
    axes.set_ylabel("tokens per second")
    axes.margins(x=0.02, y=0.2)
    axes.legend(loc="upper right", ncols=len(bars), frameon=False, fontsize=9.5, handlelength=1, columnspacing=1.2)


def _draw_acceptance(axes: Any, drafts: dict[str, Any], colours: dict[str, str]) -> None:
    # Where the engine chose among draft sizes, few rounds had the later positions at all.
    fixed = {name: draft for name, draft in drafts.items() if draft["tree"] != "auto"} or drafts
    longest = max(1, *(len(draft["alpha"]) for draft in fixed.values()))
    for name, draft in fixed.items():
        points = [(i, share) for i, share in enumerate(draft["alpha"], start=1) if share is not None]
        axes.plot(
            [i for i, _ in points],
            [100 * share for _, share in points],
            marker="os^Dv"[list(drafts).index(name) % 5],
            markersize=7,
            linewidth=2,
            color=colours[name],
            label=name,
        )
    axes.set_ylim(0, 100)
    axes.set_xlim(0.7, longest + 0.3)
    axes.set_xticks(range(1, longest + 1))
    axes.yaxis.set_major_formatter("{x:.0f} %")
    axes.set_xlabel("draft position")
    axes.set_ylabel("accepted, of those that got there")
    axes.legend(loc="upper right", frameon=False, fontsize=9.5, ncols=2)


def _evaluations(folder: disk.Path) -> dict[str, dict[str, Any]]:
    """Reads every report in the evaluation folder, by name, "chain" and "tree" first."""
    paths = sorted(folder.glob("*.json"), key=lambda path: (path.stem not in COLOURS, path.stem))
    if not paths:
        raise ValueError(f"{folder}: no *.json, expected the output of `python -m eagle3_jax.evaluate`")
    found = {}
    for path in paths:
        found[path.stem] = disk.read_json(path)
        if missing := [key for key in _KEYS if key not in found[path.stem]]:
            raise ValueError(
                f"{path}: got no {', '.join(missing)}, expected a report of `python -m eagle3_jax.evaluate`"
            )
    return found


def _stages(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Reads each stage's results (from its manifest) and seconds (from `stages.json`, where that exists)."""
    clock = config.run_folder / "stages.json"
    stages: dict[str, dict[str, Any]] = {}
    for name, seconds in (json.loads(clock.read_text()) if clock.exists() else {}).items():
        stages[name] = {"seconds": seconds}
    for verb in FOLDERS:
        with contextlib.suppress(manifest.ManifestError):  # not run, or still running
            stages.setdefault(verb, {})["results"] = manifest.read(config.folder(verb), made_by=verb, verify=False)[
                "results"
            ]
    return stages


def _size(tree: dict[str, int] | str) -> str:
    if isinstance(tree, str):
        return "chosen by the engine"
    if copied := tree.get("lookup_tokens"):
        return f"depth {tree['num_steps']}, {copied} copied, {tree['num_draft_tokens']} tokens"
    if tree["topk"] == 1:
        return f"{tree['num_steps']} drafts in a row"
    return f"depth {tree['num_steps']}, {tree['num_draft_tokens']} tokens"


def _of_each(drafts: dict[str, dict[str, Any]], words: Callable[[dict[str, Any]], str]) -> list[str]:
    """Describes evaluations: one text if it is the same for all, else one for each name."""
    said = {name: words(draft) for name, draft in drafts.items()}
    same = set(said.values())
    return list(same) if len(same) == 1 else [f"{name}: {one}" for name, one in said.items()]


def _draft(draft: dict[str, Any]) -> str:
    digests = ", ".join(f"{name} {digest[:8]}" for name, digest in (draft["draft"]["files"] or {}).items())
    return f"drafted by {draft['draft']['folder']}" + (f" (sha256: {digests})" if digests else "")


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
