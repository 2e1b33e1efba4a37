"""The report puts evaluations and stages together; the table and the picture hold what it says."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from matplotlib.figure import Figure

from eagle3_jax import report
from eagle3_jax.acceptance import AcceptanceCounts
from eagle3_jax.config import FOLDERS, RunConfig
from eagle3_jax.decoding.measure.compare import Tally, total
from eagle3_jax.runs.manifest import begin, finish

CATEGORIES = ("chat", "code", "long_context", "math", "multilingual")
TREES = {
    "chain": {"num_steps": 4, "topk": 1, "num_draft_tokens": 5},
    "tree": {"num_steps": 4, "topk": 3, "num_draft_tokens": 10},
}


def evaluation(name: str, rate: float = 95.0, exact: bool = True) -> dict[str, Any]:
    """A report as `evaluate` writes it, with round numbers."""
    tallies = {}
    for i, category in enumerate(CATEGORIES):
        accepted = [220 - 20 * i, 110 - 10 * i, 50 - 5 * i, 20]
        tokens = 384 - 10 * i
        vanilla_seconds = tokens / (56.0 - i)
        tallies[category] = Tally(
            4, AcceptanceCounts(200, accepted), tokens, tokens / (rate - 6 * i), tokens, vanilla_seconds
        )
    tallies["math"].mismatches.append({"id": "math-3", "position": 17})
    return {
        **total(list(tallies.values())).report(exact=exact),
        "categories": {category: tally.report(exact=exact) for category, tally in tallies.items()},
        "identity": {
            "target": {"name": "smollm2-135m-instruct", "dtype": "float32"},
            "draft": {"folder": "runs/x/export", "files": {"model.safetensors": 8 * "ab"}},
            "prompts_file": {"name": "held_out.jsonl", "sha256": "cd"},
        },
        "config": {"evaluate": {"tree": TREES[name], "temperature": 0.0, "max_tokens": 96, "batch_size": 1}},
        "hardware": {"cpu": "A CPU @ 2.60GHz", "cores": 2, "accelerator": None, "devices": 1},
        "versions": {"python": "3.11.7", "jax": "0.10.2"},
    }


@pytest.fixture
def drawn(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], Any]:
    """The figure of a report."""

    def draw(made: dict[str, Any]) -> Any:
        figures: list[Any] = []
        with monkeypatch.context() as patched:
            patched.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
            report.draw(made, tmp_path / "x.png")
        return figures[0]

    return draw


@pytest.fixture
def config(tmp_path: pathlib.Path) -> RunConfig:
    """A run whose evaluations and clock are there, and whose prepare stage has finished."""
    config = RunConfig(run_dir=str(tmp_path))
    folder = config.folder("evaluate")
    folder.mkdir()
    for name, rate in (("tree", 108.0), ("chain", 95.0)):
        (folder / f"{name}.json").write_text(json.dumps(evaluation(name, rate)))
    (tmp_path / "stages.json").write_text(json.dumps({"install": 90, "prepare": 30.5, "evaluate-chain": 60}))
    begin(config.folder("prepare"), {"verb": "prepare"})
    finish(config.folder("prepare"), train=200)
    begin(config.folder("train"), {"verb": "train"})  # unfinished
    return config


def test_a_run_ends_in_a_report_and_a_picture(config: RunConfig, tmp_path: pathlib.Path) -> None:
    made = report.run(config)
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(made))
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert list(made["drafts"]) == ["chain", "tree"]
    chain = evaluation("chain", 95.0)
    for key in ("tau", "alpha", "speedup", "identical", "prompts", "tokens_per_second"):
        assert made["drafts"]["chain"][key] == chain[key]
        assert made["drafts"]["chain"]["categories"]["math"][key] == chain["categories"]["math"][key]
    assert made["stages"]["prepare"] == {"seconds": 30.5, "results": {"train": 200}}
    assert made["stages"]["install"] == {"seconds": 90}
    assert made["prompts_file"] == chain["identity"]["prompts_file"]
    assert "train" not in made["stages"] and set(made["stages"]) <= {"install", "evaluate-chain", *FOLDERS}


def test_the_table_says_it_all(config: RunConfig) -> None:
    text = report.table(report.run(config))
    lines = text.splitlines()
    assert "total 3.0 minutes" in lines
    chain = evaluation("chain", 95.0)
    row = next(line for line in lines if line.startswith("all"))
    assert row.split() == [
        "all",
        f"{chain['tokens_per_second']['vanilla']:.1f}",
        f"{chain['tokens_per_second']['speculative']:.1f}",
        f"{chain['speedup']:.2f}x",
        f"{chain['tau']:.2f}",
        "19/20",
    ]
    header = next(line for line in lines if line.startswith("chain (depth 4, 5 tokens)"))
    assert len(header) == len(row)
    assert any(line.startswith("tree (depth 4, 10 tokens)") for line in lines)
    assert lines[-3:] == [
        "drafted by runs/x/export (sha256: model.safetensors abababab)",
        "temperature 0, batch 1, 96 tokens per prompt",
        "smollm2-135m-instruct in float32 on A CPU @ 2.60GHz, 2 cores",
    ]


def test_the_engine_s_own_choice_is_the_headline(drawn) -> None:
    evaluations, chosen = {name: evaluation(name) for name in TREES}, evaluation("chain", 120.0)
    assert report.headline(report.assemble(evaluations, {})) is None
    chosen["config"]["evaluate"]["tree"] = "auto"
    made = report.assemble(evaluations | {"auto": chosen}, {})
    headline = f"{chosen['speedup']:.2f} times as fast as vanilla decoding"
    assert report.table(made).splitlines()[-1] == f"{headline}, with what the engine chose"
    figure = drawn(made)
    assert figure.get_suptitle().strip() == f"smollm2-135m-instruct with drafts: {headline}"
    speedups, shares = figure.axes
    assert "auto" in [bars.get_label() for bars in speedups.containers]
    assert [line.get_label() for line in shares.lines] == ["chain", "tree"], "of mixed shapes no position is drawn"


def test_bars_and_points_of_the_picture_are_the_report_s_numbers(drawn) -> None:
    made = report.assemble({name: evaluation(name) for name in TREES}, {})
    speedups, shares = (figure := drawn(made)).axes
    labels = [text.get_text().replace("\n", "_") for text in speedups.get_xticklabels()]
    assert labels == ["all prompts", *CATEGORIES]
    assert [bars.get_label() for bars in speedups.containers] == ["chain", "tree"]
    for bars in speedups.containers:
        draft = made["drafts"][bars.get_label()]
        parts = [draft, *(draft["categories"][category] for category in CATEGORIES)]
        assert [bar.get_height() for bar in bars] == pytest.approx([part["speedup"] for part in parts])
    assert [line.get_label() for line in shares.lines] == ["chain", "tree"]
    for line in shares.lines:
        positions, percents = line.get_data()
        assert list(positions) == [1, 2, 3, 4]
        assert list(percents) == pytest.approx([100 * share for share in made["drafts"][line.get_label()]["alpha"]])
    for axes in (speedups, shares):
        assert {"chain", "tree"} <= {text.get_text() for text in axes.get_legend().get_texts()}
    headline = " ".join(text.get_text() for text in figure.texts)
    for name, draft in made["drafts"].items():
        assert f"{name}: speed-up {draft['speedup']:.2f}x, tau {draft['tau']:.2f}, identical 19/20" in headline


def test_each_evaluation_keeps_its_own_draft_and_settings(drawn) -> None:
    older, copied = evaluation("tree"), evaluation("chain")
    older["identity"]["draft"]["files"] = {"model.safetensors": 8 * "cd"}
    copied["identity"]["draft"] = {"folder": "lookup", "files": None}
    copied["config"]["evaluate"] |= {"temperature": 0.5, "max_tokens": 7, "batch_size": 4}
    made = report.assemble({"chain": evaluation("chain"), "tree": older, "copied": copied}, {})
    settings = [
        "chain: temperature 0, batch 1, 96 tokens per prompt",
        "tree: temperature 0, batch 1, 96 tokens per prompt",
        "copied: temperature 0.5, batch 4, 7 tokens per prompt",
    ]
    assert report.table(made).splitlines()[-7:-1] == [
        "chain: drafted by runs/x/export (sha256: model.safetensors abababab)",
        "tree: drafted by runs/x/export (sha256: model.safetensors cdcdcdcd)",
        "copied: drafted by lookup",
        *settings,
    ]
    assert drawn(made).get_supxlabel().splitlines() == ["A CPU @ 2.60GHz, 2 cores, float32", *settings]


def test_an_evaluation_without_rounds_is_dashes(drawn) -> None:
    nothing = evaluation("chain")
    nothing["config"]["evaluate"]["tree"] = "auto"
    for part in (nothing, nothing["categories"]["math"]):
        part |= {"tau": None, "alpha": [], "speedup": None}
    made = report.assemble({"chain": nothing}, {})
    lines = report.table(made).splitlines()
    assert next(line for line in lines if line.startswith("math")).split()[-3:] == ["-", "-", "3/4"]
    assert "accepted per draft position, of those that got there: -" in lines
    assert report.headline(made) is None
    figure = drawn(made)
    assert "chain: speed-up -, tau -, identical 19/20" in [text.get_text() for text in figure.texts]
    shares = figure.axes[1]
    assert list(shares.get_xticks()) == [1] and shares.get_xlim()[0] < shares.get_xlim()[1]


def test_evaluations_of_different_prompts_are_not_put_together() -> None:
    other = evaluation("tree")
    other["identity"]["prompts_file"] = {"name": "train.jsonl", "sha256": "ef"}
    with pytest.raises(ValueError, match=r"evaluation/tree.json: prompts_file: found .*train.jsonl"):
        report.assemble({"chain": evaluation("chain"), "tree": other}, {})


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff", b'{"identity": 3}'])
def test_an_evaluation_that_is_none_is_refused_by_name(tmp_path, content):
    config = RunConfig(run_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"no \*.json, expected the output of `python -m eagle3_jax.evaluate`"):
        report.run(config)
    config.folder("evaluate").mkdir()
    (config.folder("evaluate") / "chain.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"chain\.json"):
        report.run(config)


def test_tables_of_the_data_need_finished_prompts_alone(tmp_path: pathlib.Path, capsys) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"run_dir": str(tmp_path / "run")}))
    with pytest.raises(SystemExit, match=r"eagle3_jax.report: .*manifest.json: not found, expected the output of"):
        report.main(["--config", str(path), "--data"])
    prompts = tmp_path / "run" / FOLDERS["prepare"]
    begin(prompts, {"verb": "prepare", "prepare": {}})
    counted = {"prompts": {"train": 300, "held_out": 1, "rejects": 0}, "sources": {"packaged": 4000}, "rejected": {}}
    counted |= {"categories": {"train": {"code": 300}, "held_out": {"rare": 1}}, "personal_data": {"EMAIL_ADDRESS": 7}}
    counted |= {"provenance": {"packaged": {"mit": 301}}, "characters": {"code": {"64": 40, "1024": 26}}}
    finish(prompts, **counted)

    def shown() -> list[list[str]]:
        report.main(["--config", str(path), "--data"])
        return [line.split() for line in capsys.readouterr().out.splitlines()]

    rows = shown()
    assert ["read", "4,000"] in rows and ["EMAIL_ADDRESS", "7"] in rows and ["packaged,", "mit", "301"] in rows
    assert ["code", "300", "0", "64"] in rows and ["rare", "0", "1", "0"] in rows
    assert not any("left" in row for row in rows), "nothing was left out"
    features = tmp_path / "run" / FOLDERS["extract"]
    begin(features, {"verb": "extract"})
    learned = {"categories": {"code": 9876}, "provenance": {"packaged": {"mit": 299}}}
    finish(features, train=learned, draft_vocabulary_coverage=0.975)
    rows = shown()
    assert ["code", "300", "0", "9,876", "64"] in rows and ["packaged,", "mit", "301", "299"] in rows
    assert rows[-1] == "the draft vocabulary holds 97.50 % of the tokens of answers".split()
    assert not (tmp_path / "run/report.json").exists()
