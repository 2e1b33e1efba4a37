"""One self-contained page about a run's data: no script, no other file, no other host; light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from eagle3_jax.data.languages import ENGLISH

_CSS = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --line: #d8dee4; --paper: #ffffff; --card: #f6f8fa;
  --track: #e4e9ee; --bar: #0072b2; --other: #d98200; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa4af; --line: #343b44; --paper: #0f1318;
  --card: #181d24; --track: #29313a; --bar: #56b4e9; --other: #e6a23c; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 74rem;
  margin: 0 auto; padding: 2rem 1.25rem 3rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .25rem; } h2 { font-size: 1.05rem; margin: 0 0 .15rem; }
p { margin: 0 0 .9rem; } .soft, header p, footer { color: var(--soft); } .soft, footer { font-size: 13px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(7.9rem, 1fr)); gap: .8rem; margin: 1.4rem 0; }
.tile, section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: .75rem .9rem; } .tile b { display: block; font-size: 1.55rem; line-height: 1.2; font-weight: 650; }
.tile span { color: var(--soft); font-size: 13px; }
main { columns: 2 30rem; column-gap: 1rem; }
section { padding: 1.1rem 1.25rem; margin: 0 0 1rem; break-inside: avoid; min-width: 0; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
td, th { padding: .2rem 0 .2rem .75rem; text-align: right; white-space: nowrap; vertical-align: middle; }
td:first-child, th:first-child { padding-left: 0; text-align: left; white-space: normal; overflow-wrap: break-word; }
th { color: var(--soft); font-weight: 500; } td.bar { width: 34%; min-width: 6rem; }
td.share { color: var(--soft); width: 3.6rem; }
.track { background: var(--track); border-radius: 3px; height: 9px; overflow: hidden; }
.track + .track { margin-top: 3px; } .fill { background: var(--bar); height: 100%; border-radius: 3px; }
.second .fill { background: var(--other); }
.key::before { content: ""; display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin-right: .4em;
  background: var(--bar); } .key.second::before { background: var(--other); } .key { margin-right: 1.1em; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .9rem 1.2rem; }
figure { margin: 0; } figcaption { font-size: 13px; } figcaption span { color: var(--soft); }
svg { display: block; width: 100%; height: auto; overflow: visible; } svg text { fill: var(--soft); font-size: 11px; }
svg .column { fill: var(--bar); } svg .axis { stroke: var(--line); } svg .line { fill: none; stroke: var(--bar);
  stroke-width: 2.5; stroke-linejoin: round; } svg .mark { fill: var(--other); }
svg .strong { fill: var(--ink); font-weight: 600; } footer { margin-top: .5rem; }
"""
_EXPLAINED = {
    "presidio": "Found by patterns and checksums, whatever the language: mail addresses, cards, accounts, phones. "
    "Names and postal addresses are found in none.",
    "cloud_dlp": "Found by Google Cloud DLP.",
}


def html(
    name: str,
    prepared: Mapping[str, Any],
    regenerated: Mapping[str, Any] | None = None,
    extracted: Mapping[str, Any] | None = None,
) -> str:
    """Renders the page.

    Args:
        name: of the run.
        prepared, regenerated, extracted: manifests of the stages; None: not finished.
    """
    prompts = prepared["results"]
    engine = prepared["identity"]["prepare"].get("personal_data_engine", "presidio")
    answers = regenerated and regenerated["results"]
    features = extracted and extracted["results"]
    parts = [
        _left_out(prompts),
        _categories(prompts, features),
        _histograms("Lengths of prompts", "characters", prompts.get("characters", {})),
        _languages(prompts.get("languages", {})),
        _personal(prompts["personal_data"], engine),
        _origins(prompts.get("provenance", {}), (features or {}).get("train", {}).get("provenance")),
        _histograms("Lengths of answers", "tokens", answers["train"].get("answer_lengths", {}) if answers else {}),
        _vocabulary(features or {}, extracted["identity"]["draft_vocab_size"] if extracted else 0),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Data of {escape(name)}</title><style>{_CSS}</style></head><body>\n"
        f"<header><h1>Data of {escape(name)}</h1><p>What its head learns from, and what was left out.</p></header>\n"
        f"{_tiles(prompts, answers, features)}\n<main>\n{''.join(parts)}</main>\n"
        "<footer>From the manifests of this run. Counts are of prompts unless a title says otherwise.</footer>\n"
        "</body></html>\n"
    )


