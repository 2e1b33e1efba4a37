"""The notebook is what a hosted runtime opens, and its cells run from first to last."""

import importlib.util
import json
import pathlib
import site
import subprocess
import sys
import sysconfig

import matplotlib
import pytest

NOTEBOOK = pathlib.Path(__file__).parents[1] / "notebooks" / "quickstart.ipynb"


def cells(kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == kind]


def test_it_is_a_notebook_without_outputs():
    held = json.loads(NOTEBOOK.read_text())
    assert (held["nbformat"], held["metadata"]["kernelspec"]["name"]) == (4, "python3")
    assert len({cell["id"] for cell in held["cells"]}) == len(held["cells"])
    for cell in held["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)
    for number, source in enumerate(cells("code")):
        compile(source, f"cell {number}", "exec")


@pytest.mark.parametrize("place", ["checkout", "wheel", "neither"])
def test_the_first_cell_installs_what_is_there(place, tmp_path, monkeypatch):
    here = tmp_path / "notebooks"
    here.mkdir()
    wheel = here / "eagle3_jax-0.1.0-py3-none-any.whl"
    expected = {
        "checkout": ["--editable", f"{tmp_path}[prepare,train,report]"],
        "wheel": [f"{wheel}[prepare,train,report]"],
    }
    if place == "checkout":
        (tmp_path / "pyproject.toml").touch()
    elif place == "wheel":
        wheel.touch()
    asked, searched = [], []
    monkeypatch.chdir(here)
    monkeypatch.setattr(subprocess, "run", lambda words, check: asked.append(words))
    monkeypatch.setattr(site, "addsitedir", searched.append)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    exec(compile(cells("code")[0], "cell 0", "exec"), {})
    assert asked == [
        [sys.executable, "-m", "pip", "install", "--quiet", *expected.get(place, ["eagle3-jax[prepare,train,report]"])]
    ]
    assert searched == [sysconfig.get_path("purelib")]
    monkeypatch.undo()
    monkeypatch.setattr(subprocess, "run", None)
    exec(compile(cells("code")[0], "cell 0", "exec"), {})  # it is installed


@pytest.mark.long
def test_its_cells_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    names: dict[str, object] = {"__name__": "__main__"}
    for number, source in enumerate(cells("code")):
        exec(compile(source, f"cell {number}", "exec"), names)
    said = capsys.readouterr().out
    assert "accepted drafts" in said and "answers identical" in said
    assert (tmp_path / "runs/notebook/export/model.safetensors").exists()
