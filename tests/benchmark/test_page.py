"""The page of `benchmark serve` shows what was measured, in one file."""

from __future__ import annotations

import html.parser
import re
from typing import Any

import pytest

from eagle3_jax.benchmark import page, servers


def distribution(value: float) -> dict[str, float]:
    return {"mean": value, "p50": value, "p95": 2 * value, "p99": 3 * value}


def level(tokens_per_second: float, tpot: float) -> dict[str, Any]:
    figures = {"ttft": distribution(0.25), "tpot": distribution(tpot), "tokens": 10}
    return {
        **figures,
        "tokens_per_second": tokens_per_second,
        "requests": 16,
        "failed": 1,
        "identical": 15,
        "categories": {"code": figures, "a <b> & c": {**figures, "tpot": None}},
    }


@pytest.fixture
def report() -> dict[str, Any]:
    return {
        "traffic": {"concurrency": [1, 8], "rates": [0.5], "temperature": 0.0, "max_tokens": 64},
        "hardware": {"accelerator": None, "cpu": "a CPU", "cores": 2},
        "target": {"name": "a-target", "dtype": "float32"},
        "prompts_file": {"name": "held_out.jsonl"},
        "ways": {
            "vanilla": {"levels": [level(40.0, 0.0200), level(150.0, 0.0400), level(30.0, 0.0300)]},
            "speculative": {"levels": [level(60.0, 0.0125), level(180.0, 0.0320), level(33.0, 0.0250)]},
            "<other>": {"levels": [level(41.0, 0.0199), level(151.0, 0.0399), level(31.0, 0.0299)]},
        },
    }


class _Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.asked: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.asked += [value for name, value in attrs if name in ("src", "href", "xlink:href") and value]

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


@pytest.mark.slow
def test_the_page_holds_every_chart_and_figure_and_asks_nobody(report):
    read = _Page()
    read.feed(page.html(report))
    assert read.tags.count("svg") == 4 and "script" not in read.tags and "b" not in read.tags
    assert all(asked.startswith("#") for asked in read.asked)  # marks within a chart
    assert not re.search(r"url\((?!#)|@import", page.html(report))
    text = " ".join(read.text.split())
    for found in ("1 client vanilla 40.0 250 20.0 1.00x 15/16 1", "speculative 60.0 250 12.5 1.60x 15/16 1"):
        assert found in text
    assert "0.5 requests a second vanilla 30.0" in text and "<other> 151.0" in text
    assert "1.60" in text and "code" in text  # above a bar


def test_the_table_says_the_same(report):
    lines = servers.table(report).splitlines()
    (row,) = [line.split() for line in lines if line.startswith("speculative") and "180.0" in line]
    assert row == ["speculative", "180.0", "250", "500", "32.0", "64.0", "96.0", "1.25x", "15/16", "1"]
    assert [line.split("  ")[0] for line in lines if "TTFT" in line] == [
        "1 client",
        "8 clients",
        "0.5 requests a second",
    ]


def test_a_server_that_answers_in_one_chunk_has_no_time_per_token(report):
    """In neither chart nor table: its figures are gaps."""
    for name in ("vanilla", "speculative"):
        for one in report["ways"][name]["levels"]:
            one["tpot"] = one["categories"]["code"]["tpot"] = None
    assert page.html(report).count("<svg") == 4
    row = next(line.split() for line in servers.table(report).splitlines() if line.startswith("speculative"))
    assert row == ["speculative", "60.0", "250", "500", "-", "-", "-", "-", "15/16", "1"]