def _tiles(prompts: Mapping[str, Any], answers: Mapping[str, Any] | None, features: Mapping[str, Any] | None) -> str:
    counts = prompts["prompts"]
    read = sum(prompts["sources"].values())
    tiles = [
        (_short(read), "prompts read"),
        (_short(counts["train"]), "to train"),
        (_short(counts["held_out"]), "held out"),
        (_percent(counts["rejects"], read), "left out"),
    ]
    if languages := prompts.get("languages"):
        total = sum(languages.values())
        tiles.append((_percent(total - languages.get(ENGLISH, 0), total), "seem not to be English"))
    if answers:
        tiles.append((_short(answers["train"]["conversations"]), "conversations to train"))
    if features:
        tiles.append((_short(features["train"]["loss_tokens"]), "tokens learned from"))
        tiles.append((f"{100 * features['draft_vocabulary_coverage']:.1f} %", "of them in the draft vocabulary"))
    drawn = (f"<div class=tile><b>{number}</b><span>{said}</span></div>" for number, said in tiles)
    return f"<div class=tiles>{''.join(drawn)}</div>"


def _left_out(prompts: Mapping[str, Any]) -> str:
    rejected, read = prompts["rejected"], sum(prompts["sources"].values())
    if not rejected:
        return _section("Left out", "No prompt was left out.", "")
    said = f"{prompts['prompts']['rejects']:,} of {read:,} prompts: duplicates, questions of benchmarks, broken lines."
    return _section("Left out, by reason", said, _bars(_ordered(rejected), read))


def _categories(prompts: Mapping[str, Any], features: Mapping[str, Any] | None) -> str:
    counts, tokens = prompts["categories"]["train"], (features or {}).get("train", {}).get("categories", {})
    held_out, mix = prompts["categories"]["held_out"], (features or {}).get("mix", {})
    total, all_tokens = sum(counts.values()), sum(tokens.values())
    second = bool(all_tokens)
    head = ["", "", "to train", "held out", *(["tokens"] if second else []), *(["mix"] if mix else [])]
    rows = []
    for name, count in _ordered(counts | {name: 0 for name in held_out if name not in counts}):
        tracks = _track(count, total) + (_track(tokens.get(name, 0), all_tokens, "second") if second else "")
        cells = [escape(name), f'<td class="bar">{tracks}', f"{count:,}", f"{held_out.get(name, 0):,}"]
        cells += [_percent(tokens.get(name, 0), all_tokens)] if second else []
        cells += [f"{100 * mix[name]['share']:.0f} %" if name in mix else "-"] if mix else []
        rows.append(cells)
    key = '<span class="key">prompts to train</span>'
    key += '<span class="key second">tokens of answers learned from</span>' if second else ""
    return _section("Categories", key, _table(head, rows))


def _languages(counts: Mapping[str, int]) -> str:
    if not counts:
        return ""
    said = "An estimate, by the letters and by words that English cannot do without."
    return _section("Languages", said, _bars(_ordered(counts), sum(counts.values())))


def _personal(counts: Mapping[str, int], engine: str) -> str:
    if not counts:
        return _section("Personal data", f"None was found. {_EXPLAINED[engine]}", "")
    return _section("Personal data, findings", _EXPLAINED[engine], _bars(_ordered(counts), sum(counts.values())))


def _origins(prompts: Mapping[str, Mapping[str, int]], learned: Mapping[str, Mapping[str, int]] | None) -> str:
    if not prompts:
        return ""
    rows = [
        [escape(source), escape(license), f"{count:,}"]
        + ([f"{learned.get(source, {}).get(license, 0):,}"] if learned is not None else [])
        for source, licenses in sorted(prompts.items())
        for license, count in _ordered(licenses)
    ]
    head = ["source", "licence", "prompts", *(["conversations to train"] if learned is not None else [])]
    return _section("Sources and licences", "", _table(head, rows))


def _histograms(title: str, unit: str, counts: Mapping[str, Mapping[str, int]]) -> str:
    if not counts:
        return ""
    bounds = [int(bound) for found in counts.values() for bound in found]
    first, last = (int(math.log2(bound)) for bound in (min(bounds), max(bounds)))
    edges = [1 << power for power in range(first, last + 1)]
    figures = []
    for name, found in sorted(counts.items(), key=lambda item: -sum(item[1].values())):
        total = sum(found.values())
        said = f"{escape(name)} <span>half have at most {_middle(found):,}</span>"
        values = [found.get(str(edge), 0) / total for edge in edges]
        figures.append(f"<figure><figcaption>{said}</figcaption>{_columns(values, edges)}</figure>")
    said = f"Share of each category by {unit}; a column ends at the number below it."
    return _section(title, said, f'<div class="grid">{"".join(figures)}</div>')


