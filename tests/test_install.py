"""`pip install` into an environment that has another JAX ends in a package that can be imported."""

import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from test_readme import clone_into

pytestmark = pytest.mark.long
_OLD = "0.11.2"  # for Python 3.12 and later; the newest jax takes this jaxlib, which is wrong on CPUs


def run(*words: str | pathlib.Path, fails: bool = False) -> str:
    ended = subprocess.run(words, capture_output=True, text=True, timeout=1200, check=False)
    if "No matching distribution found for jax" in ended.stderr:
        pytest.skip("no network")
    assert bool(ended.returncode) == fails, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def test_an_older_jax_is_replaced_and_what_a_refusal_says_helps(tmp_path):
    newer = [f"python3.{minor}" for minor in range(12, 20)]
    here = sys.version_info >= (3, 12) and sys.executable
    program = here or next(filter(None, map(shutil.which, newer)), None)
    if program is None:
        pytest.skip("no Python 3.12")
    run(program, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run(*pip, f"jax=={_OLD}", f"jaxlib=={_OLD}")
    (tmp_path / "clone").mkdir()
    run(*pip, clone_into(tmp_path / "clone"))
    look = [python, "-c", "import eagle3_jax, os; os.chdir('/'); from eagle3_jax import Engine; print(Engine.__name__)"]
    assert run(*look) == "Engine\n"
    run(*pip, "--no-deps", f"jaxlib=={_OLD}")
    (remedy,) = re.findall(r"pip (install [^.]*(?:\.[^ ][^.]*)*)\. On an accelerator", run(*look, fails=True))
    run(python, "-m", "pip", *shlex.split(remedy))
    assert run(*look) == "Engine\n"
