"""One self-contained page with the charts of `benchmark serve`: no script, no other file, no other host."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from html import escape
from typing import Any

# Okabe and Ito's palette, safe for the colour-blind.
_COLOURS = ("#1F2328", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00")
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "axes.edgecolor": "#8A8F98",
    "svg.fonttype": "none",
}
_CSS = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1F2328; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
figure { margin: 1.5rem 0; } svg { max-width: 100%; height: auto; }
figcaption, footer { color: #57606A; font-size: 14px; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #E6E8EB; }
th:first-child, td:first-child, td.name { text-align: left; }
"""


def html(report: dict[str, Any]) -> str:
    """Renders the report of `servers.run`."""
    ways, hardware, asked = report["ways"], report["hardware"], report["traffic"]
    where = hardware["accelerator"] or f"{hardware['cpu']}, {hardware['cores']} cores"
    target = escape(report["target"]["name"])
    figures = []
    if len(asked["concurrency"]) > 1:
        for key, unit, title, better in (
            ("tpot", "ms", "Time per output token (TPOT)", "lower is better"),
            ("throughput", "tokens a second", "Throughput", "higher is better"),
            ("ttft", "ms", "Time to the first token (TTFT)", "lower is better"),
        ):
            figures.append(_figure(_over_concurrency(ways, asked["concurrency"], key, unit), f"{title}; {better}."))
    figures.append(
        _figure(
            _by_category(ways, titles(asked)[0]),
            f"Speed-up by category with {titles(asked)[0]}: mean time per output token of vanilla decoding over each.",
        )
    )
    how = f"{report['target']['dtype']}, temperature {asked['temperature']:g}, {asked['max_tokens']} tokens at most"
    said = f"{target} · {escape(where)} · {how} · prompts: {escape(report['prompts_file']['name'])}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{target} under traffic</title><style>{_CSS}</style></head><body>\n"
        f"<h1>{target} under traffic</h1>\n<p>{said}</p>\n{''.join(figures)}\n{_table(report)}\n"
        "<footer>TTFT and TPOT: median of the requests of a level; p95 and p99 are in serve.json. Identical: answers "
        "equal to vanilla decoding's, to the character.</footer>\n</body></html>\n"
    )


def titles(asked: dict[str, Any]) -> list[str]:
    """Names the levels of a `TrafficConfig`."""
    clients = [f"{n} client{'s' if n > 1 else ''}" for n in asked["concurrency"]]
    return clients + [f"{rate:g} requests a second" for rate in asked["rates"]]


def speed_up(vanilla: dict[str, Any], level: dict[str, Any]) -> str:
    """Divides the mean times per output token; "-" where all answers of either came in one chunk."""
    mine, other = level["tpot"], vanilla["tpot"]
    return "-" if mine is None or other is None else f"{other['mean'] / mine['mean']:.2f}x"


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{caption}</figcaption></figure>\n"


def _over_concurrency(ways: dict[str, Any], concurrency: Sequence[int], key: str, unit: str) -> str:
    def value(level: dict[str, Any]) -> float:
        if key == "throughput":
            return level["tokens_per_second"]
        return math.nan if level[key] is None else 1e3 * level[key]["p50"]  # a gap in the line

    def draw(axes: Any) -> None:
        for (name, way), colour in zip(ways.items(), _colours(len(ways)), strict=True):
            values = [value(level) for level in way["levels"][: len(concurrency)]]
            axes.plot(range(len(values)), values, "o-", color=colour, linewidth=2, label=name)
        axes.set_xticks(range(len(concurrency)), [str(clients) for clients in concurrency])
        axes.set_xlabel("clients at once")
        axes.set_ylabel(unit)

    return _svg(draw)


def _by_category(ways: dict[str, Any], title: str) -> str:
    vanilla, *others = ways.values()
    base = vanilla["levels"][0]["categories"]
    shared = [name for name, found in base.items() if found["tpot"] is not None]

    def speed_up(way: dict[str, Any], category: str) -> float:
        found = way["levels"][0]["categories"].get(category)
        return base[category]["tpot"]["mean"] / found["tpot"]["mean"] if found and found["tpot"] else 0.0

    def draw(axes: Any) -> None:
        width = 0.8 / max(len(others), 1)
        names = list(ways)[1:]
        for i, (name, colour) in enumerate(zip(names, _colours(len(ways))[1:], strict=True)):
            places = [x + (i - (len(others) - 1) / 2) * width for x in range(len(shared))]
            bars = axes.bar(places, [speed_up(others[i], c) for c in shared], 0.9 * width, color=colour, label=name)
            axes.bar_label(bars, fmt="%.2f", fontsize=8.5, color="#57606A", padding=2)
        axes.axhline(1, color=_COLOURS[0], linewidth=1, linestyle="--")
        axes.set_xticks(range(len(shared)), shared)
        axes.set_ylabel(f"speed-up, {title}")

    return _svg(draw)


def _colours(count: int) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(count)]


def _svg(draw: Any) -> str:
    import matplotlib
    from matplotlib.figure import Figure  # pyplot would choose a backend for the whole process

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9, 3.6), facecolor="white", layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color="#E6E8EB", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _table(report: dict[str, Any]) -> str:
    head = ("", "server", "tokens/s", "TTFT ms", "TPOT ms", "speed-up", "identical", "failed")
    rows = ["<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"]
    first = next(iter(report["ways"].values()))
    for number, (title, vanilla) in enumerate(zip(titles(report["traffic"]), first["levels"], strict=True)):
        for place, (name, way) in enumerate(report["ways"].items()):
            level = way["levels"][number]
            tpot = level["tpot"]
            cells = [
                title if place == 0 else "",
                escape(name),
                f"{level['tokens_per_second']:.1f}",
                f"{1e3 * level['ttft']['p50']:.0f}",
                "-" if tpot is None else f"{1e3 * tpot['p50']:.1f}",
                speed_up(vanilla, level),
                f"{level['identical']}/{level['requests']}",
                str(level["failed"]),
            ]
            rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table>{''.join(rows)}</table>"
