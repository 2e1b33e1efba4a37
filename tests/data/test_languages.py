"""Languages: told by letters and by a few words of English."""

import collections
import importlib.resources
import json

import pytest

from eagle3_jax.data.languages import ENGLISH, LATIN, NONE, language


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What is the capital of France?", ENGLISH),
        ("Translate to Russian: the weather is fine. Погода", ENGLISH),
        ("Quelle est la capitale de la France ?", LATIN),
        ("Was ist der Unterschied zwischen Wetter und Klima?", LATIN),
        ("Где находится библиотека?", "Cyrillic"),
        ("東京は日本のどこですか。", "Japanese"),
        ("北京是中国的首都吗?", "Chinese"),
        ("서울은 어디에 있습니까? 首都", "Korean"),
        ("ما هي عاصمة مصر؟", "Arabic"),
        ("2 + 2 = ?", NONE),
        ("", NONE),
    ],
)
def test_language(text, expected):
    assert language(text) == expected


def test_of_the_packaged_prompts_few_are_mistaken():
    mistaken, total = collections.Counter(), collections.Counter()
    for entry in (importlib.resources.files("eagle3_jax.data") / "prompts").iterdir():
        if not entry.name.endswith(".jsonl"):
            continue
        for line in entry.read_text(encoding="utf-8").splitlines():
            english = "multilingual" not in entry.name
            text = "\n".join(m["content"] for m in json.loads(line)["messages"] if m["role"] == "user")
            mistaken[english] += (language(text) == ENGLISH) != english
            total[english] += 1
    assert mistaken[True] <= 4 < total[True] and mistaken[False] <= 5 < total[False]