def _vocabulary(features: Mapping[str, Any], size: int) -> str:
    by_size = {int(name): share for name, share in features.get("coverage_by_size", {}).items()}
    if not by_size:
        return ""
    share = features["draft_vocabulary_coverage"]
    said = f"A draft vocabulary of {size:,} tokens holds {100 * share:.2f} % of the tokens learned from."
    return _section("Draft vocabulary", said, _curve(sorted(by_size.items()), (size, share)))


def _section(title: str, said: str, body: str) -> str:
    return f"<section><h2>{title}</h2><p class=soft>{said}</p>{body}</section>\n"


def _bars(rows: Sequence[tuple[str, int]], total: int) -> str:
    most = max(1, *(count for _, count in rows))
    return _table(
        [],
        [
            [
                escape(name),
                f'<td class="bar">{_track(count, most)}',
                f"{count:,}",
                f'<td class="share">{_percent(count, total)}',
            ]
            for name, count in rows
        ],
    )


def _track(value: int, total: int, kind: str = "") -> str:
    width = 100 * value / total if total else 0
    return f'<div class="track {kind}"><div class="fill" style="width:{width:.2f}%"></div></div>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A cell may begin with its own <td>."""
    top = f"<tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>" if head else ""
    lines = (
        "<tr>" + "".join(f"{cell if cell.startswith('<td') else f'<td>{cell}'}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table>{top}{''.join(lines)}</table>"


def _columns(shares: Sequence[float], edges: Sequence[int]) -> str:
    width, height, most = 240, 70, max(shares)
    step = width / len(shares)
    drawn = [f'<line class="axis" x1="0" x2="{width}" y1="{height}" y2="{height}"/>']
    labelled = max(1, math.ceil(len(edges) / 6))
    for place, (share, edge) in enumerate(zip(shares, edges, strict=True)):
        tall = (height - 4) * share / most
        x = place * step
        if share:
            place_and_size = f'x="{x + 1:.1f}" y="{height - tall:.1f}" width="{step - 2:.1f}" height="{tall:.1f}"'
            said = f"<title>at most {edge:,}: {100 * share:.1f} %</title>"
            drawn.append(f'<rect class="column" {place_and_size} rx="1.5">{said}</rect>')
        if (len(edges) - 1 - place) % labelled == 0:
            drawn.append(f'<text x="{x + step:.1f}" y="{height + 13}" text-anchor="end">{_power(edge)}</text>')
    return f'<svg viewBox="0 0 {width} {height + 16}" role="img">{"".join(drawn)}</svg>'


def _curve(points: Sequence[tuple[int, float]], chosen: tuple[int, float]) -> str:
    width, height, left = 520, 190, 40
    first, last = (math.log2(points[place][0]) for place in (0, -1))
    low = math.floor(10 * points[0][1]) / 10

    def at(size: int, share: float) -> tuple[float, float]:
        x = left + (width - left) * (math.log2(size) - first) / max(last - first, 1e-9)
        return x, height * (1 - (share - low) / max(1 - low, 1e-9))

    drawn = []
    for share in sorted({low, (low + 1) / 2, 1.0}):
        y = at(points[0][0], share)[1]
        drawn.append(f'<line class="axis" x1="{left}" x2="{width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{100 * share:.0f} %</text>')
    for power in range(math.ceil(first), math.floor(last) + 1, 2):
        x = at(1 << power, 1.0)[0]
        drawn.append(f'<text x="{x:.1f}" y="{height + 16}" text-anchor="middle">{_power(1 << power)}</text>')
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
    drawn.append(f'<polyline class="line" points="{path}"/>')
    x, y = at(*chosen)
    drawn.append(f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="5"/>')
    said = f"{chosen[0]:,} tokens: {100 * chosen[1]:.2f} %"
    drawn.append(
        f'<text class="strong" x="{min(x, width - 80):.1f}" y="{y + 38:.1f}" text-anchor="middle">{said}</text>'
    )
    caption = "<p class=soft>Share of the tokens that a vocabulary of the most frequent holds, by its size.</p>"
    return f'<svg viewBox="0 0 {width} {height + 20}" role="img">{"".join(drawn)}</svg>{caption}'


def _middle(counts: Mapping[str, int]) -> int:
    """The least bound within which half of all are."""
    total, seen = sum(counts.values()), 0
    for bound, count in sorted((int(bound), count) for bound, count in counts.items()):
        seen += count
        if 2 * seen >= total:
            return bound
    return 0


def _ordered(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _short(number: int) -> str:
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**4, "k")):
        if number >= limit:
            scaled = number / (1000 if unit == "k" else limit)
            return f"{scaled:.3g}{unit}"
    return f"{number:,}"


def _power(number: int) -> str:
    """A power of two, as short as it is usual."""
    return f"{number >> 10}k" if number >= 1024 else str(number)
