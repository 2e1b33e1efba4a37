"""The page of a run's data: whole at every stage, of one file, and with nothing of a prompt taken for markup."""

from __future__ import annotations

import html.parser
from typing import Any

import pytest

from eagle3_jax.data import page

PREPARED: dict[str, Any] = {
    "identity": {"prepare": {}},
    "results": {
        "prompts": {"train": 90, "held_out": 10, "rejects": 25},
        "categories": {"train": {"code": 60, "chat": 30}, "held_out": {"code": 6, "chat": 3, "rare": 1}},
        "sources": {"jsonl:<b>.jsonl": 125},
        "rejected": {"near duplicate": 20, "exact duplicate": 5, "eight words in a row of the benchmark x.jsonl": 0},
        "personal_data": {"EMAIL_ADDRESS": 7},
        "provenance": {"jsonl:<b>.jsonl": {"mit": 60, "unstated": 40}},
        "languages": {"English": 75, "Cyrillic": 25},
        "characters": {"code": {"64": 40, "1024": 26}, "chat": {"32": 34}},
    },
}
ANSWERED = {"results": {"train": {"conversations": 88, "answer_lengths": {"code": {"512": 58}, "chat": {"16": 30}}}}}
EXTRACTED: dict[str, Any] = {
    "identity": {"draft_vocab_size": 2048},
    "results": {
        "draft_vocabulary_coverage": 0.975,
        "coverage_by_size": {"256": 0.5, "1024": 0.9, "2048": 0.975, "32000": 1.0},
        "mix": {"code": {"share": 0.7, "kept": 70, "of": 100}},
        "train": {"loss_tokens": 12345, "categories": {"code": 10000, "chat": 2345}, "provenance": {}},
    },
}


class Reader(html.parser.HTMLParser):
    """What a page holds; unbalanced tags are an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "line", "rect", "circle", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "rect", "circle", "polyline"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.mark.parametrize("stages", [(), (ANSWERED,), (ANSWERED, EXTRACTED)])
def test_the_page_is_one_file_at_every_stage(stages):
    text = page.html("runs/<me>", PREPARED, *stages)
    read = Reader(text)
    said = " ".join(read.words)
    assert not read.addresses and "script" not in read.tags and "url(" not in text and "<b>.jsonl" not in text
    for words in (
        "Data of runs/<me>",
        "jsonl:<b>.jsonl",
        "near duplicate",
        "benchmark x.jsonl",
        "EMAIL_ADDRESS",
        "rare",
    ):
        assert words in said, words
    assert "Cyrillic" in said and "20.0 %" in said and "unstated" in said
    assert ("half have at most 512" in said) == bool(stages)
    for words in ("97.5 %", "2,048 tokens: 97.50 %", "70 %", "12.3k"):
        assert (words in said) == (len(stages) == 2), words


def test_an_earlier_version_s_manifest_is_shown_as_far_as_it_goes():
    results = {
        name: x for name, x in PREPARED["results"].items() if name not in ("provenance", "languages", "characters")
    }
    text = page.html("x", {"identity": {"prepare": {}}, "results": results | {"rejected": {}, "personal_data": {}}})
    said = " ".join(Reader(text).words)
    assert "No prompt was left out." in said and "None was found." in said and "Languages" not in said


def test_who_found_personal_data_is_said():
    for engine, words in (
        ("presidio", "Names and postal addresses are found in none"),
        ("cloud_dlp", "Google Cloud DLP"),
    ):
        prepared = PREPARED | {"identity": {"prepare": {"personal_data_engine": engine}}}
        assert words in page.html("x", prepared)


@pytest.mark.parametrize(
    ("number", "said"), [(7, "7"), (9999, "9,999"), (12345, "12.3k"), (1_500_000, "1.5M"), (2_000_000_000, "2B")]
)
def test_short_numbers(number, said):
    assert page._short(number) == said
