"""A newcomer's walk finds what fails, what is silent and what is ugly; the long tests walk it."""

import pathlib
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tools"))
import walk

ROOT = walk.ROOT


def run(tmp_path, command: str, silence: float = 20.0) -> str:
    return walk.Step(["bash", "-c", command], tmp_path, stdin="line\n", silence=silence).finish()


def test_output_comes_back_and_stumbles_are_named(tmp_path):
    assert run(tmp_path, "read it; echo $it; echo 2 >&2") == "line\n2\n"
    with pytest.raises(walk.Stumble, match=r"exit 3: status 3, expected 0"):
        run(tmp_path, "exit 3")
    with pytest.raises(walk.Stumble, match=r"silent for 0 s after\n1"):
        run(tmp_path, "echo 1; exec sleep 30", silence=0.4)
    with pytest.raises(walk.Stumble, match=r"shows 'Traceback"):
        run(tmp_path, f"{sys.executable} -c 'import json; json.loads(1)' || true")


@pytest.mark.long
@pytest.mark.timeout(5400)
def test_a_newcomer_does_not_stumble(tmp_path):
    words = [sys.executable, str(ROOT / "tools/walk.py"), "--keep", str(tmp_path / "clone")]
    walked = subprocess.run(words, capture_output=True, text=True, timeout=5000, check=False)
    if "could not get the packages" in walked.stderr:
        pytest.skip("no network")
    assert walked.returncode == 0, walked.stdout + walked.stderr
