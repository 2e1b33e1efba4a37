"""All verbs of a recipe in one command, with verbs that only write down that they were asked."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

ROOT = pathlib.Path(__file__).parents[1]
VERBS = ["prepare", "regenerate", "extract", "train", "export", "evaluate", "report"]

# In place of the environment's Python. A verb does its work once, as the real ones do; it fails where a file
# `fail-VERB` says so, and takes long where `slow-VERB` does.
PYTHON = """#!/usr/bin/env bash
case $* in
*version_info* | "-m pip"*) exit 0 ;;
*run_dir*) echo "$STATE/run"; exit 0 ;;
esac
verb=${2#eagle3_jax.}
if [[ -e $STATE/slow-$verb ]]; then touch "$STATE/began"; exec sleep 60; fi
if [[ -e $STATE/fail-$verb ]]; then echo "the disk is full" >&2; exit 3; fi
if [[ ! -e $STATE/done-$verb ]]; then echo "$(nice) $verb ${*:3}" >>"$STATE/log"; touch "$STATE/done-$verb"; fi
"""


@pytest.fixture
def recipe(tmp_path: pathlib.Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts the script on a config, in an environment that is complete."""
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    sum_of = ["bash", "-c", "cat pyproject.toml requirements/*.txt | cksum"]
    key = subprocess.run(sum_of, cwd=ROOT, capture_output=True, timeout=30)
    (tmp_path / "venv/.installed-train").write_bytes(key.stdout)
    (tmp_path / "run.yaml").touch()

    def start(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(ROOT / "tools/recipe.sh"), *(arguments or [str(tmp_path / "run.yaml")])],
            env=os.environ | {"VENV": str(tmp_path / "venv"), "STATE": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def worked(folder: pathlib.Path) -> list[list[str]]:
    """What verbs did: niceness, name, arguments."""
    log = folder / "log"
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.slow
def test_all_verbs_run_in_their_order_at_the_lowest_priority(recipe, tmp_path):
    process = recipe()
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    lines = worked(tmp_path)
    assert [line[1] for line in lines] == VERBS
    assert {line[0] for line in lines} == {"19"}
    assert all(line[2:4] == ["--config", str(tmp_path / "run.yaml")] for line in lines)
    run = tmp_path / "run"
    asked = ["--prompts", f"{run}/prompts/held_out.jsonl", "--output", f"{run}/evaluation/held_out.json"]
    assert [line[4:] for line in lines] == [["--replace", *asked] if line[1] == "evaluate" else [] for line in lines]
    assert f"The head: {run}/export" in printed and not errors


@pytest.mark.slow
def test_it_ends_with_the_verb_that_fails_and_goes_on_from_there(recipe, tmp_path):
    (tmp_path / "fail-extract").touch()
    process = recipe()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the disk is full" in errors and "'extract' did not finish" in errors and "it goes on where" in errors
    assert [line[1] for line in worked(tmp_path)] == VERBS[:2]
    (tmp_path / "fail-extract").unlink()
    process = recipe()
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert [line[1] for line in worked(tmp_path)] == VERBS, "what was finished is not done again"


def test_a_stop_ends_the_verb_too(recipe, tmp_path):
    (tmp_path / "slow-regenerate").touch()
    process = recipe()
    end = time.monotonic() + 30
    while not (tmp_path / "began").exists() and time.monotonic() < end:
        time.sleep(0.05)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)  # ends when the verb, which holds the pipe too, has
    assert process.returncode == 1 and "stopped. Run the same command again" in errors
    assert time.monotonic() - began < 30
    assert [line[1] for line in worked(tmp_path)] == ["prepare"]
