"""What a code host reads: workflows, the citation, the links on the package's page."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_is_there_with_pinned_actions_and_without_a_secret(path):
    text = path.read_text()
    assert "secrets." not in text and "password" not in text
    steps = [step for job in yaml.safe_load(text)["jobs"].values() for step in job["steps"]]
    for step in steps:
        if "uses" in step:
            assert re.search(rf"uses: {re.escape(step['uses'])} # v\d+\.\d+\.\d+$", text, re.MULTILINE), "no version"
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"])
            continue
        folder = ROOT / step.get("working-directory", ".")
        for file in re.findall(r"(?<!\S)(?:[\w.]+/)+[\w.]+", step["run"]):
            assert pathlib.Path(os.path.normpath(folder / file)).is_file(), file


def test_the_citation_names_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])


@pytest.mark.parametrize("repository", [None, "Owner/name"])
def test_links_come_from_one_variable(repository, monkeypatch, tmp_path):
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "eagle3_jax").mkdir()
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    if repository:
        monkeypatch.setenv("GITHUB_REPOSITORY", repository)
    command = [sys.executable, "setup.py", "--quiet", "egg_info"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120, capture_output=True)
    metadata = (tmp_path / "eagle3_jax.egg-info/PKG-INFO").read_text()
    links = dict(re.findall(r"^Project-URL: (\w+), (.*)$", metadata, re.MULTILINE))
    assert ("https://owner.github.io/name/" in links.values()) == (len(links) == 4) == bool(repository)
