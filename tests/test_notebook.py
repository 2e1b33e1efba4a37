"""The notebook is what a hosted runtime opens, and its cells run from first to last."""

import json
import pathlib
import re

import matplotlib
import pytest

NOTEBOOK = pathlib.Path(__file__).parents[1] / "notebooks" / "quickstart.ipynb"


def cells(kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == kind]


def test_it_shows_what_its_cells_printed_when_they_ran_in_order():
    held = json.loads(NOTEBOOK.read_text())
    assert (held["nbformat"], held["metadata"]["kernelspec"]["name"]) == (4, "python3")
    assert len({cell["id"] for cell in held["cells"]}) == len(held["cells"])
    ran = [cell for cell in held["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in ran] == list(range(1, len(ran) + 1))
    outputs = [output for cell in ran for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream", "display_data"}
    texts = "".join(json.dumps(output) for output in outputs if output["output_type"] == "stream")
    assert not re.search(r"/(root|home|tmp|work|usr)/|Traceback", texts)
    for number, source in enumerate(cells("code")):
        compile(source, f"cell {number}", "exec")


@pytest.mark.long
def test_its_cells_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    names: dict[str, object] = {"__name__": "__main__"}
    for number, source in enumerate(cells("code")):
        exec(compile(source, f"cell {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "accepted drafts" in printed and "answers identical" in printed
    assert (tmp_path / "runs/notebook/export/model.safetensors").exists()
