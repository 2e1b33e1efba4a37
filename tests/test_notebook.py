"""The notebook is what a hosted runtime opens, and its cells run from first to last."""

import json
import pathlib

import matplotlib
import pytest

NOTEBOOK = pathlib.Path(__file__).parents[1] / "notebooks" / "quickstart.ipynb"


def cells(kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == kind]


@pytest.mark.any_jax
def test_it_is_a_notebook_without_outputs():
    held = json.loads(NOTEBOOK.read_text())
    assert (held["nbformat"], held["metadata"]["kernelspec"]["name"]) == (4, "python3")
    assert len({cell["id"] for cell in held["cells"]}) == len(held["cells"])
    for cell in held["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)
    for number, source in enumerate(cells("code")):
        compile(source, f"cell {number}", "exec")
    assert "find_spec" in cells("code")[0]  # the first one installs


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
